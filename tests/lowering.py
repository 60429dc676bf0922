"""Programs that are made for devices that need not be there."""

import re

import jax
import numpy as np

from tests import tiny
from tied_lm.train import evaluation
from tied_lm.train.step import Trainer

BODIES = ["none", "mlp", "lstm", "transformer"]
SMALL = ("data.batch_size=16", "data.length=64", "body.heads=2", "scheme.factor_features=3", "scheme.untie_step=9")


def lowered(trainer, stream, platform):
    """The programs of a run for a platform, as text."""
    state = jax.eval_shape(trainer.init, 0)
    inputs = stream, np.int32(1), tiny.slots(trainer, []), True
    _, scored = jax.eval_shape(evaluation.probe, trainer, state.params, stream, 64)
    for traced in (
        Trainer._advance.trace(trainer, trainer.values, state, *inputs),
        evaluation.evaluate.trace(trainer, state.params, stream, 64),
        evaluation.probe.trace(trainer, state.params, stream, 64),
        evaluation._predict.trace(trainer.model.logit_cap, 0, trainer.model.layout, scored),
    ):
        yield traced.lower(lowering_platforms=(platform,)).as_text()


def has_nothing_of_a_cpu(text, tying):
    # Late untying has a barrier of its own, for two matrices to stay the same on any device.
    assert tying == "late_untie" or "optimization_barrier" not in text
    products = re.findall(r"dot_general .*precision = \[(\w+), (\w+)\]", text)
    assert products
    assert set(products) == {("HIGHEST", "HIGHEST")}
