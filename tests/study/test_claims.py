"""Studies of published claims: their arithmetic, their settings, and that they are done, kept and told."""

import dataclasses
import functools
import re
import threading

import numpy as np
import pytest
from scipy import stats

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.cli import study as command
from tied_lm.config import build_comparison
from tied_lm.files import Damaged
from tied_lm.intervals import COSINE, SHARE, HeldoutEstimate, summarize
from tied_lm.study.claims import running
from tied_lm.study.claims.catalogue.impossible import NOT_DONE
from tied_lm.study.claims.catalogue.probability import explained
from tied_lm.study.claims.names import studies
from tied_lm.study.claims.results import Missing
from tied_lm.study.claims.setting import SCALES, Setting
from tied_lm.study.claims.study import Expectation, Study, holm, judge
from tied_lm.study.claims.told import page, section
from tied_lm.study.ownbest import at_own_best

ABOVE, BELOW = Expectation("x", "x", 1, 0.5), Expectation("x", "x", -1, 0.5)


@pytest.mark.parametrize("values", [(1.0, 1.2, 0.9, 1.1, 1.3), (0.4, 0.7, 0.2, 0.6, 0.8), (0.1, 0.12, 0.08, 0.1, 0.11)])
def test_a_test_is_a_t_test_at_the_margin(values):
    expected = stats.ttest_1samp(values, 0.5)
    found = judge(ABOVE, values)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.ci95 == pytest.approx(expected.confidence_interval(0.95))
    decided = expected.pvalue < 0.05
    above = np.mean(values) > 0.5
    assert found.verdict().startswith(("holds" if above else "does not") if decided else "cannot be told")
    assert judge(BELOW, values).verdict().startswith(("does not" if above else "holds") if decided else "cannot")
    assert found.verdict(0.05).startswith("cannot be told here")


def test_what_could_have_been_seen_is_told():
    found = judge(ABOVE, (0.4, 0.7, 0.2, 0.6, 0.8))
    half = (found.ci95[1] - found.ci95[0]) / 2
    assert found.verdict() == f"cannot be told here (alone, {half:.2g} from 0.5 would have been seen)"


def test_a_loss_brings_the_interval_of_seeds_and_tokens():
    estimate = HeldoutEstimate(0.7, (0.6, 0.8), (0.69, 0.7, 0.71), (0.65, 0.75))
    found = judge(ABOVE, estimate)
    assert found.ci95 == (0.6, 0.8)
    assert found.p == pytest.approx(2 * stats.t.sf(0.2 / 0.1 * stats.t.ppf(0.975, 2), 2))
    assert judge(ABOVE, (1.0, float("nan"))).verdict() == "cannot be told here: it is undefined for some seed"


def test_what_is_told_of_shares_and_cosines_stays_among_the_possible_values():
    shares, cosines = (0.99, 0.999, 0.90, 0.97, 0.94), (0.999, 0.6, 0.99, 0.98, 0.99)
    assert stats.ttest_1samp(cosines, 0).confidence_interval(0.95)[1] > 1
    study = dataclasses.replace(
        studies()["drift"],
        tests=(),
        measure=lambda _: {"a share": summarize(shares, SHARE), "a cosine": summarize(cosines, COSINE)},
    )
    _, beside = running._measure(study, None)
    assert {words: ends[1] < 1 and ends[0] < mean < ends[1] for words, (mean, ends) in beside.items()} == {
        "a share": True,
        "a cosine": True,
    }
    assert running._summarized(summarize((0.5, float("nan")), SHARE)) == (None, None)


def test_holm_is_the_step_down_of_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]


def test_rates_are_chosen_by_the_loss_where_something_else_is_measured():
    rng = np.random.default_rng(0)
    losses, measured = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    expected = []
    for seed in range(6):
        turns = [t for t in range(6) if not (seed - t) % 6 < 3]
        best = [np.argmin([np.mean([row[s] for s in range(6) if (s - t) % 6 < 3]) for row in losses]) for t in turns]
        expected.append(np.mean([measured[rate, seed] for rate in best]))
    np.testing.assert_allclose(at_own_best(losses, measured), expected)
    np.testing.assert_array_equal(at_own_best(losses[:, :1], measured[:, :1]), measured[np.argmin(losses[:, 0]), :1])


@pytest.mark.parametrize("scale", SCALES)
def test_every_setting_can_be_built(scale):
    for study in studies().values():
        for setting in study.settings.values():
            comparison = build_comparison(setting.values(scale))
            assert comparison.seeds >= 5
            assert comparison.base.seed > 100  # others than those of the trial


