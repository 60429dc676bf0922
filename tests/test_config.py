"""What a config may hold, and the one line that says so when it may not."""

import copy
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from configs import bpe, text, toy, toy_directed, transformer, words
from tests import tiny
from tied_lm.checks import ConfigError, choose, default_options
from tied_lm.config import (
    Config,
    Train,
    build_comparison,
    build_run,
    defaults,
    differing_fields,
    digest,
    flatten,
    identity,
    override,
    read_run,
    to_dict,
)
from tied_lm.model.bodies import BODIES, Body
from tied_lm.model.embedding import VocabularyModel
from tied_lm.model.schemes import SCHEMES
from tied_lm.train.build import build_stream

ROOT = Path(__file__).parent.parent


def put(values, field, value):
    *groups, name = field.split(".")
    for group in groups:
        values = values[group]
    values[name] = value


def refusal(build, *args):
    """The message of the error, which must be one line."""
    with pytest.raises(ConfigError) as error:
        build(*args)
    message = str(error.value)
    assert "\n" not in message
    return message


def said(field, value, allowed):
    return f"{field} = {value!r} is not possible; allowed: {allowed}"


@pytest.mark.parametrize("module", [toy, toy_directed, text, bpe, words, transformer])
def test_the_configs_build(module):
    values = module.get_config().to_dict()
    config = build_run(values)
    assert isinstance(config, Config)
    comparison = build_comparison(values)
    assert list(comparison.arms) == ["tied", "untied"]
    assert {arm: c.model.tying for arm, c in comparison.arms.items()} == {"tied": "tied", "untied": "untied"}
    assert dataclasses.replace(comparison.arms["untied"], model=config.model) == config


def test_the_config_is_frozen(values):
    config = build_run(values)
    for part, field in ((config, "seed"), (config.model, "features")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, 1)


SEED = "0 to 2**32 - 1"
OUT_OF_RANGE = [
    ("seed", SEED, [-1, 2**32]),
    ("model.features", "at least 1", [0, -3]),
    ("model.init_std", "above 0", [0.0, -0.1]),
    ("data.seed", SEED, [-1, 2**32]),
    ("data.vocab_size", "at least 2 (0 is for all that a text has)", [1, -1]),
    ("data.batch_size", "at least 1", [0]),
    ("data.length", "at least 1", [0]),
    ("data.eval_tokens", "at least 1", [0]),
    ("data.reversibility", "0 to 1", [-0.01, 1.01]),
    ("data.classes", "at least 1", [0]),
    ("data.zipf_exponent", "0 or more", [-0.1]),
    ("data.min_count", "at least 1", [0]),
    ("data.heldout_fraction", "between 0 and 1, both excluded", [0.0, 1.0]),
    ("loss.z", "0 or more", [-0.1]),
    ("optimizer.learning_rate", "above 0", [0.0, -1.0]),
    ("optimizer.vocab_learning_rate", "0 or more", [-0.1]),
    ("optimizer.warmup_steps", "at least 0", [-1]),
    ("optimizer.decay_steps", "at least 0", [-1]),
    ("optimizer.beta1", "0 or more, below 1 (as float32)", [-0.1, 1.0, 0.99999999]),
    ("optimizer.beta2", "0 or more, below 1 (as float32)", [-0.1, 1.0, 0.99999999]),
    ("optimizer.weight_decay", "0 or more", [-0.1]),
    ("optimizer.vocab_weight_decay", "0 or more", [-0.1]),
    ("optimizer.clip_norm", "0 or more", [-0.1]),
    ("train.steps", "at least 1", [0, -1]),
    ("train.eval_every", "at least 1", [0]),
    ("model.block_tokens", "at least 0", [-1]),
    ("mesh.data", "at least 0", [-1]),
    ("mesh.vocab", "at least 0", [-1]),
    ("mesh.processes", "at least 0", [-1]),
    ("mesh.process", "at least -1", [-2]),
    ("log.scalars_every", "at least 1", [0]),
    ("log.rows_every", "at least 1", [0]),
    ("log.probe_tokens", "at least 1", [0]),
    ("checkpoint.every", "at least 1", [0]),
    ("checkpoint.keep", "at least 1", [0]),
    ("optimizer.name", "adam | adamw | sgd | momentum | muon | coupled_adam", ["rmsprop", ""]),
    ("optimizer.schedule", "constant | cosine | wsd", ["linear"]),
    ("data.bin_dtype", "uint16 | uint32 | int64", ["int16", ""]),
    ("data.order", "random | contiguous", ["sorted"]),
    ("model.compute_dtype", "float32 | bfloat16", ["float16", "bf16"]),
]


