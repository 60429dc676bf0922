"""What is computed on eight devices, against one; run by `test_mesh.py` where there are that many."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tied_lm.config import Data
from tied_lm.data.toy import ToyStream
from tied_lm.mesh import ONE_DEVICE, Layout
from tied_lm.model import likelihoods, loss

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(")


def layout_of(shape, vocab_size):
    axes = (jax.sharding.AxisType.Auto,) * 2
    return Layout(jax.make_mesh(shape, ("data", "vocab"), axis_types=axes), vocab_size)


def make(N, V, D, seed=0):
    rng = np.random.default_rng(seed)
    h, scoring = rng.standard_normal((N, D), np.float32), rng.standard_normal((V, D), np.float32)
    targets = np.minimum(rng.zipf(1.3, N) - 1, V - 1).astype(np.int32)
    weights = (rng.random(N) < 0.8).astype(np.float32)
    targets = np.where(weights > 0, targets, rng.choice([-1, V, 2**31 - 1], N)).astype(np.int32)
    return h, scoring, targets, weights / weights.sum()


def assert_near(found, true, what=""):
    assert_allclose(found, true, rtol=0, atol=1e-5 * max(np.abs(true).max(), 1e-30), err_msg=what)


# Every pair of mesh and options, and of options and number of rows.
CASES = [
    ((8, 1), 1023, 2, {}),
    ((4, 2), 1023, 3, {"soft_cap": 3.0, "z_loss": 0.05}),
    ((2, 4), 1023, 1, {"compute_dtype": jnp.bfloat16}),
    ((1, 8), 1023, 3, {"marks": True, "soft_cap": 3.0}),
    ((4, 2), 9, 0, {}),
    ((1, 8), 9, 0, {"soft_cap": 3.0, "z_loss": 0.05}),  # five devices have padding alone
    ((2, 4), 9, 2, {"marks": True}),
    ((2, 4), 50, 0, {"marks": True, "z_loss": 0.05}),
]


@pytest.mark.parametrize(("shape", "V", "blocks", "options"), CASES, ids=str)
def test_the_loss(shape, V, blocks, options, monkeypatch):
    for module in (loss, likelihoods):
        monkeypatch.setattr(module, "block_count", lambda *_: max(blocks, 1))
    monkeypatch.setattr(loss, "is_narrow", lambda *_: blocks == 0)
    h, scoring, targets, weights = make(256, V, 12)
    marks = (targets % 3 == 0).astype(np.float32) if options.pop("marks", False) else None
    layout = layout_of(shape, V)

    @partial(jax.jit, static_argnames="layout")
    def compute(scoring, h, targets, weights, marks, layout):
        return loss.vocabulary_loss(h, scoring, targets, weights, marks_N=marks, layout=layout, **options)

    one = compute(scoring, h, targets, weights, marks, layout=ONE_DEVICE)
    many = compute(layout.padded(scoring), h, targets, weights, marks, layout=layout)
    assert_array_equal(np.asarray(many.scoring)[V:], 0)
    assert_array_equal(np.asarray(many.expected)[V:], 0)
    for name, true in one._asdict().items():
        found = getattr(many, name)
        assert (true is None) == (found is None)
        if true is not None:
            found = found[:, :V] if name == "expected_parts" else found[:V] if found.shape[0] == layout.rows else found
            assert_near(found, true, name)
    # An id outside the vocabulary, that of a padded row too, makes its token NaN.
    lost = np.isnan(compute(layout.padded(scoring), h, targets, jnp.ones_like(weights), marks, layout=layout).nll)
    assert_array_equal(lost, (targets < 0) | (targets >= V))


@pytest.mark.parametrize(("shape", "V", "soft_cap"), [((4, 2), 1023, None), ((2, 4), 1023, 3.0), ((1, 8), 9, 3.0)])
def test_likelihood_and_law(shape, V, soft_cap, monkeypatch):
    monkeypatch.setattr(likelihoods, "block_count", lambda *_: 3)
    h, scoring, targets, _ = make(256, V, 12)
    law = ToyStream.build(Data(vocab_size=V, classes=7), 0)
    targets, contexts, layout = targets % V, targets[::-1] % V, layout_of(shape, V)

    @partial(jax.jit, static_argnames="layout")
    def compute(scoring, layout):
        options = {"soft_cap": soft_cap, "law": law, "contexts_N": contexts, "layout": layout}
        return likelihoods.likelihood(h, scoring, targets, **options)

    for found, true in zip(compute(layout.padded(scoring), layout), compute(scoring, ONE_DEVICE), strict=True):
        assert_near(found, true)


def collectives(text):
    """Elements and kind of each collective, and whether it is in a loop."""
    found, where = Counter(), ""
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
            where = "once" if header[1] else "in a loop"
        if match := COLLECTIVE.search(line):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found[where, match[2], dims] += 1
    return found


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_in_the_loop_devices_tell_each_other_no_more_than_a_number_for_each_token(shape, monkeypatch):
    N, V, D, blocks = 1536, 1023, 24, 3
    monkeypatch.setattr(loss, "block_count", lambda *_: blocks)
    data, vocab = shape
    layout = layout_of(shape, V)
    inputs = make(N, V, D)
    arguments = inputs[0], layout.padded(inputs[1]), *inputs[2:]
    step = jax.jit(lambda *a: loss.vocabulary_loss(*a, soft_cap=3.0, z_loss=0.1, layout=layout)[:4])
    found = collectives(step.lower(*arguments).compile().as_text())
    tokens, rows = N // data, layout.rows // vocab
    in_loop = {("in a loop", "all-reduce", f"{tokens // blocks}"): 2}  # the largest logit, the sum of exponentials
    of_targets = {("once", "all-reduce", f"{tokens}"): 1, ("once", "all-reduce", f"{tokens},{D}"): 1}
    tables = {("once", "all-reduce", f"{rows},{D}"): 2} if data > 1 else {}
    assert found == in_loop | of_targets | tables
