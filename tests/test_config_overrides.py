"""Fields that the command line sets: texts with the types of their fields."""

import pytest

from tests.test_config import refusal, said
from tied_lm.config import (
    flatten,
    override,
)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("train.steps", "3e2", 300),
        ("train.steps", "3.0", 3),
        ("train.steps", "1_000", 1000),
        ("train.steps", "12", 12),
        ("seed", "4294967295", 2**32 - 1),
        ("optimizer.learning_rate", "1e-3", 0.001),
        ("optimizer.learning_rate", "1", 1.0),
        ("model.scale_input", "true", True),
        ("model.scale_input", "False", False),
        ("model.tying", "untied", "untied"),
        ("log.tokens", "1,2", (1, 2)),
        ("log.tokens", "(1, 2)", (1, 2)),
        ("log.tokens", "[-1]", (-1,)),
        ("log.tokens", "", ()),
        ("data.paths", "a b.txt,~/c/*.md", ("a b.txt", "~/c/*.md")),
        ("data.paths", "(a.txt,)", ("a.txt",)),
        ("data.paths", "2024,[b].txt", ("2024", "[b].txt")),
    ],
)
def test_overrides_take_the_type_of_the_field(values, field, text, value):
    override(values, field, text)
    found = flatten(values)[field]
    assert found == value
    assert type(found) is type(value)


def test_large_whole_numbers_are_read_exactly(values):
    override(values, "seed", str(2**53 + 1))
    assert values["seed"] == 2**53 + 1


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("train.steps", "3.5", said("train.steps", "3.5", "a whole number")),
        ("train.steps", "many", said("train.steps", "many", "a whole number")),
        ("train.steps", "inf", said("train.steps", "inf", "a whole number")),
        ("optimizer.beta1", "high", said("optimizer.beta1", "high", "a number")),
        ("model.scale_input", "yes", said("model.scale_input", "yes", "true | false")),
        ("train.epochs", "3", said("train.epochs", "3", "no such field; the fields are eval_every, steps")),
        ("seed.x", "3", "seed = '3' is not possible; allowed: no such group; there are "),
        ("modle.tying", "tied", "modle = 'tied' is not possible; allowed: no such group; there are "),
        ("train", "3", said("train", "3", "a field of this group: train.eval_every, train.steps")),
        ("compare.arms.a.b", "3", "compare.arms.a = '3' is not possible; allowed: no such group; there are "),
    ],
)
def test_bad_overrides_are_refused(values, field, text, message):
    before = flatten(values)
    assert refusal(override, values, field, text).startswith(message)
    assert flatten(values) == before


@pytest.mark.parametrize("text", ["--3", "²", "1.5", "a"])
def test_ids_that_are_no_whole_numbers_are_refused(values, text):
    assert refusal(override, values, "log.tokens", text) == said("log.tokens", text, "a whole number")