@pytest.mark.parametrize(("field", "allowed", "bad"), OUT_OF_RANGE, ids=[field for field, *_ in OUT_OF_RANGE])
def test_values_out_of_range_are_refused(values, field, allowed, bad):
    for value in bad:
        put(values, field, value)
        assert refusal(build_run, values) == said(field, value, allowed)


def test_every_number_has_a_range_in_this_file(values):
    numbers = {name for name, value in flatten(values).items() if type(value) in (int, float)}
    # Those of the groups `scheme` and `body` are checked by the classes that take them, and tested there.
    numbers = {name for name in numbers if not name.startswith(("scheme.", "body."))}
    assert numbers - {field for field, *_ in OUT_OF_RANGE} == {"compare.seeds", "compare.margin"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 2**32 - 1),
        ("data.vocab_size", 2),
        ("model.features", 1),
        ("data.reversibility", 0),
        ("data.reversibility", 1.0),
        ("data.zipf_exponent", 0.0),
        ("optimizer.beta1", 0.0),
        ("optimizer.warmup_steps", 999),
        ("log.tokens", (0, 255)),
        ("data.paths", ["a", "b"]),
        ("data.heldout_paths", ["a"]),
        ("data.min_count", 1),
    ],
)
def test_values_on_the_edge_are_possible(values, field, value):
    put(values, field, value)
    assert flatten(dataclasses.asdict(build_run(values)))[field] == (tuple(value) if type(value) is list else value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("seed", 0.0, "int, " + SEED),
        ("train.steps", True, "int, at least 1, at most 1,000,000,000"),
        ("train.steps", "10", "int, at least 1, at most 1,000,000,000"),
        ("optimizer.learning_rate", "0.1", "float, above 0"),
        ("optimizer.learning_rate", True, "float, above 0"),
        ("optimizer.learning_rate", math.inf, "a finite number, above 0"),
        ("data.reversibility", math.nan, "a finite number, 0 to 1"),
        ("model.scale_input", 1, "bool"),
        ("model.tying", 3, "str"),
        ("log.tokens", 3, "a list of int"),
        ("data.paths", "a.txt", "a list of str"),
        ("model", 3, "a group of fields"),
    ],
)
def test_wrong_types_are_refused(values, field, value, allowed):
    put(values, field, value)
    assert refusal(build_run, values) == said(field, value, allowed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train.steps", 10**400, f"train.steps = 1{'0' * 199} ... is not possible; allowed: at most 1,000,000,000"),
        ("train.steps", 10**5000, "train.steps = a number of very many digits is not possible; allowed: at most 1,000"),
        ("optimizer.learning_rate", 10**400, "optimizer.learning_rate = inf is not possible; allowed: a finite number"),
        (
            "optimizer.learning_rate",
            1e39,
            "optimizer.learning_rate = 1e+39 is not possible; allowed: what float32 holds",
        ),
        (
            "optimizer.learning_rate",
            1e-40,
            "optimizer.learning_rate = 1e-40 is not possible; allowed: what float32 hol",
        ),
        (
            "compare.margin",
            1e-40,
            "compare.margin = 1e-40 is not possible; allowed: what float32 holds: 1.2e-38 to 3.4e+",
        ),
        ("loss.z", 1e-40, "loss.z = 1e-40 is not possible; allowed: what float32 holds: 0, or 1.2e-38 to 3.4e+"),
        ("loss.z", 1e39, "loss.z = 1e+39 is not possible; allowed: at most 100"),
        ("data.vocab_size", 10**30, f"data.vocab_size = {10**30} is not possible; allowed: at most 1,000,000,000"),
        (
            "data.batch_size",
            10**9,
            "data.batch_size = 1000000000 is not possible; allowed: at most 10**9 / data.length",
        ),
        (
            "train.steps",
            10**9,
            "train.eval_every = 100 is not possible; allowed: at least 954, so that there are at mo",
        ),
        ("data.order", "a\0", "data.order = 'a\\x00' is not possible; allowed: text without NUL"),
    ],
    ids=itertools.count(),
)
def test_what_no_machine_holds_is_refused(values, field, value, message):
    put(values, field, value)
    assert refusal(build_comparison, values).startswith(message)


def test_a_message_harms_no_terminal(values):
    for field in ("\x1b[31m", "model.\x1b[31m"):
        assert refusal(override, values, field, "\n\u202e").isprintable()


