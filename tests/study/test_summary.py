"""What a comparison says, from what its runs have kept."""

import threading

import numpy as np
import pytest

from configs import toy
from tests import tiny
from tied_lm.config import override
from tied_lm.intervals import Crossed
from tied_lm.record.reader import open_run
from tied_lm.study import comparison as c
from tied_lm.study.plan import Plan, name_of
from tied_lm.study.verdict import verdict


def plan(*overrides):
    values = toy.get_config().to_dict()
    for text in (*tiny.FIELDS, "train.steps=6", "optimizer.warmup_steps=2", *overrides):
        override(values, *text.split("=", 1))
    return Plan.of(values)


def complete(place, made):
    c.check_folder(place, made.values)
    assert not c.is_complete(place, made)
    c.complete(place, made, threading.Event(), lambda arm, seed: lambda updates: None)
    assert c.is_complete(place, made)
    return c.read_summary(place)


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A folder of two seeds, its summary, and the summary once there are three."""
    place = tmp_path_factory.mktemp("runs") / "run"
    return place, complete(place, plan("compare.seeds=2")), complete(place, plan("compare.seeds=3"))


def test_intervals_are_over_seeds_and_sequences(grown):
    place, _, summary = grown
    last = {}
    for arm in ("tied", "untied"):
        opened = [open_run(place / arm / f"seed{seed}").heldout.isel(step=-1) for seed in range(3)]
        last[arm] = np.array([sum(one[f"nll_{band}"].values.astype(float) for band in range(5)) for one in opened])
        tokens = sum(opened[0][f"tokens_{band}"].values for band in range(5)).astype(int)
    assert tokens.tolist() == [5, 5, 5, 5, 3, 0]
    used = tokens > 0
    difference = Crossed.of((last["tied"] - last["untied"])[:, used], tokens[used])
    assert summary["difference"]["mean"] == pytest.approx(difference.mean)
    assert summary["difference"]["ci95"] == pytest.approx(difference.ends(difference.half_width()))
    loss = summary["arms"]["tied"]["eval_loss"]
    assert loss["per_seed"] == pytest.approx([open_run(place / f"tied/seed{s}").last()["loss/eval"] for s in range(3)])
    assert summary["clusters"] == {"kind": "sequence", "count": 5}
    assert summary["law_loss"] == pytest.approx(open_run(place / "tied/seed0").last()["loss/law"])
    excess = summary["arms"]["tied"]["excess"]
    assert excess["ci95"][0] >= 0
    # So few sequences hold a token of a band that its loss has no interval.
    assert summary["arms"]["tied"]["bands"]["2"]["loss"]["ci95"] is None


def test_seeds_that_were_added_after_a_look_are_recorded(grown):
    _, before, after = grown
    assert (before["looks"], after["looks"]) == ([2], [2, 3])
    assert "Seeds were added" not in verdict(before)
    assert "Seeds were added after the result had been looked at once, with 2:" in " ".join(verdict(after).split())


def test_another_margin_is_another_verdict_of_the_same_runs(grown):
    place, _, before = grown
    wide = plan("compare.seeds=3", "compare.margin=50")
    assert name_of(wide.values) == name_of(plan("compare.seeds=3").values)
    metrics = [path.read_bytes() for path in sorted(place.rglob("metrics.jsonl"))]
    after = complete(place, wide)
    assert after["difference"]["outcome"] == "equal"
    assert after["looks"] == before["looks"]
    assert after["difference"]["ci95"] == before["difference"]["ci95"]
    assert [path.read_bytes() for path in sorted(place.rglob("metrics.jsonl"))] == metrics


def test_differences_of_several_arms_hold_at_once(tmp_path):
    made = plan("compare.seeds=2", "compare.arms.wide=model.tying=tied model.features=5")
    summary = complete(tmp_path / "run", made)
    for found in summary["differences"].values():
        (low, high), (wide_low, wide_high) = found["eval_loss"]["ci95"], found["eval_loss"]["ci95_simultaneous"]
        assert wide_low < low < high < wide_high
    assert "those of the differences hold all at once" in verdict(summary)
