"""Checksums of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tied_lm.train import digest
from tied_lm.train.digest import digests


def mixed(n):
    """SplitMix64, of plain integers."""
    x = (n + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) | 1


def test_against_plain_integers(monkeypatch):
    monkeypatch.setattr(digest, "BLOCK", 4)
    array = np.random.default_rng(0).standard_normal((7, 2, 3), np.float32)
    words = array.view(np.uint32).reshape(7, 6).tolist()
    sums = [
        sum(words[row][column] * mixed(row) * mixed(2**40 + column) for row in rows for column in range(6)) % 2**64
        for rows in (range(4), range(4, 7))
    ]
    found = digests({"a": jnp.asarray(array)}, {"a": array})
    assert found == {"['a']": f"float32[7, 2, 3] {sums[0]:016x} {sums[1]:016x}"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, bool])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 2), (2, 1, 3)])
def test_every_bit_counts(shape, dtype):
    array = np.asarray(jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
    true = digests([array], [array])
    assert digests([jnp.asarray(array)], [array]) == true
    for bit in range(1 if dtype is bool else 8 * array.dtype.itemsize):
        for at in range(array.size):
            changed = array.copy()
            changed.view(f"u{array.dtype.itemsize}").reshape(-1)[at : at + 1] ^= 1 << bit
            assert digests([changed], [array]) != true


def test_what_is_not_damaged_by_a_bit_alone_is_noticed_too():
    array = np.random.default_rng(0).standard_normal((6, 4), np.float32)
    true = digests([array], [array])
    for changed in (array[::-1], array[:, ::-1], -array, 0 * array, array.reshape(4, 6), array.astype(np.float16)):
        assert digests([changed.copy()], [changed]) != true


def test_padding_is_not_in_it_but_has_to_be_zero():
    array = np.ones((5, 2), np.float32)
    true = digests([array], [array])
    padded = np.pad(array, [(0, 3), (0, 0)])
    assert digests([padded], [array]) == true
    padded[6, 1] = 1
    assert digests([padded], [jax.ShapeDtypeStruct((5, 2), jnp.float32)]) != true