def test_wrong_types_in_a_list_are_refused(values):
    values["log"]["tokens"] = (1, 2.5)
    assert refusal(build_run, values) == said("log.tokens", 2.5, "int")


def test_unknown_fields_are_named(values):
    values["train"]["epochs"] = 3
    assert refusal(build_run, values) == said("train.epochs", 3, "no such field; the fields are steps, eval_every")


def test_the_default_config_lists_every_field_with_its_default(values):
    assert flatten(json.loads(json.dumps(values))) == flatten(defaults())
    listing = (ROOT / "configs" / "toy.py").read_text()
    without = [name for name in flatten(values) if not re.search(rf"c\.{re.escape(name)} = .+?  # \w", listing)]
    assert without == ["compare.arms.tied", "compare.arms.untied"]  # said above them, with what an arm is


@pytest.mark.parametrize(("kinds", "base"), [(SCHEMES, VocabularyModel), (BODIES, Body)], ids=["scheme", "body"])
def test_an_option_of_two_classes_has_one_default(kinds, base):
    one_by_one = [default_options([kind], base).items() for kind in kinds.values() if kind is not None]
    pairs = set(itertools.chain(*one_by_one))
    assert len(dict(pairs)) == len(pairs)


def test_missing_fields_have_their_defaults(values):
    assert build_run({}) == build_run(values)
    assert build_comparison({}) == build_comparison(values)
    for field in flatten(values):
        if not field.startswith("compare.arms."):
            *groups, name = field.split(".")
            lacking = copy.deepcopy(values)
            del (lacking[groups[0]] if groups else lacking)[name]
            assert build_comparison(lacking) == build_comparison(values)
    few = {"train": {"steps": 300}, "compare": {"arms": {"a": "scheme.rank=2", "b": "body.depth=2"}, "baseline": "a"}}
    assert list(build_comparison(few).arms) == ["a", "b"]
    assert build_run(few).train == Train(steps=300)


def test_an_option_that_the_config_lacks_can_be_set(values):
    del values["scheme"]["rank"]
    override(values, "scheme.rank", "7")
    assert build_run(values).scheme["rank"] == 7
    assert refusal(override, values, "scheme.ranks", "7").startswith("scheme.ranks = '7' is not possible; allowed: no ")


DECAY_ALLOWED = "0, unless optimizer.name = 'adamw' or 'muon'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"log.tokens": (256,)}, said("log.tokens", 256, "ids from 0 to data.vocab_size - 1 = 255")),
        ({"log.tokens": (3, 3)}, said("log.tokens", (3, 3), "at most 100 ids, each once")),
        ({"data.zipf_exponent": 11.0}, said("data.zipf_exponent", 11.0, "at most 10")),
        ({"log.tokens": (-1,)}, said("log.tokens", -1, "ids from 0 to data.vocab_size - 1 = 255")),
        ({"optimizer.weight_decay": 0.1}, said("optimizer.weight_decay", 0.1, DECAY_ALLOWED)),
        (
            {"optimizer.name": "coupled_adam", "optimizer.vocab_weight_decay": 0.1},
            said("optimizer.vocab_weight_decay", 0.1, DECAY_ALLOWED),
        ),
        ({"optimizer.decay_steps": 5}, said("optimizer.decay_steps", 5, "0, unless optimizer.schedule = 'wsd'")),
    ],
)
def test_fields_that_do_not_go_together_are_refused(values, fields, message):
    for field, value in fields.items():
        put(values, field, value)
    assert refusal(build_run, values) == message


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_a_schedule_that_never_reaches_its_rate_is_refused(values, schedule):
    decay = 100 if schedule == "wsd" else 0
    most = 900 if schedule == "wsd" else 999
    values["optimizer"] |= {"schedule": schedule, "warmup_steps": most, "decay_steps": decay}
    build_run(values)
    values["optimizer"]["warmup_steps"] = most + 1
    words = f"at most train.steps - {'optimizer.decay_steps' if decay else 1} = {most}, so that the rate is reached"
    assert refusal(build_run, values) == said("optimizer.warmup_steps", most + 1, words)
    assert read_run(values).optimizer.warmup_steps == most + 1  # of a folder that is there already


def test_a_decay_without_updates_is_refused(values):
    values["optimizer"] |= {"schedule": "wsd", "decay_steps": 0}
    words = "at least 1 with optimizer.schedule = 'wsd', or it never decays"
    assert refusal(build_run, values) == said("optimizer.decay_steps", 0, words)
    values["optimizer"]["decay_steps"] = 1001
    assert refusal(build_run, values) == said("optimizer.decay_steps", 1001, "at most train.steps = 1000")
    values["optimizer"]["decay_steps"] = 1
    build_run(values)


