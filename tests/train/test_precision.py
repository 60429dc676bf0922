"""How precise products are, as the programs for the device say it."""

import re

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm.train.build import build_stream


@pytest.mark.parametrize("tying", ["projection", "factorised"])
@pytest.mark.parametrize(("precision", "found"), [("exact", {"HIGHEST"}), ("fast", {"DEFAULT"})])
def test_every_product_obeys(tying, precision, found, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = tiny.make_config(f"model.tying={tying}", "model.body=mlp", f"model.matmul_precision={precision}")
    trainer = tiny.new_trainer(config)
    state, none = jax.eval_shape(trainer.init, 0), tiny.slots(trainer, [])
    program = jax.make_jaxpr(trainer.advance)(state, build_stream(config), np.int32(1), none, True)
    said = re.findall(r"precision=(.*)", str(program))
    kinds = {kind for text in said for kind in re.findall(r"HIGHEST|DEFAULT|None", text)}
    assert len(said) >= 8
    assert kinds == found


def test_blocks_of_a_given_size_are_the_same_loss():
    config = tiny.make_config()
    whole, parts = (tiny.trajectory(c)[-1] for c in (config, tiny.make_config("model.block_tokens=16")))
    np.testing.assert_allclose(parts.params["embedding"], whole.params["embedding"], atol=1e-4)
