"""The arms of a comparison, which share what would break their pairing."""

import pytest

from tests.test_config import refusal, said
from tied_lm.config import (
    ARM_NAMES,
    build_comparison,
    build_run,
    override,
)


@pytest.mark.parametrize("arms", ["abc", {"a b": "model.tying=tied"}, {1: "model.tying"}, {}, None])
@pytest.mark.untyped
def test_malformed_arms_are_refused(values, arms):
    values["compare"]["arms"] = arms
    assert refusal(build_comparison, values).startswith("compare.arms")


def test_a_new_arm(values):
    override(values, "compare.arms.wide", "model.tying=tied model.features=64 optimizer.learning_rate=1e-2")
    comparison = build_comparison(values)
    assert list(comparison.arms) == ["tied", "untied", "wide"]
    wide = comparison.arms["wide"]
    assert (wide.model.features, wide.optimizer.learning_rate) == (64, 0.01)
    assert comparison.base == build_run(values)
    assert comparison.arms["tied"].model.features == 32  # the arms do not touch each other


@pytest.mark.parametrize(
    ("arm", "overrides", "message"),
    [
        ("x", "model.tying", "compare.arms.x = 'model.tying' is not possible; allowed: field=value, several"),
        ("x", "compare.seeds=3", "compare.arms.x = 'compare.seeds=3' is not possible; allowed: field=value, several"),
        (
            "x",
            "model.tyin=tied",
            "model.tyin in compare.arms.x = 'tied' is not possible; allowed: no such field; the fields are ",
        ),
        ("x", "model.features=0", said("model.features in compare.arms.x", 0, "at least 1")),
        ("x", "log.tokens=a", said("log.tokens in compare.arms.x", "a", "a whole number")),
        ("a/b", "", said("compare.arms", "a/b", ARM_NAMES)),
        ("", "", said("compare.arms", "", ARM_NAMES)),
        ("_x", "", said("compare.arms", "_x", ARM_NAMES)),
        ("-x", "", said("compare.arms", "-x", ARM_NAMES)),
        ("a" * 65, "", said("compare.arms", "a" * 65, ARM_NAMES)),
        ("mean", "", said("compare.arms", "mean", ARM_NAMES)),
        ("hypothetical", "", said("compare.arms", "hypothetical", ARM_NAMES)),
        ("\x1b[31m", "", said("compare.arms", "\x1b[31m", ARM_NAMES)),
    ],
)
def test_arms_that_cannot_be_built_are_refused(values, arm, overrides, message):
    values["compare"]["arms"][arm] = overrides
    assert refusal(build_comparison, values).startswith(message)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("seed", "3"),
        ("data.reversibility", "0.5"),
        ("data.eval_tokens", "64"),
        ("data.order", "contiguous"),
        ("train.eval_every", "7"),
        ("log.probe_tokens", "64"),
        ("log.tokens", "1,2"),
        ("checkpoint.every", "10"),
    ],
)
def test_what_arms_share_is_not_set_in_one(values, field, text):
    values["compare"]["arms"]["x"] = f"model.tying=tied {field}={text} train.steps=7"
    message = refusal(build_comparison, values)
    assert message.startswith(
        f"{field} in compare.arms.x = {text!r} is not possible; allowed: in an arm, train.steps and the fields of "
        "model, scheme, body, loss and optimizer; "
    )
    assert f"--grid {field}=..." in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"baseline": "nobody"}, said("compare.baseline", "nobody", "tied | untied")),
        ({"seeds": 0}, said("compare.seeds", 0, "at least 1")),
        ({"margin": 0.0}, said("compare.margin", 0.0, "above 0")),
        ({"match": "size"}, said("compare.match", "size", "width | parameters | depth")),
        ({"arms": {}}, said("compare.arms", (), "at least two arms")),
        ({"arms": {"tied": ""}}, said("compare.arms", ("tied",), "at least two arms")),
        ({"seedz": 1}, said("compare.seedz", 1, "no such field; the fields are arms, baseline, seeds, match, margin")),
    ],
)
def test_comparisons_that_make_no_sense_are_refused(values, fields, message):
    values["compare"] |= fields
    assert refusal(build_comparison, values) == message


def test_all_seeds_must_fit(values):
    values["seed"] = 2**32 - 5
    assert build_comparison(values).runs()[-1][1].seed == 2**32 - 1
    values["seed"] += 1
    assert refusal(build_comparison, values).startswith(
        f"seed = {2**32 - 4} is not possible; allowed: at most 2**32 - 5"
    )


def test_runs_come_in_pairs_seed_by_seed(values):
    values["compare"]["seeds"], values["seed"] = 2, 7
    runs = build_comparison(values).runs()
    assert [(arm, config.seed) for arm, config in runs] == [("tied", 7), ("untied", 7), ("tied", 8), ("untied", 8)]
    assert all(config.model.tying == arm for arm, config in runs)
