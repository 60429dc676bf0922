"""What a recorder refuses, and that nothing is written then."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.record.test_rowrecorder import COUNTS, PARTS, V, record, steps_of, use_stats
from tied_lm import RowRecorder, UseStats, open_run


def test_nothing_is_written_of_a_record_that_is_refused(tmp_path):
    with RowRecorder(tmp_path, V, counts=COUNTS) as opened:
        opened.record(0, use_stats(0))
        with pytest.raises(ValueError, match=re.escape("lookup has shape (5,), not (6,)") + "$"):
            opened.record(1, use_stats(1, v=5))
    assert steps_of(tmp_path) == ([0],) * 3
    with pytest.raises(ValueError, match="is closed"):
        opened.record(2, use_stats(2))
    opened.close()


REFUSED = {
    "step = 0.5 is not possible; allowed: an integer from 0 to 2**63 - 1": (0.5, None),
    "step = 9223372036854775808 is not possible": (2**63, None),
    "step = True is not possible": (True, None),
    "step = -1 is not possible": (-1, None),
    "step = '7' is not possible": ("7", None),
    "the tag 'step' is one that the recorder itself writes": (7, {"step": 1}),
    "the tag 'split/share' is one": (7, {"split/share": 1}),
    "the tag 'band/unseen/other' is one": (7, {"band/unseen/other": 1}),
    "the tag 'token/rare_0/total' is one": (7, {"token/rare_0/total": 1}),
    "the tag 'rows_zero/lookup' is one": (7, {"rows_zero/lookup": 1}),
    "the tag 'rows/lookup' is one": (7, {"rows/lookup": 1}),
    "the tag 'rows_nonfinite' is one": (7, {"rows_nonfinite": 1}),
    "3 is no tag: a text of printable characters": (7, {"a": 1, 3: 2}),
    "'' is no tag": (7, {"": 1}),
    "'a\\x1bb' is no tag": (7, {"a\x1bb": 1}),
    "'\\ud800' is no tag": (7, {"\ud800": 1}),
    "loss = array([1., 1.]) is not one number": (7, {"loss": np.ones(2)}),
    "loss = array([], dtype=float64) is not one number": (7, {"loss": np.ones(0)}),
    "loss = [1] is not one number": (7, {"loss": [1]}),
    "loss = '1.5' is not one number": (7, {"loss": "1.5"}),
    "loss = None is not one number": (7, {"loss": None}),
    "loss = True is not one number": (7, {"loss": True}),
    "loss = (1+2j) is not one number": (7, {"loss": 1 + 2j}),
    "scalars are a list": (7, [1.0]),
    "step = array([7]) is not possible": (np.array([7]), None),
    "step = Array(7., dtype=float32) is not possible": (jnp.float32(7), None),
    "at step 7, loss = nan is not finite in float32": (7, {"loss": float("nan")}),
    "at step 7, loss = inf is not finite in float32": (7, {"loss": jnp.full(1, jnp.inf)}),
    "at step 7, loss = 1e+39 is not finite in float32": (7, {"loss": 1e39}),
}
REFUSED_STATS = {
    "cosine is of <U1, not of numbers": use_stats(7)._replace(cosine=["a"] * V),
    "at step 7, lookup is not finite in float32": use_stats(7)._replace(lookup=np.full(V, 1e39)),
    "at step 7, other is not finite in float32": use_stats(7)._replace(other=np.full(V, np.nan)),
    "stats are a tuple, not RowStats or UseStats": (1, 2),
    "stats are a NoneType, not RowStats or UseStats; with rows=True there are some": None,
    "lookup has shape (2, 6), not (6,): of several layers or steps record one at a time, jax.tree.map": UseStats(
        *np.ones((5, 2, V))
    ),
    "lookup has shape (6, 2), not (6,)": UseStats(*np.ones((5, V, 2))),
}


def files_of(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.untyped
def test_a_refused_record_leaves_no_trace(tmp_path, first):
    """In no file, whether it would have been the first record or not, and the same step can be written after it."""
    with RowRecorder(tmp_path, V, counts=COUNTS, on_nonfinite="raise") as opened:
        if not first:
            opened.record(3, use_stats(3), {"loss": 1.0})
            opened.flush()
        before = files_of(tmp_path)
        for words, (step, scalars) in REFUSED.items():
            with pytest.raises(ValueError, match="^" + re.escape(words)):
                opened.record(step, use_stats(7), scalars)
        for words, stats in REFUSED_STATS.items():
            with pytest.raises(ValueError, match="^" + re.escape(words)):
                opened.record(7, stats)
        with pytest.raises(ValueError, match=r"^record is called within jit or scan, .*; record what these return"):
            jax.jit(lambda stats: opened.record(7, stats))(use_stats(7))
        opened.flush()
        assert files_of(tmp_path) == before
        opened.record(np.int64(7), use_stats(7), {"loss (train)": jnp.bfloat16(1.5), "n": 2, "d": jnp.float32(3)})
    assert steps_of(tmp_path) == ([7] if first else [3, 7],) * 3
    run = open_run(tmp_path)
    assert [run.scalars(tag)[7] for tag in ("loss (train)", "n", "d")] == [1.5, 2, 3]
    curves = {tiny.board_tag(tag, {"frequent_1": "1", "middle_3": "3", "rare_0": "0"}) for tag in run.last()}
    assert {tag for tag, step in tiny.board_values(tmp_path) if step == 7} == curves - {"step"} | {
        f"rows/{part}" for part in PARTS
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"counts": np.ones(5)}, "counts are not 6 numbers"),
        ({"counts": np.zeros(6)}, "counts are not 6 numbers"),
        ({"counts": np.array([1, -1, 1, 1, 1, 1])}, "counts are not 6 numbers"),
        ({"token_strings": ["a"]}, "token_strings has 1 entries, not one"),
        ({"token_strings": 5}, "token_strings = 5 is no list"),
        ({"token_strings": range(6)}, "token_strings are not all texts"),
        ({"tokens": 5}, "tokens = 5 is no list"),
        ({"tokens": (6,)}, r"tokens = \[6\] are not all in \[0, 6\)"),
        ({"tokens": ("a",)}, "tokens = 'a' is not possible; allowed: an integer from 0"),
        ({"counts": "abcdef"}, "counts are not 6 numbers"),
        ({"first_step": 1.5}, "first_step = 1.5 is not possible; allowed: an integer from 0"),
        ({"on_nonfinite": "ignore"}, r"on_nonfinite = 'ignore' is not possible; allowed: record \| raise"),
        ({"vocab_size": 0}, "vocab_size = 0 is not possible; allowed: an integer from 1"),
    ],
)
@pytest.mark.untyped
def test_arguments_that_do_not_fit(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        RowRecorder(tmp_path / "new", **({"vocab_size": V} | kwargs))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_the_folder_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=f"holds a {name} that no RowRecorder wrote"):
        RowRecorder(tmp_path, V)


def test_a_size_that_no_statistics_have_costs_nothing(tmp_path):
    with RowRecorder(tmp_path, 10**15) as opened, pytest.raises(ValueError, match="lookup has shape"):
        opened.record(0, use_stats(0))


def test_rows_of_another_vocabulary_or_other_counts_are_not_continued(tmp_path):
    record(tmp_path, [0])
    with RowRecorder(tmp_path, 7) as opened, pytest.raises(ValueError, match="of 6 rows, not"):
        opened.record(1, use_stats(1, v=7))
    for counts in (None, COUNTS + 1):
        with RowRecorder(tmp_path, V, counts=counts) as opened, pytest.raises(ValueError, match="of other counts"):
            opened.record(1, use_stats(1))
    assert steps_of(tmp_path) == ([0],) * 3
