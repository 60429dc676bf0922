"""The sentences and the table of the verdict."""

import pytest

from tied_lm.verdict import conclusions, verdict

OPTIMIZER = {"name": "adam", "schedule": "cosine", "learning_rate": 0.01, "vocab_learning_rate": 0.0}


def values(mean, ci95=None):
    return {"mean": mean, "ci95": ci95, "per_seed": [mean]}


def arm(parameters, loss, tied):
    account = {"vocabulary": parameters, "body": 0, "saved": 100 * tied, "parameter_bytes": 400, "optimizer_bytes": 804}
    split = {"share": values(0.2), "cosine": values(-0.5)}
    band = {"rows": 10, "frequency": 1.0, "loss": values(loss)}
    return {
        "parameters": parameters,
        "account": account,
        "tied": tied,
        "eval_loss": values(loss),
        "excess": values(loss - 4.0),
        "clipped": 0.25,
        "split": split if tied else None,
        "bands": {"0": band | (split if tied else {})},
        "optimizer": OPTIMIZER,
        "steps": 1000,
    }


def summary(ci95, mean=0.01, seeds=5):
    return {
        "entropy": 4.0,
        "arms": {"tied": arm(100, 4.2 + mean, True), "untied": arm(200, 4.2, False)},
        "baseline": "untied",
        "differences": {"tied": {"eval_loss": values(mean, ci95)}},
        "seeds": list(range(seeds)),
        "eval_tokens": 65536,
        "probe_tokens": 32768,
        "arms_differ_in": ["model.tying"],
        "match": {"rule": "width", "arms": {}},
    }


@pytest.mark.parametrize(
    ("ci95", "mean", "words"),
    [
        ([0.005, 0.015], 0.01, "tied is worse than untied here: tied - untied = +0.0100 [+0.0050, +0.0150] nats"),
        ([-0.03, -0.01], -0.02, "tied is better than untied here: tied - untied = -0.0200 [-0.0300, -0.0100] nats"),
        ([-0.01, 0.03], 0.01, "tied and untied cannot be told apart here"),
        ([0.0, 0.02], 0.01, "an interval that includes zero"),
        (None, 0.01, "from one seed: there is no interval"),
    ],
)
def test_the_first_sentence_says_what_the_interval_allows(ci95, mean, words):
    sentence = conclusions(summary(ci95, mean))[0]
    assert words in sentence
    assert "100 fewer parameters (50%)" in sentence
    assert ("better" in sentence) == (ci95 is None or ci95[1] < 0)


def test_the_entropy_and_the_conditions_are_told():
    _, entropy, conditions = conclusions(summary([0.005, 0.015]))
    assert "tied ends 0.2100 nats above it, untied ends 0.2000 nats above it" in entropy
    for words in ("adam", "0.01", "1,000 updates", "5 seeds", "65,536", "model.tying"):
        assert words in conditions


@pytest.mark.parametrize(("before", "word"), [(90, "widened"), (110, "narrowed")])
def test_what_was_matched_is_told(before, word):
    changes = {"model.features": [32, 64], "body.width": [0, 130], "parameters": [before, 100]}
    matched = summary([0.005, 0.015]) | {"match": {"rule": "parameters", "arms": {"tied": changes}}}
    sentence = f"the parameters of untied within 1%, tied was {word}: model.features 32 -> 64, body.width 0 -> 130."
    assert f"To match {sentence}" in conclusions(matched)
    told = " ".join(verdict(matched).split())
    assert sentence.split(":")[0] in told
    # Nothing is saved against a model of another width, and size is no reason to prefer one of equals.
    assert "its number of parameters matched within 1%" in told
    assert "saved by tying" not in told
    assert "prefer it" not in " ".join(conclusions(summary([-0.005, 0.015]) | {"match": matched["match"]}))


def test_text_has_no_entropy():
    without = summary([0.005, 0.015]) | {"entropy": None}
    for one in without["arms"].values():
        one["excess"] = None
    assert len(conclusions(without)) == 2
    assert "entropy" not in verdict(without)


def test_what_the_loss_amounts_to_is_told_where_it_means_something():
    with_both = summary([0.005, 0.015])
    assert "perplexity" not in verdict(with_both)  # as in the summaries of older folders
    for one in with_both["arms"].values():
        one |= {"perplexity": values(74.25), "bits_per_byte": values(1.5, [1.4, 1.6]), "excess": None}
    text = verdict(with_both | {"entropy": None})
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
    one = summary([0.005, 0.015])
    one["arms"]["tied"]["bands"]["unseen"] = one["arms"]["tied"]["bands"]["0"] | {"loss": None, "frequency": 0.0}
    (line,) = [line for line in verdict(one).splitlines() if line.startswith("  unseen")]
    assert line.split()[:4] == ["unseen", "10", "0.0%", "-"]


def test_the_table_holds_the_account_and_the_bands_of_the_tied_arm_alone():
    text = verdict(summary([0.005, 0.015]))
    for words in (
        "100 saved by tying",
        "400 B and 804 B of optimizer state",
        "25% of the updates clipped",
        "N = 32,768",
    ):
        assert words in text
    assert "rows of tied" in text
    assert "rows of untied" not in text
