"""The programs for a GPU and a TPU, which need neither to be made."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests import lowering, tiny
from tied_lm.model.likelihoods import negative_log_likelihood
from tied_lm.model.logits import LOGITS_BYTES
from tied_lm.model.loss import vocabulary_loss
from tied_lm.model.schemes import SCHEMES
from tied_lm.train.build import build_stream


def lowered(fields, platform):
    """The programs of a run on one device."""
    config = tiny.make_config(*lowering.SMALL, *fields)
    return lowering.lowered(tiny.new_trainer(config), build_stream(config), platform)


@pytest.mark.parametrize(
    ("tying", "body", "platform"),
    [
        pytest.param(tying, lowering.BODIES[i % 4], platform, marks=[pytest.mark.slow] if i else [])
        for i, tying in enumerate(SCHEMES)
        for platform in ("cuda", "tpu")
    ],
)
def test_every_program_is_made_for_other_devices_without_what_a_cpu_needs(tying, body, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    for text in lowered([f"model.tying={tying}", f"model.body={body}"], platform):
        lowering.has_nothing_of_a_cpu(text, tying)


def test_a_cpu_has_what_it_needs():
    assert "optimization_barrier" in next(iter(lowered([], "cpu")))


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_logits_of_a_block_are_as_many_as_the_device_is_to_hold(platform):
    N, V, D = 16384, 50257, 8
    h, scoring = jnp.zeros((N, D)), jax.ShapeDtypeStruct((V, D), jnp.float32)
    targets = jnp.zeros(N, int)
    for compute, weights in ((vocabulary_loss, [jnp.ones(N)]), (negative_log_likelihood, [])):
        traced = jax.jit(compute).trace(h, scoring, targets, *weights)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        tokens = max(int(found) for found in re.findall(rf"tensor<(\d+)x{V}xf32>", text))
        if platform == "cpu":
            assert tokens == 128
        else:
            assert 0.8 * LOGITS_BYTES < 4 * tokens * V <= LOGITS_BYTES
