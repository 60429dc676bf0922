"""What a run is said to need, against what it takes."""

import threading
from contextlib import nullcontext

import pytest

from configs import toy
from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.config import override
from tied_lm.study.comparison import complete
from tied_lm.study.plan import Arm, Plan
from tied_lm.train import resources
from tied_lm.train.build import build_stream
from tied_lm.train.loop import Interrupted


def taken(place):
    """Bytes on the disk, in whole blocks, folders among them."""
    return sum(path.lstat().st_blocks * 512 for path in (place, *place.rglob("*")))


LONG = ("train.steps=400", "log.rows_every=1", "log.scalars_every=1", "train.eval_every=5", "log.tokens=3,5,7")


@pytest.mark.parametrize(
    ("overrides", "stops"),
    [
        ((), []),
        (("model.tying=untied", "checkpoint.keep=1"), [9, 20, 30]),
        (("model.tying=gated_rare_rows",), []),
        pytest.param(("model.body=lstm", "body.depth=2"), [], marks=pytest.mark.slow),
        pytest.param(LONG, [], marks=pytest.mark.slow),
        (("data.vocab_size=5000", "train.steps=10", "checkpoint.every=5"), []),
    ],
    ids=["tied", "interrupted", "parts of the push", "body", "many records", "more rows than a chunk has"],
)
def test_a_folder_takes_at_most_what_was_said(tmp_path, overrides, stops):
    config = tiny.make_config(*overrides)
    said = Arm.of(config, build_stream(config)).disk_bytes()
    for stop_after in (*stops, None):
        with nullcontext() if stop_after is None else pytest.raises(Interrupted):
            tiny.train(tmp_path / "run", config, stop_after)
        assert taken(tmp_path / "run") <= said
    assert said < 8 * taken(tmp_path / "run")  # or it would refuse disks that do


@pytest.mark.slow
def test_a_comparison_takes_at_most_what_was_said(tmp_path):
    values = toy.get_config().to_dict()
    for text in (*tiny.FIELDS, "compare.seeds=3", "compare.arms.more=model.tying=projection"):
        override(values, *text.split("=", 1))
    plan = Plan.of(values)
    complete(tmp_path, plan, threading.Event(), lambda arm, seed: lambda updates: None)
    assert taken(tmp_path) <= plan.disk_bytes() < 8 * taken(tmp_path)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("data.vocab_size", ["data.vocab_size=1000000000"]),
        ("data.batch_size", ["data.batch_size=100000", "data.length=10000"]),
        ("data.length", ["data.length=10000000", "model.body=transformer", "body.heads=2"]),
        ("data.eval_tokens", ["data.eval_tokens=1000000000", "data.length=1"]),
        ("model.features", ["model.features=65536", "model.body=mlp"]),
    ],
)
def test_what_the_memory_does_not_hold_is_refused_with_the_figure(field, overrides, monkeypatch):
    monkeypatch.setattr(resources, "memory_of_machine", lambda: 8 * 10**9)
    config = tiny.make_config(*overrides)
    need = sum(resources.memory_bytes(config).values())
    assert need > 8e9
    with pytest.raises(ConfigError) as error:
        resources.check_memory(config)
    assert str(error.value).startswith(f"{field} = {overrides[0].split('=')[1]} ")
    assert str(error.value).endswith(
        f"; the run needs at least {resources.shown(need)}, and there are {resources.shown(8e9)}"
    )
    resources.check_memory(tiny.make_config())


def test_the_memory_of_this_machine_is_known():
    assert 1e8 < resources.memory_of_machine() < 1e15


def test_a_disk_that_is_too_small_is_refused_with_both_figures(tmp_path):
    resources.check_disk(tmp_path / "a" / "b", 1000)
    with pytest.raises(ConfigError, match=r"^workdir = '.*/a/b' is not possible; .* 1e\+06 TB free; there are [\d.]+ "):
        resources.check_disk(tmp_path / "a" / "b", 10**18)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 kB"), (1234, "1.23 kB"), (5.6e8, "560 MB"), (2e9, "2 GB"), (3e15, "3e+03 TB")]
)
def test_sizes_in_words(size, words):
    assert resources.shown(size) == words
