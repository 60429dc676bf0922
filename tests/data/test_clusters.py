"""Which held-out sequences are taken as one."""

import numpy as np
import pytest

from tied_lm.data.clusters import BLOCKS, FEWEST_FILES, clusters_of_windows


def test_a_window_belongs_to_the_file_in_which_it_starts():
    ends = np.arange(1, FEWEST_FILES + 1) * 10
    starts = np.array([9, 10, 0, 195, *range(20, 190, 10), -5])
    used = starts >= 0
    found = clusters_of_windows(starts, used, ends, None)
    assert found.kind == "file"
    assert found.ids.tolist() == [max(start, 0) // 10 for start in starts]


@pytest.mark.parametrize("windows", [7, 100])
def test_neighbours_are_a_block_where_files_are_few(windows):
    starts = np.random.default_rng(0).permutation(windows) * 5
    found = clusters_of_windows(starts, starts >= 0, np.array([30, 500]), None)
    assert found.kind == "block"
    assert np.unique(found.ids).size == min(windows, BLOCKS)
    assert np.all(np.diff(found.ids[np.argsort(starts)]) >= 0)
    assert np.ptp(np.bincount(found.ids)) <= 1


def test_a_lane_is_one_where_windows_follow_each_other():
    found = clusters_of_windows(np.array([0, 50, 5, 55, 10, 60]), np.ones(6, bool), np.array([100]), 2)
    assert found.kind == "lane"
    assert found.ids.tolist() == [0, 1, 0, 1, 0, 1]
