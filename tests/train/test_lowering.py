"""The programs for a GPU and a TPU, which need neither to be made."""

import re

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm.model.schemes import SCHEMES
from tied_lm.train import evaluation
from tied_lm.train.build import build_stream
from tied_lm.train.step import Trainer

BODIES = ["none", "mlp", "lstm", "transformer"]
SMALL = ("data.batch_size=16", "data.length=64", "body.heads=2", "scheme.factor_features=3", "scheme.untie_step=9")


def lowered(fields, platform):
    """The programs of a run for a platform, as text."""
    config = tiny.make_config(*SMALL, *fields)
    trainer, stream = tiny.new_trainer(config), build_stream(config)
    state = jax.eval_shape(trainer.init, 0)
    inputs = stream, np.int32(1), tiny.slots(trainer, []), True
    for traced in (
        Trainer._advance.trace(trainer, trainer.values, state, *inputs),
        evaluation.evaluate.trace(trainer, state.params, stream, 64),
        evaluation.probe.trace(trainer, state.params, stream, 64),
    ):
        yield traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("tying", "body", "platform"),
    [
        pytest.param(tying, BODIES[i % 4], platform, marks=[pytest.mark.slow] if i else [])
        for i, tying in enumerate(SCHEMES)
        for platform in ("cuda", "tpu")
    ],
)
def test_every_program_is_made_for_other_devices_without_what_a_cpu_needs(tying, body, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    for text in lowered([f"model.tying={tying}", f"model.body={body}"], platform):
        # Late untying has one of its own, for two matrices to stay the same on any device.
        assert tying == "late_untie" or "optimization_barrier" not in text
        products = re.findall(r"dot_general .*precision = \[(\w+), (\w+)\]", text)
        assert products
        assert set(products) == {("HIGHEST", "HIGHEST")}


def test_a_cpu_has_what_it_needs():
    assert "optimization_barrier" in next(iter(lowered([], "cpu")))
