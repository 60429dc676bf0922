"""Whether the intervals cover the truth, with models that were trained and held-out tokens that were drawn."""

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from tests import tiny
from tied_lm.data.clusters import Clusters
from tied_lm.data.toy import ToyStream
from tied_lm.intervals import interval
from tied_lm.study.heldout import Heldout

POOL, REPETITIONS, SEQUENCES, LENGTH, V = 150, 500, 64, 16, 24


@pytest.fixture(scope="module")
def pool():
    """For each arm the nll and the divergence by context and token of models of many seeds, and the law, all exact."""
    fields = [f"data.vocab_size={V}", "data.batch_size=8", f"data.length={LENGTH}", "data.reversibility=0.7"]
    tables = {}
    for tying in ("tied", "untied"):
        config = tiny.make_config(*fields, "model.features=4", f"model.tying={tying}")
        stream, trainer = ToyStream.build(config.data, 0), tiny.new_trainer(config)
        nll = []
        for seed in range(POOL):
            state = trainer.init(np.uint32(seed))
            none = np.full(trainer.slots, -1, np.int32)
            state, _ = trainer.advance(state, stream.with_seed(seed), np.int32(300), none, True)
            params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
            nll.append(-log_softmax(params["embedding"] @ params.get("output", params["embedding"]).T, axis=1))
        tables[tying] = np.array(nll)
    pairs = np.repeat(np.arange(V), V), np.tile(np.arange(V), V)
    law = np.exp(np.asarray(stream.log_likelihood(*pairs), np.float64)).reshape(V, V)
    return tables, law, stream


def heldout(table, law, seeds, inputs, targets):
    """What the runs of some seeds would have kept of these sequences."""
    divergence = np.sum(law * (np.log(law) + table), axis=2)
    tokens = np.full(SEQUENCES, LENGTH)
    kept = [
        {
            "nll_0": table[s][inputs, targets].sum(axis=1),
            "tokens_0": tokens,
            "excess": divergence[s][inputs].sum(axis=1),
        }
        for s in seeds
    ]
    return Heldout.of(kept, Clusters("sequence", np.arange(SEQUENCES)))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_the_exact_values(pool, seeds):
    tables, law, stream = pool
    rng, visits = np.random.default_rng(seeds), stream.frequencies
    exact = {name: np.sum(visits[:, None] * law * table.mean(axis=0)) for name, table in tables.items()}
    entropy = -np.sum(visits[:, None] * law * np.log(law))
    cumulative = law.cumsum(axis=1)
    covered = {"loss": [], "excess": [], "difference": []}
    over_seeds_alone = []
    for _ in range(REPETITIONS):
        tokens = np.empty((SEQUENCES, LENGTH + 1), int)
        tokens[:, 0] = rng.choice(V, SEQUENCES, p=visits / visits.sum())
        for k in range(LENGTH):
            draws = rng.random((SEQUENCES, 1)) * cumulative[tokens[:, k], -1:]
            tokens[:, k + 1] = (cumulative[tokens[:, k]] <= draws).sum(axis=1)
        chosen = rng.choice(POOL, seeds, replace=False)  # a comparison never has a seed twice
        tied, untied = (heldout(tables[name], law, chosen, tokens[:, :-1], tokens[:, 1:]) for name in tables)
        truths = {
            "loss": (tied.measures(False).eval_loss, exact["tied"]),
            "excess": (tied.measures(False).excess, exact["tied"] - entropy),
            "difference": (tied.less(untied).estimate(), exact["tied"] - exact["untied"]),
        }
        for name, (found, truth) in truths.items():
            low, high = found.ci95
            covered[name].append(low <= truth <= high)
        low, high = interval(tied.less(untied).per_seed)
        over_seeds_alone.append(low <= truths["difference"][1] <= high)
    for name, hits in covered.items():
        assert 0.92 <= np.mean(hits) <= 0.98, (name, np.mean(hits))
    assert np.mean(over_seeds_alone) < 0.92
