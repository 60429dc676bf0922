"""The sentences and the table of the verdict."""

import json
from dataclasses import replace

import pytest

from tests.study.summaries import estimate, summary, with_arms
from tied_lm.files import Damaged
from tied_lm.intervals import with_interval
from tied_lm.study.matching import Matching
from tied_lm.study.summary import read_summary, write_summary
from tied_lm.study.verdict import conclusions, verdict


@pytest.mark.parametrize(
    ("ci95", "mean", "words"),
    [
        ((0.011, 0.019), 0.015, "tied is worse than untied here, by more than 0.01 nats: tied - untied = +0.0150 ["),
        ((-0.03, -0.015), -0.02, "tied is better than untied here, by more than 0.01 nats: tied - untied = -0.0200 ["),
        ((0.005, 0.015), 0.01, "The loss of tied is above that of untied here, perhaps by less than matters (0.01"),
        ((-0.015, -0.005), -0.01, "The loss of tied is below that of untied here, perhaps by less than matters"),
        ((-0.004, 0.008), 0.002, "tied and untied are equal for practical purposes here, within 0.01 nats"),
        ((-3.1e-7, -2.9e-7), -3e-7, "tied - untied = -0.00000030 [-0.00000031, -0.00000029] nats a token"),
        ((-0.01, 0.03), 0.01, "not told apart here: tied - untied = +0.0100 [-0.0100, +0.0300] nats a token"),
        ((-1.5, 1.5), 0.0, "A difference beyond 1.5 nats would have been seen; about 40 seeds"),
        (None, 0.01, "from 32 held-out blocks of windows alone: there is no interval over held-out tokens"),
    ],
)
def test_the_first_sentence_says_what_the_interval_allows(ci95, mean, words):
    sentence = conclusions(summary(ci95, mean))[0]
    assert words in sentence
    assert "100 fewer parameters (50%)" in sentence
    assert "-7" not in sentence
    # Size decides only where no difference that matters is left.
    assert ("prefer it if size matters" in sentence) == (ci95 is not None and max(map(abs, ci95)) < 0.01)


def test_one_seed_has_no_interval():
    assert "from one seed: there is no interval over seeds" in conclusions(summary(None, seeds=1))[0]


def test_where_no_number_of_seeds_would_decide():
    sentence = conclusions(summary((-0.5, 0.5), 0.0, seeds_to_decide=None))[0]
    assert "raise data.eval_tokens, or hold out more text" in sentence


def test_the_law_and_the_conditions_are_told():
    _, law, conditions = conclusions(summary((0.005, 0.015)))
    assert "the true law has a loss of 4.0100 nats (its entropy is 4.0000)" in law
    assert "tied by 0.2100, untied by 0.2000 nats" in law
    for words in ("adam", "0.01", "1,000 updates", "5 seeds", "65,536", "32 held-out blocks of windows", "model.tying"):
        assert words in conditions


def test_the_intervals_say_what_they_cover():
    assert "95% interval over 5 seeds and 32 held-out blocks of windows.\n" in verdict(summary((0.005, 0.015)))
    alone = verdict(summary(None, seeds=1))
    assert "over 32 held-out blocks of windows alone: it says nothing of other seeds." in alone
    assert "[-9.0000, +9.0000]" in alone
    many = summary((0.005, 0.015))
    arms, differences = ({**of, "wide": of["tied"]} for of in (many.arms, many.differences))
    many = replace(many, arms=arms, differences=differences)
    assert "those of the differences hold all at once" in verdict(many)


def test_a_look_before_seeds_were_added_is_told():
    looked = conclusions(replace(summary((0.005, 0.015)), looks=(3, 5)))
    assert any("looked at once, with 3: " in sentence for sentence in looked)
    assert not any("looked at" in sentence for sentence in conclusions(summary((0.005, 0.015))))


