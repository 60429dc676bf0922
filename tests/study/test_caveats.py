"""Warnings of the verdict, each with its figure."""

import dataclasses
import math

import numpy as np
import pytest

from tests import tiny
from tests.study.summaries import summary
from tied_lm import open_run
from tied_lm.study.caveats import caveats
from tied_lm.study.verdict import conclusions
from tied_lm.train.optimizer import highest_rate

EVEN = np.full(256, 1 / 256)


class Told:
    """A run with given curves."""

    config = tiny.make_config()

    def __init__(self, held_out, training, excess):
        self.values = {"loss/eval": held_out, "loss/train": training, "loss/excess": excess}

    def scalars(self, tag):
        return self.values[tag]


def said(held_out, training=None, frequencies=EVEN, entropy=None, stateful=False, above=0.0):
    """Two seeds, 0.2 nats to both sides of the given curves; the held-out tokens are dearer than others by `above`."""
    training = training or {5: 3.0, 10: 2.0}
    excess = {step: loss - above - (entropy or 0) for step, loss in held_out.items()}
    curves = (held_out, training, excess)
    shifted = [[{s: v + d for s, v in curve.items()} for curve in curves] for d in (-0.2, 0.2)]
    return caveats("tied", [Told(*curves) for curves in shifted], frequencies, entropy, stateful)


@pytest.mark.untyped
def test_a_run_as_it_should_be_has_none():
    assert said({0: math.log(256), 10: 3.0}) == []
    assert said({0: 6.5, 5: 3.0, 10: 3.009}) == []  # within 1 nat of ln V, and 0.01 nats of the best step


@pytest.mark.untyped
def test_a_start_far_above_a_guess():
    (sentence,) = said({0: 29.03, 10: 3.0})
    assert sentence.startswith("tied starts at a held-out loss of 29.03 nats, far above the 5.55 of a guess")


@pytest.mark.untyped
def test_a_loss_that_rises_while_that_of_training_falls():
    held_out, falling = {0: 5.5, 5: 3.0, 10: 3.4}, {5: 2.5, 10: 1.25}
    (sentence,) = said(held_out, falling)
    assert "rises from 3.0000 nats at step 5 to 3.4000 at the last step" in sentence
    assert "training loss falls from 2.5000 to 1.2500" in sentence
    assert said(held_out, {5: 2.5, 10: 2.6}) == []  # both rise: not this


@pytest.mark.untyped
def test_a_plateau_at_the_loss_of_the_frequencies():
    frequencies = np.array([0.5, 0.25, 0.25, 0.0])
    unigram = 1.5 * math.log(2)
    (sentence,) = said({0: 1.3, 10: unigram - 0.04}, frequencies=frequencies)
    assert sentence.startswith("tied ends at a held-out loss of 0.9997 nats, within 0.0400 nats of 1.0397, that of a ")
    (sentence,) = said({0: 1.3, 10: 1.2}, frequencies=frequencies)
    assert "1.2000 nats, above 1.0397" in sentence
    assert said({0: 1.3, 10: unigram - 0.06}, frequencies=frequencies) == []
    assert said({0: 1.3, 10: unigram}, frequencies=frequencies, entropy=unigram) == []  # there is no more to know
    assert said({0: 1.3, 10: unigram}, frequencies=frequencies, entropy=unigram - 0.2)
    # Few tokens may be dearer than the law's: what counts is the loss that is expected.
    assert said({0: 1.3, 10: unigram}, frequencies=frequencies, entropy=unigram - 0.2, above=0.1) == []


@pytest.mark.untyped
def test_a_carried_state_is_told():
    (sentence,) = said({0: 5.5, 10: 3.0}, stateful=True)
    assert "the state after the 5 tokens before it, which are not scored" in sentence


def test_the_sentences_stand_in_the_verdict_of_a_run(tmp_path):
    config = tiny.make_config("model.init_std=3.0", "train.steps=4", "optimizer.warmup_steps=2")
    tiny.train(tmp_path / "run", config)
    frequencies = tiny.build_stream(config).frequencies
    found = caveats("tied", [open_run(tmp_path / "run")], frequencies, None, False)
    first = open_run(tmp_path / "run").scalars("loss/eval")[0]
    assert found[0].startswith(f"tied starts at a held-out loss of {first:.2f} nats, far above the 3.00 of")
    assert found[-1].startswith("tied ends at a held-out loss of ")
    optimizer = dataclasses.replace(config.optimizer, vocab_learning_rate=0.1)
    made = summary((0.005, 0.015))
    arms = {
        "tied": dataclasses.replace(
            made.arms["tied"], caveats=tuple(found), optimizer=optimizer, highest_rate=0.04, steps=4
        )
    }
    made = dataclasses.replace(made, arms=arms, differences={}, entropy=None)
    told = conclusions(made)
    assert [sentence for sentence in told if sentence in found] == found
    assert "constant learning rate up to 0.04 (0.08 for the vocabulary), 4 updates" in told[-1]
    assert highest_rate(config.optimizer, 4) == pytest.approx(0.05)