def test_registries_say_what_there_is():
    assert choose({"a": 1, "b": 2}, "model.body", "b") == 2
    assert refusal(choose, {"a": 1, "b": 2}, "model.body", "c") == said("model.body", "c", "a | b")


@pytest.mark.parametrize("field", ["data.source", "data.tokenizer"])
def test_what_the_data_name_is_there_used_or_not(field):
    assert refusal(build_stream, tiny.make_config(f"{field}=char")).startswith(f"{field} = 'char' is not possible; all")


def test_differing_fields_name_what_changed(values):
    old = to_dict(build_run(values))
    values["model"]["features"], values["log"]["tokens"], values["seed"] = 64, (1,), 3
    new = to_dict(build_run(values))
    assert differing_fields(old, old) == []
    assert differing_fields(old, new) == ["log.tokens: [] -> [1]", "model.features: 32 -> 64", "seed: 0 -> 3"]
    assert differing_fields({"a": {"b": 1}}, {"a": {"c": 1}}) == ["a.b: 1 -> None", "a.c: None -> 1"]


def test_a_config_survives_json(values):
    config = build_run(values)
    assert build_run(to_dict(config)) == config


@pytest.fixture
def later(monkeypatch):
    """`optimizer.clip_norm` as a field that was added after names were first given."""
    first = {**identity.FIRST, "optimizer": identity.FIRST["optimizer"].replace("clip_norm", "")}
    monkeypatch.setattr(identity, "FIRST", first)
    identity._later.cache_clear()
    yield "clip_norm"
    identity._later.cache_clear()


def test_a_field_that_came_later_changes_nothing_at_its_default(values, later):
    new = to_dict(build_run(values))
    old = copy.deepcopy(new)
    del old["optimizer"][later]
    assert digest(old) == digest(new)
    assert differing_fields(old, new) == []
    new["optimizer"][later] = 1.0
    assert digest(old) != digest(new)
    assert differing_fields(old, new) == ["optimizer.clip_norm: 0.0 -> 1.0"]


def test_fields_on_which_no_number_depends_are_free():
    values = {"model": {"features": 3}, "compare": {"seeds": 3, "margin": 0.1, "match": "width"}}
    free = {"model": {"features": 3, "block_tokens": 9}, "mesh": {"data": 2}, "compare": {"seeds": 4, "match": "width"}}
    assert differing_fields(values, free) == []
    assert digest(values) == digest(free)
    free["compare"]["match"] = "parameters"
    assert differing_fields(values, free) == ["compare.match: 'width' -> 'parameters'"]
    assert digest(values) != digest(free)


def test_a_run_is_no_comparison(values):
    run = to_dict(build_run(values))
    assert any(
        line.startswith("compare.baseline") for line in differing_fields(run, run | {"compare": values["compare"]})
    )


def test_digest_depends_on_the_values_alone():
    assert digest({"a": 1, "b": {"c": [2]}}) == digest({"b": {"c": (2,)}, "a": 1}) == "d8bd289c"
    assert digest({"a": 1, "b": {"c": [3]}}) != digest({"a": 1, "b": {"c": [2]}})


def test_paths_with_commas_and_brackets(values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for listed, paths in {
        "a.txt,b.txt": ("a.txt", "b.txt"),
        '["a, b.txt", "[c].txt"]': ("a, b.txt", "[c].txt"),
        "[x].txt": ("[x].txt",),
        "[a.txt, b.txt]": ("a.txt", "b.txt"),
        "../a b/~c": ("../a b/~c",),
        "[1]": ("1",),
    }.items():
        override(values, "data.paths", listed)
        assert values["data"]["paths"] == paths
    # A file that is there is meant, whatever its name.
    for name in ("a, b.txt", "(1)", '["a"]'):
        (tmp_path / name).touch()
        override(values, "data.paths", name)
        assert values["data"]["paths"] == (name,)


def test_no_rows_without_a_text(values):
    put(values, "data.vocab_size", 0)
    assert refusal(build_run, values).startswith("data.vocab_size = 0 is not possible; allowed: at least 2; 0, for all")


@pytest.mark.parametrize("name", ["x" * 5000, "\U000e0001" * 300])
def test_a_name_of_any_length_is_a_line_that_can_be_read(name):
    values = toy.get_config().to_dict()
    values["loss"] = {name: 1}
    with pytest.raises(ConfigError, match="no such field") as raised:
        build_run(values)
    assert len(str(raised.value)) < 700