def test_every_claim_has_a_study_or_a_reason():
    known = studies()
    numbers = {n for study in known.values() for n in study.claims.split(", ")} | NOT_DONE.keys()
    assert numbers >= {str(n) for n in range(1, 26)} | {"z-loss"}
    assert sum(study.minutes for study in known.values()) <= 60
    for study in known.values():
        assert len({test.key for test in study.tests}) == len(study.tests)


def test_the_direction_of_the_mean_row_explains_what_lies_along_it():
    rng = np.random.default_rng(0)
    frequencies = np.exp(rng.normal(size=200))
    noise = 0.1 * rng.normal(size=(200, 5))
    assert explained(noise + np.outer(np.log(frequencies) + 3, np.ones(5)), frequencies) > 0.95
    assert explained(noise + np.ones(5), frequencies) < 0.1


def measure(r):
    ends, starts = r.matrices("toy", "tied"), r.matrices("toy", "tied", step=0)
    return {
        "loss": r.difference("toy", "tied"),
        "moved": [np.abs(a - b).max() for a, b in zip(ends, starts, strict=True)],
        "steps": [len(r.steps("toy", "tied"))] * 3,
        "share": [one.column_space_share for one in r.predictions("toy", "tied")],
    }


FIELDS = " ".join((*tiny.FIELDS, "compare.seeds=3", "train.steps=10", "checkpoint.every=5"))
TINY = Setting("toy", {"tied": "model.tying=tied", "untied": "model.tying=untied"}, FIELDS)
STUDY = Study(
    name="tiny",
    claims="1",
    claim="It moves.",
    source="nobody",
    settings={"toy": TINY},
    tests=(Expectation("moved", "how far it moved", 1), Expectation("loss", "tied - untied", -1, trial="-1")),
    measure=measure,
    minutes=0,
)


@functools.cache
def plans():
    return {"toy": tiny.plan_of(TINY.values("small"))}


def do(study, place, monkeypatch):
    monkeypatch.setattr(running, "plans_of", lambda *_: plans())  # compiled once
    return running.do_study(study, "small", None, place, threading.Event(), lambda _: None)


@pytest.mark.slow
def test_a_study_is_done_kept_and_told(tmp_path, monkeypatch):
    done = do(STUDY, tmp_path, monkeypatch)
    moved, loss = done.outcomes
    assert moved.verdict().startswith("holds")
    assert len(loss.per_seed) == 3
    assert done.seeds == (1000, 1001, 1002)
    assert done.beside["steps"][0] == 3
    assert 0 < done.beside["share"][0] < 1
    again = do(
        dataclasses.replace(STUDY, measure=lambda _: pytest.fail("it was measured before")), tmp_path, monkeypatch
    )
    assert again == done
    text = section(STUDY, done)
    assert "# tiny: claim 1\n\nIt moves. (nobody)" in text
    assert "| tied - untied | below 0 |" in text
    table = page({"tiny": (STUDY, done)}, "small")
    assert "1 studies with 2 tests, over 3 seeds each: " in table
    assert "- Claim 22: Input and output want vocabularies of different sizes" in table
    adjusted = holm([moved.p, loss.p])
    assert re.findall(r"\| ([\d.e+-]+) \| (?:holds|does|cannot)", table) == [f"{p:.2g}" for p in adjusted]
    other = dataclasses.replace(STUDY, tests=(dataclasses.replace(STUDY.tests[0], margin=1e6),))
    assert do(other, tmp_path, monkeypatch).outcomes[0].verdict().startswith("does not")

    def missing(_):
        raise Missing("tied diverged: too fast")

    lost = dataclasses.replace(STUDY, tests=(dataclasses.replace(STUDY.tests[0], margin=2.0),), measure=missing)
    assert do(lost, tmp_path, monkeypatch).outcomes[0].verdict() == "cannot be told here: tied diverged: too fast"
    path = tmp_path / "tiny" / "study.json"
    path.write_text(path.read_text().replace("too fast", "too slow"))
    with pytest.raises(Damaged):
        do(lost, tmp_path, monkeypatch)


def test_the_command_lists_and_refuses(capsys):
    command.main(["--list"], threading.Event())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(studies()) + len(NOT_DONE)
    assert all(why in line for (_, why), line in zip(NOT_DONE.values(), lines[len(studies()) :], strict=True))
    with pytest.raises(ConfigError, match=r"^study = 'nothing' is not possible; allowed: movers \| "):
        command.main(["nothing"], threading.Event())


@pytest.mark.slow
def test_three_quick_studies_from_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("drift", "cone", "rays"):  # of the same runs
        command.main([name], threading.Event())
        assert f"# {name}: claim" in capsys.readouterr().out
    assert len(list((tmp_path / "runs/studies-small/comparisons").iterdir())) == 1
