"""Which held-out sequences belong together, so that an interval does not take them for independent."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

FEWEST_FILES = 20  # that make files the clusters
BLOCKS = 32  # of consecutive windows, where there are fewer files


class Clusters(NamedTuple):
    """The cluster of each held-out sequence, and what a cluster is."""

    kind: str  # sequence | file | block | lane
    ids: Int[np.ndarray, "S"]


def clusters_of_windows(
    starts_S: Int[np.ndarray, "S"], used_S: Bool[np.ndarray, "S"], file_ends: Int[np.ndarray, "F"], lanes: int | None
) -> Clusters:
    """The clusters of windows of a text: files where enough are held out, else lanes, else blocks of neighbours.

    A window belongs to the file in which it starts. What is not used has the cluster 0.

    Args:
        starts_S: where the windows begin in the held-out text, in the order of the sequences.
        used_S: which of them are scored.
        file_ends: where its files end.
        lanes: of contiguous windows, which follow each other in turn; None if the order is random.
    """
    starts_W = starts_S[used_S]
    files_W = np.searchsorted(file_ends, starts_W, side="right")
    if np.unique(files_W).size >= FEWEST_FILES:
        kind, ids_W = "file", files_W
    elif lanes is not None:
        kind, ids_W = "lane", np.flatnonzero(used_S) % lanes
    else:
        rank_W = np.argsort(np.argsort(starts_W))
        kind, ids_W = "block", rank_W * BLOCKS // starts_W.size if starts_W.size > BLOCKS else rank_W
    ids_S = np.zeros(used_S.size, np.int64)
    ids_S[used_S] = ids_W
    return Clusters(kind, ids_S)
