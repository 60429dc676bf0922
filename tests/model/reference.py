"""The split in float64 NumPy, of models and tokens that are drawn."""

import itertools
from typing import NamedTuple

import jax
import numpy as np

from tied_lm import TiedEmbedding, UntiedEmbedding
from tied_lm.model.bodies import Mlp

TOLERANCE = 1e-5
PARTS = ("lookup", "scoring", "pull", "push", "total")
SCHEMES = {"tied": TiedEmbedding, "untied": UntiedEmbedding}


class Case(NamedTuple):
    vocab_size: int
    features: int
    shape: tuple[int, ...]
    tying: str
    body: bool
    masked: bool

    @property
    def model(self):
        return SCHEMES[self.tying](self.vocab_size, self.features, Mlp() if self.body else None)


class Drawn(NamedTuple):
    """Values for a case, in the float32 that the package sees."""

    params: dict
    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray | None


class Reference(NamedTuple):
    loss: float
    lookup: np.ndarray
    scoring: np.ndarray
    pull: np.ndarray
    push: np.ndarray
    total: np.ndarray
    expected: np.ndarray
    data: np.ndarray


def draw(case: Case, seed: int, scale: float | None = None, zipf: bool = False) -> Drawn:
    """Random weights and ids, uniform or of probability 1 / rank; the ids leave some rows out and repeat others."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.02, 0.2, 1.0]) if scale is None else scale
    d, n = case.features, int(np.prod(case.shape))

    def normal(*shape, std=scale):
        return (std * rng.standard_normal(shape)).astype(np.float32)

    params = {name: normal(case.vocab_size, d) for name in case.model.vocabulary}
    if case.body:
        params["body"] = {
            "up": {"kernel": normal(d, 4 * d, std=0.5), "bias": normal(4 * d, std=0.5)},
            "down": {"kernel": normal(4 * d, d, std=0.2), "bias": normal(d, std=0.2)},
        }
    used = rng.permutation(case.vocab_size)[: 1 + case.vocab_size // 2]
    p = 1 / np.arange(1, used.size + 1) if zipf else np.ones(used.size)
    inputs, targets = rng.choice(used, n, p=p / p.sum()), rng.choice(used, n, p=p / p.sum())
    mask = None
    if case.masked:
        mask = ((rng.random(n) < 0.6) | (np.arange(n) == rng.integers(n))).reshape(case.shape)
    return Drawn(params, inputs.reshape(case.shape), targets.reshape(case.shape), mask)


def make_cases() -> list[Case]:
    rng = np.random.default_rng(2024)
    sizes = [(2, 1, (1,)), (2, 32, (60,)), (300, 1, (9,)), (300, 32, (3, 20)), (3, 2, (1,)), (17, 5, (2, 3, 4))]
    while len(sizes) < 13:
        v, d, n = int(np.exp(rng.uniform(np.log(2), np.log(300)))), int(rng.integers(1, 33)), int(rng.integers(1, 61))
        sizes.append((v, d, (n,)))
    kinds = list(itertools.product(SCHEMES, (False, True), (False, True)))
    return [Case(*size, *kinds[5 * i % 8]) for i, size in enumerate(sizes)]


def gelu(x):
    """The tanh form, and its slope."""
    a, b = np.sqrt(2 / np.pi), 0.044715
    tanh = np.tanh(a * (x + b * x**3))
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x * (1 - tanh**2) * a * (1 + 3 * b * x**2) / 2


def body_forward(body, x):
    """h of one token."""
    if body is None:
        return x
    hidden, _ = gelu(x @ body["up"]["kernel"] + body["up"]["bias"])
    return x + hidden @ body["down"]["kernel"] + body["down"]["bias"]


def body_backward(body, x, dh):
    """dL/dx of one token, given dL/dh."""
    if body is None:
        return dh
    _, slope = gelu(x @ body["up"]["kernel"] + body["up"]["bias"])
    return dh + ((dh @ body["down"]["kernel"].T) * slope) @ body["up"]["kernel"].T


def wide(params):
    """The lookup matrix, the scoring matrix and the body in float64."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    return params["embedding"], params.get("output", params["embedding"]), params.get("body")


def reference(drawn: Drawn) -> Reference:
    """The definitions, token by token, in float64."""
    lookup_matrix, scoring_matrix, body = wide(drawn.params)
    x_ids, y_ids = drawn.inputs.ravel(), drawn.targets.ravel()
    kept = np.ones(x_ids.size, bool) if drawn.mask is None else drawn.mask.ravel()
    n = kept.sum()
    lookup, pull, push, expected, data = (np.zeros_like(scoring_matrix) for _ in range(5))
    loss = 0.0
    for x_id, y in zip(x_ids[kept], y_ids[kept], strict=True):
        x = lookup_matrix[x_id]
        h = body_forward(body, x)
        scores = scoring_matrix @ h
        p = np.exp(scores - scores.max())
        loss += (np.log(p.sum()) + scores.max() - scores[y]) / n
        p /= p.sum()
        lookup[x_id] += body_backward(body, x, (p @ scoring_matrix - scoring_matrix[y]) / n)
        pull[y] -= (1 - p[y]) * h / n
        push += np.where(np.arange(p.size) == y, 0, p)[:, None] * h / n
        expected += np.outer(p, h) / n
        data[y] += h / n
    scoring = pull + push
    return Reference(loss, lookup, scoring, pull, push, lookup + scoring, expected, data)


def loss_by_use(drawn: Drawn, lookup_matrix, target_matrix, other_matrix) -> float:
    """The loss as a function of the matrix once for each use: lookup, the target's score, all other scores."""
    body = wide(drawn.params)[2]
    total = 0.0
    for x_id, y in zip(drawn.inputs.ravel(), drawn.targets.ravel(), strict=True):
        h = body_forward(body, lookup_matrix[x_id])
        scores = other_matrix @ h
        scores[y] = target_matrix[y] @ h
        total += np.log(np.exp(scores).sum()) - scores[y]
    return total / drawn.inputs.size
