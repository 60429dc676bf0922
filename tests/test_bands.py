"""Bands by frequency, and what is said of the rows in each."""

import numpy as np
import pytest

from tied_lm.bands import NAMES, UNSEEN, bands_of, describe, split_scalars
from tied_lm.rows import RowStats


@pytest.mark.parametrize(
    ("frequencies", "bands"),
    [
        ([0.1] * 10, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        ([0.2] * 5, [0, 1, 2, 3, 4]),
        # Mass before each, from the most frequent on: 0, .5, .8, .9.
        ([0.1, 0.5, 0.1, 0.3], [4, 0, 4, 2]),
        ([0.19, 0.19, 0.62], [3, 4, 0]),
        ([0.0, 0.5, 0.0, 0.5], [UNSEEN, 0, UNSEEN, 2]),
        ([1.0, 0.0], [0, UNSEEN]),
        # Equal frequencies keep their order, and a band may end among them.
        ([0.25, 0.25, 0.25, 0.25], [0, 1, 2, 3]),
        ([0.15, 0.4, 0.15, 0.15, 0.15], [2, 0, 2, 3, 4]),
    ],
)
def test_bands_by_hand(frequencies, bands):
    assert bands_of(np.array(frequencies)).tolist() == bands


@pytest.mark.parametrize("v", [5, 10, 35, 1000, 50_000])
def test_rounding_moves_no_row_over_a_cut(v):
    assert np.bincount(bands_of(np.full(v, 1 / v))).tolist() == [v // 5] * 5


def test_names():
    assert NAMES == ("0", "1", "2", "3", "4", "unseen")
    assert NAMES[UNSEEN] == "unseen"


def stats_of(lookup, scoring, pull):
    """Row statistics of dense tables; push = scoring - pull."""

    def norm(table):
        return np.linalg.norm(table, axis=-1)

    norms = norm(lookup) * norm(scoring)
    cosine = np.divide(np.sum(lookup * scoring, -1), norms, out=np.zeros(len(lookup)), where=norms > 0)
    counts = np.zeros(len(lookup), int)
    parts = (lookup, scoring, pull, scoring - pull, lookup + scoring)
    return RowStats(*(norm(part) for part in parts), cosine, counts, counts)


@pytest.fixture
def tables():
    rng = np.random.default_rng(0)
    # Rows of very different sizes, so that a mean over rows is far from the whole.
    sizes = np.logspace(0, -3, 12)[:, None]
    lookup, scoring, pull = (sizes * rng.standard_normal((12, 4)) for _ in range(3))
    lookup[3] = 0
    return lookup, scoring, pull


def test_share_and_cosine_are_those_of_the_whole_table(tables):
    lookup, scoring, pull = tables
    told = describe(stats_of(*tables))
    for part, table in (("lookup", lookup), ("scoring", scoring), ("pull", pull), ("push", scoring - pull)):
        assert told[part] == pytest.approx(np.linalg.norm(table))
    assert told["total"] == pytest.approx(np.linalg.norm(lookup + scoring))
    a, b = np.sum(lookup**2), np.sum(scoring**2)
    assert told["share"] == pytest.approx(a / (a + b))
    assert told["cosine"] == pytest.approx(np.sum(lookup * scoring) / np.sqrt(a * b))
    assert abs(told["cosine"] - stats_of(*tables).cosine.mean()) > 0.05


def test_cosine_by_hand():
    # The large rows agree, the small ones oppose each other: (100 - 1) / 101, where the mean of row cosines is 0.
    rows = np.array([[10.0, 0], [1.0, 0]])
    told = describe(stats_of(rows, rows * [[1], [-1]], rows))
    assert told["cosine"] == pytest.approx(99 / 101)
    assert told["share"] == 0.5


def test_nothing_of_nothing_is_undefined():
    zero, one = np.zeros((2, 3)), np.ones((2, 3))
    told = describe(stats_of(zero, zero, zero))
    assert {name for name, value in told.items() if np.isnan(value)} == {"share", "cosine"}
    assert {value for value in told.values() if not np.isnan(value)} == {0.0}
    for lookup, scoring, share in ((zero, one, 0), (one, zero, 1)):
        told = describe(stats_of(lookup, scoring, zero))
        assert told["share"] == share
        assert np.isnan(told["cosine"])


def test_rows_without_a_cosine_do_not_spoil_that_of_all():
    rows, zero = np.array([[3.0, 0], [0, 0], [0, 4.0]]), np.array([[1.0, 0], [2.0, 0], [0, 1.0]])
    found = stats_of(rows, zero, rows)
    assert describe(found.marked()) == describe(found)
    assert describe(found)["cosine"] == pytest.approx((3 + 4) / (5 * 6**0.5))


def test_scalars_of_a_tied_model_by_band(tables):
    bands = np.array([0, 0, 1, 1, 1, 1, UNSEEN, UNSEEN, UNSEEN, UNSEEN, UNSEEN, UNSEEN])
    scalars = split_scalars(stats_of(*tables), bands, tied=True)
    parts = ("lookup", "scoring", "pull", "push", "total")
    assert scalars.keys() == {
        *(f"grad_norm/{part}" for part in parts),
        *(f"split/{name}" for name in ("share", "cosine")),
        *(f"band/{b}/{name}" for b in ("0", "1", "unseen") for name in (*parts, "share", "cosine")),
    }
    whole = describe(stats_of(*tables))
    assert scalars["grad_norm/push"] == whole["push"]
    assert scalars["split/cosine"] == whole["cosine"]
    lookup, scoring = tables[0][bands == 1], tables[1][bands == 1]
    assert scalars["band/1/lookup"] == pytest.approx(np.linalg.norm(lookup))
    a, b = np.sum(lookup**2), np.sum(scoring**2)
    assert scalars["band/1/share"] == pytest.approx(a / (a + b))
    assert scalars["band/1/cosine"] == pytest.approx(np.sum(lookup * scoring) / np.sqrt(a * b))


def test_what_is_hypothetical_when_untied_says_so(tables):
    bands = np.zeros(12, int)
    tied, untied = (split_scalars(stats_of(*tables), bands, tied=tied) for tied in (True, False))
    hypothetical = {"grad_norm/total", "split/share", "split/cosine"}
    hypothetical |= {f"band/0/{name}" for name in ("total", "share", "cosine")}
    assert untied == {("hypothetical/" if tag in hypothetical else "") + tag: value for tag, value in tied.items()}
