"""What a comparison says, from what its runs have kept."""

import json
import threading

import numpy as np
import pytest

from configs import toy
from tests import tiny
from tied_lm.config import digest, override
from tied_lm.files import Damaged
from tied_lm.intervals import Crossed
from tied_lm.record.reader import open_run
from tied_lm.record.scalars import read_metrics
from tied_lm.study import comparison as c
from tied_lm.study.heldout import ClusterCount
from tied_lm.study.summary import read_summary, write_summary
from tied_lm.study.verdict import verdict


def plan(*overrides):
    values = toy.get_config().to_dict()
    for text in (*tiny.FIELDS, "train.steps=6", "optimizer.warmup_steps=2", *overrides):
        override(values, *text.split("=", 1))
    return tiny.plan_of(values)


def complete(place, made):
    c.check_folder(place, made.values)
    assert not c.is_complete(place, made)
    c.complete(place, made, threading.Event(), lambda arm, seed: lambda updates: None)
    assert c.is_complete(place, made)
    return read_summary(place)


@pytest.fixture(scope="module")
def grown(undrawn, tmp_path_factory):
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
    assert summary.difference.mean == pytest.approx(difference.mean)
    assert summary.difference.ci95 == pytest.approx(difference.ends(difference.half_width()))
    loss = summary.arms["tied"].eval_loss
    assert loss.per_seed == pytest.approx([open_run(place / f"tied/seed{s}").last()["loss/eval"] for s in range(3)])
    assert summary.clusters == ClusterCount("sequence", 5)
    assert summary.law_loss == pytest.approx(open_run(place / "tied/seed0").last()["loss/law"])
    excess = summary.arms["tied"].excess
    assert excess.ci95[0] >= 0
    # So few sequences hold a token of a band that its loss has no interval.
    assert summary.arms["tied"].bands["2"].loss.ci95 is None


def test_each_arm_has_the_time_of_an_update_and_the_memory_of_all(grown):
    place, _, summary = grown
    for name, arm in summary.arms.items():
        lines = [line for s in range(3) for line in read_metrics(place / name / f"seed{s}")]
        times = [line["time/ms_per_update"] for line in lines if "time/ms_per_update" in line]
        assert arm.ms_per_update == (pytest.approx(np.median(times)) if times else None)
        # At least the matrices, two moments of each, and a gradient.
        assert 4 * arm.account["parameter_bytes"] < arm.peak_bytes < 10**7
    assert summary.arms["untied"].peak_bytes > summary.arms["tied"].peak_bytes


def test_seeds_that_were_added_after_a_look_are_recorded(grown):
    _, before, after = grown
    assert (before.looks, after.looks) == ((2,), (2, 3))
    assert "Seeds were added" not in verdict(before)
    assert "Seeds were added after the result had been looked at once, with 2:" in " ".join(verdict(after).split())


def test_another_margin_is_another_verdict_of_the_same_runs(grown):
    place, _, before = grown
    wide = plan("compare.seeds=3", "compare.margin=50")
    assert digest(wide.values) == digest(plan("compare.seeds=3").values)
    metrics = [path.read_bytes() for path in sorted(place.rglob("metrics.jsonl"))]
    after = complete(place, wide)
    assert after.difference.outcome == "equal"
    assert after.looks == before.looks
    assert after.difference.ci95 == before.difference.ci95
    assert [path.read_bytes() for path in sorted(place.rglob("metrics.jsonl"))] == metrics


@pytest.mark.slow
def test_differences_of_several_arms_hold_at_once(tmp_path):
    made = plan("compare.seeds=2", "compare.arms.wide=model.tying=tied model.features=5")
    summary = complete(tmp_path / "run", made)
    for found in summary.differences.values():
        (low, high), (wide_low, wide_high) = found.ci95, found.ci95_simultaneous
        assert wide_low < low < high < wide_high
    assert "those of the differences hold all at once" in verdict(summary)


ESTIMATE = {"mean", "ci95", "per_seed"}
HELDOUT = ESTIMATE | {"ci95_heldout"}
DIFFERENCE = HELDOUT | {"ci95_simultaneous", "outcome", "seeds_to_decide"}


def test_others_find_what_they_rely_on_in_the_file(grown):
    found = json.loads((grown[0] / "summary.json").read_text())
    assert set(found) == {
        *("entropy", "law_loss", "text", "arms", "baseline", "diverged", "differences", "difference", "margin"),
        *("seeds", "looks", "clusters", "eval_tokens", "probe_tokens", "arms_differ_in", "match", "versions", "crc32c"),
    }
    assert found["difference"] == found["differences"]["tied"]["eval_loss"]
    assert set(found["difference"]) == DIFFERENCE
    assert found["clusters"] == {"kind": "sequence", "count": 5}
    assert found["match"] == {"rule": "width", "arms": {}}
    arm, untied = found["arms"]["tied"], found["arms"]["untied"]
    assert set(arm) == {
        *("parameters", "account", "tied", "body", "eval_loss", "excess", "perplexity", "bits_per_byte", "clipped"),
        *("split", "bands", "optimizer", "highest_rate", "steps", "ms_per_update", "peak_bytes"),
        "caveats",
    }
    assert set(arm["eval_loss"]) == HELDOUT
    assert (set(arm["split"]), untied["split"]) == ({"share", "cosine"}, None)
    assert set(arm["split"]["share"]) == ESTIMATE
    assert {frozenset(band) for band in arm["bands"].values()} == {
        frozenset({"rows", "frequency", "loss", "share", "cosine"})
    }
    assert {frozenset(band) for band in untied["bands"].values()} == {frozenset({"rows", "frequency", "loss"})}


def test_what_is_written_is_read(grown, tmp_path):
    place = grown[0]
    summary = read_summary(place)
    write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    assert (tmp_path / "summary.json").read_bytes() == (place / "summary.json").read_bytes()


def test_a_summary_of_before_there_was_more_to_say_is_read(grown, tmp_path):
    place, _, summary = grown
    values = json.loads((place / "summary.json").read_text())
    for name in ("law_loss", "text", "diverged", "margin", "looks", "clusters", "match", "crc32c"):
        del values[name]
    for arm in values["arms"].values():
        for name in ("perplexity", "bits_per_byte", "highest_rate", "ms_per_update", "peak_bytes", "caveats"):
            del arm[name]
        del arm["eval_loss"]["ci95_heldout"]
    values["differences"] = {"tied": {"eval_loss": {"mean": 0.1, "ci95": [0.0, 0.2], "per_seed": [0.1, 0.0, 0.2]}}}
    (tmp_path / "summary.json").write_text(json.dumps(values | {"something": "else"}))
    old = read_summary(tmp_path)
    assert old.arms["tied"].eval_loss.ci95 == summary.arms["tied"].eval_loss.ci95
    assert (old.difference.ci95, old.difference.outcome) == ((0.0, 0.2), None)
    assert not old.is_of(plan("compare.seeds=3").comparison)  # so that it is made anew
    del values["arms"]
    (tmp_path / "summary.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match="is no summary"):
        read_summary(tmp_path)
