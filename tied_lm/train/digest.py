"""Checksums of the arrays of a state, by blocks of rows: the same however they lie on devices and in processes.

A checksum is a sum over entries, modulo 2**64: of the bits of each, times an odd number for its row and one for its
column. So every part adds its share by itself, whoever has it, and no bit can change alone without changing the sum.
"""

import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree, UInt64

BLOCK = 4096  # rows
ROWS, COLUMNS = 0, 2**40  # where the numbers of each begin


def _odd(start: int, stop: int) -> UInt64[np.ndarray, "n"]:
    """Odd numbers without a pattern: those of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _pieces(array: jax.Array | np.ndarray) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The parts of an array that this process has, each part once among all processes, and where they belong."""
    if isinstance(array, np.ndarray):
        yield (slice(None),) * array.ndim, array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def _sums(array: jax.Array | np.ndarray, rows: int) -> UInt64[np.ndarray, "blocks"]:
    """What the parts that this process has add to the sums of the blocks of the first `rows` rows. All that follows
    them is to be 0; what is not counts in the last sum."""
    sums = np.zeros(max(1, -(-rows // BLOCK)), np.uint64)
    rest = array.shape[1:]
    columns = _odd(COLUMNS, COLUMNS + math.prod(rest)).reshape(rest)
    for index, piece in _pieces(array):
        first, piece = (index[0].start or 0) if index else 0, np.atleast_1d(piece)
        of_columns = columns[index[1:]].reshape(-1)
        words = np.ascontiguousarray(piece).view(f"u{piece.dtype.itemsize}").reshape(-1, of_columns.size)
        last = min(first + len(words), rows)
        of_rows = _odd(ROWS + first, ROWS + max(first, last))
        for block in range(first // BLOCK, -(-last // BLOCK)):
            start, stop = max(first, block * BLOCK) - first, min(last, (block + 1) * BLOCK) - first
            of_row = words[start:stop].astype(np.uint64) @ of_columns
            sums[block : block + 1] += (of_row * of_rows[start:stop]).sum()
        sums[-1:] += np.uint64(np.count_nonzero(piece[max(0, last - first) :]))
    return sums


def digests(state: PyTree, kept: PyTree) -> dict[str, str]:
    """Type and shape of each array of a state without padding, and the checksums of its blocks, by its path.

    Where the arrays are those of several processes, all of them call this, and all get the same.

    Args:
        kept: the shapes of the arrays without padding, as objects with a `shape`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    found = [_sums(leaf, shape[0] if shape else 1) for (_, leaf), shape in zip(leaves, shapes, strict=True)]
    if not all(isinstance(leaf, np.ndarray) or leaf.is_fully_addressable for _, leaf in leaves):
        # As pairs of 32 bits, since JAX has no more.
        everyone = np.asarray(multihost_utils.process_allgather(np.concatenate(found).view(np.uint32)))
        ends = np.cumsum([len(sums) for sums in found])[:-1]
        found = np.split(np.ascontiguousarray(everyone).view(np.uint64).sum(axis=0), ends)
    return {
        jax.tree_util.keystr(path): " ".join([f"{leaf.dtype}{list(shape)}", *(f"{s:016x}" for s in sums)])
        for (path, leaf), shape, sums in zip(leaves, shapes, found, strict=True)
    }
