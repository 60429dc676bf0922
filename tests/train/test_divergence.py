"""Runs that diverge: they say so in one line, and leave nothing that is not finite."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm.train import loop
from tied_lm.train.loop import Diverged
from tied_lm.train.step import Trainer


@pytest.fixture
def one_by_one(monkeypatch):
    """One update to a dispatch, so that a stop comes one step after it is asked for."""
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)


def checkpoint_steps(place):
    return sorted(int(path.name) for path in (place / "checkpoints").iterdir())


def finite(text):
    values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))
    undefined = {tag for tag, value in values.items() if value is None}
    assert all(tag.endswith(("/share", "/cosine", "/common_drift")) for tag in undefined)
    return all(math.isfinite(value) for tag, value in values.items() if tag not in undefined)


def assert_diverges(place, config, step):
    """The run says so in one line, and leaves nothing that is not finite."""
    with pytest.raises(Diverged, match=rf"^[^\n]* no longer finite at step {step} in [^\n]*$"):
        tiny.train(place, config)
    assert all(map(finite, (place / "metrics.jsonl").read_text().splitlines()))
    assert all(finite(path.read_text()) for path in place.glob("checkpoints/*/metrics/metrics"))
    for saved in checkpoint_steps(place)[::-1]:
        state = tiny.saved_state(place, config)
        assert int(state.step) == saved
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
        shutil.rmtree(place / "checkpoints" / str(saved))


def test_a_rate_that_is_too_large(tmp_path, caplog):
    sgd = ("optimizer.name=sgd", "optimizer.learning_rate=1e30")
    assert_diverges(tmp_path / "run", tiny.make_config(*sgd, "checkpoint.every=1", "checkpoint.keep=40"), 0)
    assert not caplog.records


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("eval_every", "scalars_every", "checkpoint_every", "noticed"),
    [(10, 39, 39, 10), (10, 39, 10, 10), (39, 39, 1, 11), (39, 1, 39, 11), (39, 39, 39, 13)],
    ids=["held-out loss", "its checkpoint", "state", "training loss", "probe"],
)
def test_parameters_that_are_too_large(
    tmp_path, monkeypatch, caplog, eval_every, scalars_every, checkpoint_every, noticed
):
    """From step 10 on the parameters are so large that the loss is not finite."""
    advance = Trainer.advance

    def fail_at_ten(trainer, *arguments):
        state, records = advance(trainer, *arguments)
        large = jax.tree.map(lambda leaf: leaf * 0 + 1e30, state.params)
        return (dataclasses.replace(state, params=large) if int(state.step) == 10 else state), records

    monkeypatch.setattr(Trainer, "advance", fail_at_ten)
    gaps = (f"train.eval_every={eval_every}", f"log.scalars_every={scalars_every}")
    config = tiny.make_config(*gaps, f"checkpoint.every={checkpoint_every}", "checkpoint.keep=40")
    assert_diverges(tmp_path / "run", config, noticed)
    assert not caplog.records
