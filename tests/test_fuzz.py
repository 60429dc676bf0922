"""Whatever is typed: one line and exit status 2 with nothing written, or a plan that builds. All in one process."""

import copy
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import toy
from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.cli import command, compare, evaluate, sweep, train
from tied_lm.config import flatten
from tied_lm.config import folder as folder_
from tied_lm.model.bodies import BODIES
from tied_lm.model.schemes import SCHEMES
from tied_lm.study import comparison
from tied_lm.study import sweep as sweeps
from tied_lm.study.plan import Plan

ROOT = Path(__file__).parent.parent
VALUES = toy.get_config().to_dict()
FIELDS = sorted(flatten(VALUES))

few = settings(
    deadline=None,
    derandomize=True,  # the same cases in every run of the tests
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


def cases(count):
    return settings(few, max_examples=count)


class Planned(Exception):
    """Everything is checked and built, and what comes next would write."""


def planned(*_, **__):
    raise Planned


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """An empty folder to stand in, where every script stops before it writes."""
    folder = tmp_path_factory.mktemp("fuzz")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(comparison, "complete", planned)
        patched.setattr(folder_, "locked", planned)
        patched.setattr(sweeps.Sweep, "open", planned)
        yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("the cat sat on the mat.\n" * 100, encoding="utf-8")
    return path


def check(main, arguments, folder, capfd):
    """Call a script; what it says and leaves must be what is promised."""
    before = sorted(folder.rglob("*"))
    code = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["script", *arguments])
        try:
            command.run(main)
        except Planned:
            pass
        except SystemExit as exit_:
            code = exit_.code
    out, err = capfd.readouterr()
    assert sorted(folder.rglob("*")) == before
    if code is not None:
        assert code == 2, (arguments, out, err)
        assert not out
        assert err.endswith("\n")
        line = err[:-1]
        assert line.startswith("error: "), arguments
        assert line.isprintable(), (arguments, line)
        assert len(line) < 2000
    return "plan" if code is None else "refusal"


# --- strategies


def words(text):
    return st.sampled_from(text.split(" "))


whole = st.sampled_from([-1, 0, 1, 2, 3, 5, 16, 100, 2**16, 2**16 + 1, 10**9, 10**9 + 1, 2**31, 2**32, 2**63, 10**400])
number = st.floats().map(str) | words(
    "0 -0.0 1 0.5 -1 nan inf -inf 1e-400 1e-45 1e-30 1e38 1e39 1e400 1e30 3e2 3.0 0.999999999 1_0 0x10 1e"
)
optimizers = words("adam adamw sgd momentum muon coupled_adam")
names = st.sampled_from([*SCHEMES, *BODIES]) | optimizers
names |= words(
    "toy text bytes words bpe ids random contiguous constant cosine wsd float32 bfloat16 uint16 uint32 width"
)
odd = st.text(st.characters(exclude_characters="\0"), max_size=8) | words(
    "true False None nothing \x1b[31mred é \u202e \udcff ١٢ () [1,2 ,,, --config.seed = a=b ' \" "
)
odd |= st.sampled_from([" ", "a\nb", "x" * 5000, "9" * 5000])
value = whole.map(str) | number | names | odd
field = st.sampled_from(FIELDS) | words(
    ". model model. model.tying.x nothing scheme compare.arms compare.arms. compare.arms.x compare.arms.mean "
    "compare.arms._x compare.arms.\x1b[31m \x1b[0m __class__ seed.real é "
)
likely = {
    "model.tying": st.sampled_from(list(SCHEMES)),
    "model.body": st.sampled_from(list(BODIES)),
    "data.source": words("toy text"),
    "data.tokenizer": words("bytes words bpe ids"),
    "optimizer.name": optimizers,
    "compare.match": words("width parameters depth"),
    "data.vocab_size": st.integers(2, 300).map(str),
    "model.features": st.integers(1, 64).map(str),
    "body.depth": st.integers(1, 3).map(str),
    "data.classes": st.integers(1, 20).map(str),
    "train.steps": st.integers(1, 2000).map(str),
    "optimizer.warmup_steps": st.integers(0, 50).map(str),
    "compare.seeds": st.integers(1, 9).map(str),
}
plausible = st.sampled_from(sorted(likely)).flatmap(lambda name: likely[name].map(f"{name}={{}}".format))
assignment = st.tuples(field, value).map("=".join) | plausible
arm = st.tuples(words("tied untied x a-b"), st.lists(assignment, max_size=3).map(" ".join))
paths = words("x a/b é \x1b[31m \udcff /dev/null /dev/null/x ~ - ") | st.sampled_from(["x" * 300, "a b"])
flags = st.one_of(
    assignment.map("--config.{}".format),
    arm.map(lambda pair: "--config.compare.arms.{}={}".format(*pair)),
    field.map("--config.{}".format),
    words("--config --workdir --grid --index --workers --flagfile -- - -x x "),
    words("toy toy_directed text bpe words transformer x __init__").map("--config=configs/{}.py".format),
    paths.map("--workdir={}".format),
    (paths | st.just("configs/toy.py:x")).map("--config={}".format),
    value.map("--{}".format),
    assignment.map("--grid={}".format),
    st.tuples(words("index workers flagfile"), value).map(lambda pair: "--{}={}".format(*pair)),
)