@pytest.mark.parametrize(
    ("mean", "ci95", "shown"),
    [
        (-3e-7, (-4e-7, 1e-9), "-0.00000030 [-0.00000040, +0.00000000]"),
        (-3e-9, None, "-3.0e-09"),
        (0.0, (-0.00001, 0.1), "+0.0000 [+0.0000, +0.1000]"),
        (12.5, None, "+12.5000"),
    ],
)
def test_figures_have_enough_digits(mean, ci95, shown):
    assert with_interval(estimate(mean, ci95), "+") == shown


@pytest.mark.parametrize(("before", "word"), [(90, "widened"), (110, "narrowed")])
def test_what_was_matched_is_told(before, word):
    changes = {"model.features": (32, 64), "body.width": (0, 130), "parameters": (before, 100)}
    matched = replace(summary((0.005, 0.015)), match=Matching("parameters", {"tied": changes}))
    sentence = f"the parameters of untied within 1%, tied was {word}: model.features 32 -> 64, body.width 0 -> 130."
    assert f"To match {sentence}" in conclusions(matched)
    told = " ".join(verdict(matched).split())
    assert sentence.split(":")[0] in told
    # Nothing is saved against a model of another width, and size is no reason to prefer one of equals.
    assert "its number of parameters matched within 1%" in told
    assert "fewer than two matrices have" not in told
    assert "prefer it" not in " ".join(conclusions(replace(summary((-0.005, 0.015)), match=matched.match)))


def test_text_has_no_entropy():
    without = replace(with_arms(summary((0.005, 0.015)), excess=None), entropy=None)
    assert len(conclusions(without)) == 2
    assert "entropy" not in verdict(without)


def test_what_the_loss_amounts_to_is_told_where_it_means_something():
    with_both = summary((0.005, 0.015))
    assert "perplexity" not in verdict(with_both)  # as in the summaries of older folders
    with_both = with_arms(with_both, perplexity=estimate(74.25), bits_per_byte=estimate(1.5, (1.4, 1.6)), excess=None)
    text = verdict(replace(with_both, entropy=None))
    header, tied, _ = text.splitlines()[1:4]
    assert header.split() == [
        "arm",
        "parameters",
        "held-out",
        "loss",
        "perplexity",
        "bits",
        "per",
        "byte",
        "less",
        "untied",
    ]
    assert "  74.25  1.5000 [1.4000, 1.6000]  " in tied


def test_an_empty_band_is_readable():
    one = summary((0.005, 0.015))
    bands = one.arms["tied"].bands
    bands["unseen"] = replace(bands["0"], loss=None, frequency=0.0)
    (line,) = [line for line in verdict(one).splitlines() if line.startswith("  unseen")]
    assert line.split()[:4] == ["unseen", "10", "0.0%", "-"]


def test_the_table_holds_the_account_and_the_bands_of_the_tied_arm_alone():
    one = summary((0.005, 0.015))
    one.arms["tied"] = replace(one.arms["tied"], ms_per_update=1.2345, peak_bytes=3 * 2**20)
    text = verdict(one)
    for words in (
        "100 fewer than two matrices have",
        "400 B and 804 B of optimizer state",
        "25% of the updates clipped, 1.23 ms an update, 3 MiB of memory at their peak\n",
        "25% of the updates clipped\n",
        "N = 32,768",
    ):
        assert words in text
    assert "rows of tied" in text
    assert "rows of untied" not in text


def test_a_summary_of_other_content_is_not_told(tmp_path):
    write_summary(tmp_path, summary((0.011, 0.019)))
    assert read_summary(tmp_path).differences == summary((0.011, 0.019)).differences
    written = json.loads((tmp_path / "summary.json").read_text())
    del written["crc32c"]  # as in a file that somebody has edited
    for field, value in (("baseline", "other"), ("arms", {}), ("eval_tokens", None), ("margin", "0.01")):
        (tmp_path / "summary.json").write_text(json.dumps(written | {field: value}))
        with pytest.raises(Damaged, match=r"summary\.json is no summary; remove that file"):
            read_summary(tmp_path)
