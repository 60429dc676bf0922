"""Comparisons of which an arm, the baseline or every arm diverges."""

import threading

import pytest

from tests import tiny
from tied_lm.config import override
from tied_lm.study import comparison as c
from tied_lm.study.summary import read_summary
from tied_lm.study.verdict import verdict
from tied_lm.train.loop import Interrupted

DIVERGE = "optimizer.name=sgd optimizer.learning_rate=1e20"


@pytest.fixture
def wild(undrawn, values):
    """Values of a small comparison in which one more arm diverges."""
    for text in (*tiny.FIELDS, "train.steps=12", "compare.seeds=2"):
        override(values, *text.split("="))
    values["compare"]["arms"]["wild"] = f"model.tying=tied {DIVERGE}"
    return values


def start_none(arm, seed):
    return lambda updates: None


def complete(place, values, stop=False, start=start_none):
    event = threading.Event()
    if stop:
        event.set()
    plan = tiny.plan_of(values)
    c.check_folder(place, plan.values)
    c.complete(place, plan, event, start)
    return plan, read_summary(place)


def words(summary):
    return " ".join(verdict(summary).split())


def test_the_other_arms_are_finished_and_reported(wild, tmp_path):
    plan, summary = complete(tmp_path, wild)
    assert list(summary.arms) == ["tied", "untied"]
    assert list(summary.differences) == ["tied"]
    (wild_arm,) = summary.diverged.values()
    assert wild_arm.parameters == 20 * 4
    assert "no longer finite" in wild_arm.reason
    assert "wild diverged, so it has no result: " in words(summary)
    assert ["wild", "80", "diverged", "-", "-"] in [line.split() for line in verdict(summary).splitlines()]
    assert "<td>diverged</td>" in (tmp_path / "report.html").read_text()
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()
    assert "tied against untied against wild" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "wild/seed1").exists()  # the arm has no result whatever the other seed does
    assert c.is_complete(tmp_path, plan)


@pytest.mark.slow
def test_an_interrupted_one_is_continued_and_takes_more_seeds(wild, tmp_path):
    event, started = threading.Event(), []

    def start(arm, seed):
        started.append((arm, seed))
        if (arm, seed) == ("untied", 1):
            event.set()
        return lambda updates: None

    plan = tiny.plan_of(wild)
    with pytest.raises(Interrupted):
        c.complete(tmp_path, plan, event, start)
    assert started == [("tied", 0), ("untied", 0), ("wild", 0), ("tied", 1), ("untied", 1)]
    assert not c.is_complete(tmp_path, plan)
    started.clear()
    complete(tmp_path, wild, start=start)
    assert ("wild", 0) not in started
    wild["compare"]["seeds"] = 3
    assert not c.is_complete(tmp_path, tiny.plan_of(wild))
    _, summary = complete(tmp_path, wild, start=start)
    assert "wild" not in {arm for arm, _ in started}
    assert [len(arm.eval_loss.per_seed) for arm in summary.arms.values()] == [3, 3]
    assert list(summary.diverged) == ["wild"]


@pytest.mark.slow
def test_without_the_baseline_the_losses_stand_for_themselves(wild, tmp_path):
    wild["compare"]["baseline"] = "wild"
    _, summary = complete(tmp_path, wild)
    assert list(summary.arms) == ["tied", "untied"]
    assert summary.differences == {}
    assert summary.difference is None
    told = words(summary)
    assert "there is no difference to tell" in told
    assert "set compare.baseline = tied | untied." in told
    assert "tied ends" in told  # above the entropy
    assert (tmp_path / "report.html").exists()


def test_every_arm_may_diverge(wild, tmp_path):
    del wild["compare"]["arms"]["wild"]
    wild["compare"]["seeds"] = 1
    for arm in ("tied", "untied"):
        wild["compare"]["arms"][arm] = f"model.tying={arm} {DIVERGE}"
    plan, summary = complete(tmp_path, wild)
    assert summary.arms == {}
    assert summary.entropy is not None
    assert list(summary.diverged) == ["tied", "untied"]
    assert "It holds for" not in words(summary)
    assert (tmp_path / "report.html").exists()
    assert c.is_complete(tmp_path, plan)
