"""The errors of the vocabulary loss against float64, as its documentation states them, at two kinds of tokens."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.test_loss import oracle, ours
from tied_lm.model import loss

TABLES = ("expected", "scoring", "own", "data", "pull", "push")
DOCUMENTED = re.findall(r"^ +(uniform|Zipf), +(\d+) +(.*?)   +(.*)$", loss.vocabulary_loss.__doc__, re.M)


def draw(tokens, largest, from_rows, seed, N, V, D):
    """Logits of a given size, of uniform or Zipf tokens; with `from_rows`, h is the rows of the inputs."""
    rng = np.random.default_rng(seed)
    scoring = rng.standard_normal((V, D))
    p = 1 / np.arange(1, V + 1) if tokens == "Zipf" else np.ones(V)
    inputs, targets = rng.choice(V, (2, N), p=p / p.sum()).astype(np.int32)
    h = scoring[inputs] if from_rows else rng.standard_normal((N, D))
    scale = np.sqrt(largest / np.abs(h @ scoring.T).max())
    return (scale * h).astype(np.float32), (scale * scoring).astype(np.float32), targets, np.full(N, 1 / N, np.float32)


def errors(inputs, compute_dtype):
    """Of the tables by the largest entry of two, and each by its own; of dL/dh by its own; of the loss, of a token."""
    true = oracle(*inputs)
    found = {name: np.asarray(x, np.float64) for name, x in ours(*inputs, compute_dtype=compute_dtype).items()}
    for tables in (true, found):
        tables |= {"pull": tables["own"] - tables["data"], "push": tables["expected"] - tables["own"]}
    off = {name: np.abs(found[name] - value).max() for name, value in true.items()}
    size = {name: np.abs(value).max() for name, value in true.items()}
    of_two = max(off[name] for name in TABLES) / max(size["expected"], size["data"])
    of_its_own = max(off[name] / size[name] for name in TABLES)
    return np.array([of_two, of_its_own, off["h_gradient"] / size["h_gradient"], off["loss"], off["nll"]])


@pytest.mark.parametrize("from_rows", [False, True])
@pytest.mark.parametrize("shape", [(512, 300, 64), (1024, 500, 16)], ids=str)
@pytest.mark.parametrize(("tokens", "largest", "in_float32", "in_bfloat16"), DOCUMENTED)
def test_errors_are_as_documented(tokens, largest, in_float32, in_bfloat16, shape, from_rows):
    """At random and at Zipf tokens; and in float32 the tables keep to what the design promises."""
    inputs = draw(tokens, float(largest), from_rows, 7, *shape)
    for told, dtype in ((in_float32, jnp.float32), (in_bfloat16, jnp.bfloat16)):
        found, bounds = errors(inputs, dtype), np.array(told.split(","), float)
        assert bounds.shape == (5,)
        assert (found <= bounds).all(), f"{dtype.__name__}: {found} above {bounds}"
        if dtype == jnp.float32:
            assert bounds[0] <= 1e-5


def test_the_documented_errors_are_of_both_kinds_of_tokens():
    assert [(tokens, largest) for tokens, largest, *_ in DOCUMENTED] == [
        (tokens, largest) for tokens in ("uniform", "Zipf") for largest in ("1", "25", "80")
    ]