def mostly(good, any_):
    """Lists of what is likely to be right with one of any kind among them, or of any kind alone."""
    return st.lists(any_, max_size=3) | st.tuples(st.lists(good, max_size=4), st.lists(any_, max_size=1)).map(
        lambda two: [*two[0], *two[1]]
    )


def own_text(arguments, text):
    """The arguments with a small text instead of the user's files and the text that ships with Python."""
    kept = [a for a in arguments if "paths" not in a]
    return [f"--config.data.paths={text}", *kept]


@pytest.mark.parametrize(("script", "examples"), [(compare, 300), (train, 150), (sweep, 150)])
def test_any_command_line(script, examples, here, text, capfd):
    known = ["--grid=seed=0,1"] if script is sweep else []

    @cases(examples)
    @given(mostly(plausible.map("--config.{}".format), flags))
    def run(arguments):
        found.append(check(script.main, [*known, *own_text(arguments, text)], here, capfd))

    found = []
    run()
    assert len(found) == examples
    assert min(found.count("plan"), found.count("refusal")) > examples // 10, found


anything = st.one_of(
    st.none(),
    st.booleans(),
    whole,
    st.floats(),
    odd,
    names,
    st.binary(max_size=3),
    st.lists(st.one_of(whole, odd, st.none()), max_size=3),
    st.dictionaries(st.one_of(odd, whole, st.none()), st.one_of(whole, odd), max_size=2),
    st.just(object()),
)


by_type = {int: st.integers(1, 64), float: st.floats(0.01, 0.99), bool: st.booleans()}
plain = {name: by_type[type(old)] for name, old in flatten(VALUES).items() if type(old) in by_type}
right = st.sampled_from(sorted(plain)).flatmap(lambda name: st.tuples(st.just(name), plain[name]))
wrong = st.tuples(st.sampled_from([*FIELDS, *VALUES, "compare.arms.x", "new", "model.new"]), anything)


@pytest.mark.untyped
def test_any_value_in_a_config_file():
    """A plan that builds, or one line."""

    @cases(300)
    @given(mostly(right, wrong))
    def run(changes):
        values = copy.deepcopy(VALUES)
        for name, new in changes:
            *groups, last = name.split(".")
            group = values
            for part in groups:
                group = group[part] if isinstance(group, dict) else {}
            if isinstance(group, dict) and "paths" not in name:
                group[last] = new
        if isinstance(values["data"], dict) and values["data"].get("source") == "text":
            return
        try:
            Plan.of(values).disk_bytes()
        except ConfigError as refusal:
            message = str(refusal)
        else:
            message = None
        found.append("plan" if message is None else "refusal")
        assert message is None or (message.isprintable() and len(message) < 2000)

    found = []
    run()
    assert min(found.count("plan"), found.count("refusal")) > 30, found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("finished") / "run"
    tiny.train(place, tiny.make_config("train.steps=3", "optimizer.warmup_steps=1"))
    return place


def test_any_flags_of_the_evaluation(finished, capfd):
    good = words("--samples=0 --greedy --length=2 --tokens=5 --step=3 --top_k=3 --step=best --seed=7")
    flag = words("step tokens samples length prompt temperature top_k seed greedy x")
    any_ = st.tuples(flag, value).map(lambda pair: "--{}={}".format(*pair)) | value

    @cases(100)
    @given(st.sampled_from([True, True, True, False]), mostly(good, any_))
    def run(there, arguments):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tied_lm.study.evaluation.evaluate", planned)
            place = [str(finished)] if there else []
            found.append(check(evaluate.main, [*place, *arguments], finished, capfd))

    found = []
    run()
    assert min(found.count("plan"), found.count("refusal")) > 10, found


@pytest.mark.slow
def test_what_builds_also_runs(tmp_path):
    """Tiny runs over the model space."""

    @cases(5)
    @given(
        st.sampled_from(list(SCHEMES)),
        st.sampled_from(list(BODIES)),
        optimizers,
        words("float32 bfloat16"),
        st.integers(1, 3),
    )
    def run(scheme, body, optimizer, dtype, steps):
        try:
            config = tiny.make_config(
                f"model.tying={scheme}",
                f"model.body={body}",
                "body.heads=2",
                f"optimizer.name={optimizer}",
                f"model.compute_dtype={dtype}",
                "scheme.untie_step=1",
                f"train.steps={steps}",
                "optimizer.warmup_steps=0",
            )
            trainer = tiny.new_trainer(config)
        except ConfigError:
            return
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        tiny.train(place, config, trainer=trainer)
        assert tiny.metrics(place)[-1]["step"] == steps

    run()
