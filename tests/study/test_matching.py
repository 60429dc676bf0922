"""Arms of the baseline's size."""

import dataclasses

import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.config import build_comparison, override
from tied_lm.model.embedding import count_parameters
from tied_lm.study.matching import Matching, match
from tied_lm.study.plan import Plan
from tied_lm.train.build import build_model


def comparison(values, *overrides):
    for text in ("compare.match=parameters", *overrides):
        override(values, *text.split("=", 1))
    return build_comparison(values)


def total(config):
    return count_parameters(build_model(config))["total"]


def test_by_width_nothing_changes(values):
    before = comparison(values, "compare.match=width")
    assert match(before) == (before, Matching("width", {}))


def test_a_tied_arm_without_a_body_gets_twice_the_width(values):
    before = comparison(values)
    after, done = match(before)
    assert done == Matching("parameters", {"tied": {"model.features": (32, 64), "parameters": (8192, 16384)}})
    assert after.arms["untied"] == before.arms["untied"]
    assert after.arms["tied"].model == dataclasses.replace(before.arms["tied"].model, features=64)
    assert total(after.arms["tied"]) == total(after.arms["untied"]) == 2 * 256 * 32


def mlp_parameters(v, d, width, matrices):
    return matrices * v * d + d * width + width + width * d + d


@pytest.mark.parametrize("baseline", ["tied", "untied"])
@pytest.mark.parametrize(("v", "d"), [(256, 32), (1000, 48), (64, 128)])
def test_features_and_width_of_an_mlp_come_within_one_percent(values, baseline, v, d):
    sizes = (f"data.vocab_size={v}", f"model.features={d}", "model.body=mlp", f"compare.baseline={baseline}")
    after, done = match(comparison(values, *sizes))
    target = mlp_parameters(v, d, 4 * d, 1 if baseline == "tied" else 2)
    (name,) = done.arms
    assert name != baseline
    changes, config = done.arms[name], after.arms[name]
    width = config.body["width"] or 4 * config.model.features
    assert changes["parameters"][1] == mlp_parameters(v, config.model.features, width, 1 if name == "tied" else 2)
    assert abs(changes["parameters"][1] - target) <= 0.01 * target
    assert (changes["model.features"][1] > d) == (name == "tied")
    assert total(after.arms[baseline]) == target


def test_features_alone_where_they_do(values):
    _, done = match(comparison(values, "model.body=mlp", "data.vocab_size=50000", "model.features=512"))
    assert "body.width" not in done.arms["tied"]


def test_the_widths_are_the_nearest_there_are(values):
    # By trying all: no other width comes as near with this body.
    after, _ = match(comparison(values, "data.vocab_size=50", "model.features=40", "compare.arms.tied=model.body=mlp"))
    target, found = total(after.arms["untied"]), after.arms["tied"]
    model = found.model
    errors = {
        d: abs(total(dataclasses.replace(found, model=dataclasses.replace(model, features=d))) - target)
        for d in range(1, 40)
    }
    assert errors[model.features] == min(errors.values())


def test_heads_that_do_not_divide_the_width_are_passed_over(values):
    sizes = ("model.body=transformer", "body.heads=3", "model.features=60", "data.vocab_size=2000")
    after, done = match(comparison(values, *sizes))
    features = after.arms["tied"].model.features
    assert features > 60
    assert features % 6 == 0
    assert abs(done.arms["tied"]["parameters"][1] - total(after.arms["untied"])) <= 0.01 * total(after.arms["untied"])


def blocks(d, width, depth, matrices, v):
    return matrices * v * d + depth * (d * width + width + width * d + d)


def test_depth_is_the_nearest_number_of_blocks_and_then_the_width(values):
    sizes = ("compare.match=depth", "model.body=mlp", "data.vocab_size=1000", "body.depth=2")
    after, done = match(comparison(values, *sizes))
    target, found = blocks(32, 128, 2, 2, 1000), after.arms["tied"]
    depths = {depth: abs(blocks(32, 128, depth, 1, 1000) - target) for depth in range(1, 20)}
    assert found.body["depth"] == min(depths, key=depths.get) == 6
    assert done.arms["tied"]["body.depth"] == (2, 6)
    widths = {width: abs(blocks(32, width, 6, 1, 1000) - target) for width in range(1, 400)}
    assert found.body["width"] == min(widths, key=widths.get)
    assert done.arms["tied"]["parameters"][1] == blocks(32, found.body["width"], 6, 1, 1000)
    assert found.model.features == 32
    assert match(comparison(values, *sizes, "compare.arms.tied=model.tying=untied"))[1].arms == {}


def test_depth_without_a_body_is_refused(values):
    with pytest.raises(ConfigError, match=r"^compare.match = 'depth' .* since tied has no body \(model.body\)$"):
        match(comparison(values, "compare.match=depth"))


def test_a_model_that_changes_counts_as_what_it_becomes(values):
    after, done = match(comparison(values, "compare.arms.tied=model.tying=late_untie"))
    assert done.arms == {}
    assert after.arms["tied"].model.features == 32


def test_an_arm_that_cannot_be_matched_is_refused_with_the_nearest_totals(values):
    # With 7 rows an untied model has 14 parameters for each feature.
    small = ("data.vocab_size=7", "data.classes=7", "model.features=3", "compare.baseline=tied")
    with pytest.raises(ConfigError) as error:
        match(comparison(values, *small))
    assert str(error.value).startswith(
        "compare.match = 'parameters' is not possible; allowed: arms that can have the 21 "
    )
    assert str(error.value).endswith("parameters of tied within 1%; the nearest that untied can have: 14 and 28")


def test_the_resolved_arms_are_planned_and_found_again(values):
    for text in (*tiny.FIELDS, "compare.match=parameters", "compare.seeds=1"):
        override(values, *text.split("="))
    first, second = Plan.of(values), Plan.of(values)
    assert first.arms["tied"].config.model.features == 8
    assert first.arms["tied"].trainer.config == first.comparison.arms["tied"]
    assert first.values == second.values
    assert first.comparison == second.comparison
    assert first.values["compare"]["match"] == "parameters"
    assert first.matched.arms["tied"]["model.features"] == (4, 8)
