"""A Transformer of 4 layers learns real text, with one vocabulary matrix and with two."""

import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run

FIELDS = (
    "data.source=text",
    "data.tokenizer=bpe",
    "data.vocab_size=4096",
    "data.batch_size=4",
    "data.length=128",
    "data.eval_tokens=8_192",
    "model.features=128",
    "model.body=transformer",
    "body.depth=4",
    "optimizer.learning_rate=0.003",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=30",
    "train.steps=300",
    "train.eval_every=300",
    "log.scalars_every=100",
    "log.rows_every=300",
    "log.probe_tokens=8_192",
    "checkpoint.every=300",
)


@pytest.mark.slow
@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_held_out_loss_falls_below_the_unigram_entropy(tmp_path, tying):
    """Below the entropy of the evaluated tokens under their own frequencies, which no unigram model can undercut."""
    config = tiny.make_config(*FIELDS, f"model.tying={tying}")
    tiny.train(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    with run.probe as probe:  # of the tokens that are evaluated
        counts = np.asarray(probe.target_count.sel(step=0), np.float64)
    assert counts.sum() == config.data.eval_tokens
    frequencies = counts[counts > 0] / counts.sum()
    entropy = -np.sum(frequencies * np.log(frequencies))
    loss = run.scalars("loss/eval")
    assert loss[0] > entropy
    assert loss[300] < entropy - 0.5
