"""Counts on a logarithmic axis, against NumPy."""

import jax
import numpy as np

from tied_lm.record.histogram import BINS, EDGES, log_histogram


def test_counts_are_those_of_numpy():
    norms = 10 ** np.random.default_rng(0).uniform(-11.9, 1.9, 5000).astype(np.float32)
    counts = np.asarray(jax.jit(log_histogram)(norms))
    expected, _ = np.histogram(np.log10(norms.astype(np.float64)), EDGES)
    # A norm within rounding of an edge may count on either side of it.
    assert np.abs(np.cumsum(counts - expected)).max() <= 1
    assert counts.sum() == 5000


def test_zeros_are_left_out_and_far_values_count_at_the_ends():
    counts = np.asarray(log_histogram(np.array([0, 0, 1e-20, 1.5, 1e9], np.float32)))
    assert counts.shape == (BINS,)
    assert (counts[0], counts[120 + 1], counts[-1], counts.sum()) == (1, 1, 1, 3)
