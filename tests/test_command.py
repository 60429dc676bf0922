"""The command line and the config that it names, in whatever state they come."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.test_commands import SMALL
from tied_lm.checks import ConfigError
from tied_lm.cli.command import ROOT, parse, set_up_jax
from tied_lm.config import build_comparison, build_run, resolved
from tied_lm.study.plan import Plan

BASE = "from configs import toy\n\n\ndef get_config():\n    c = toy.get_config()\n"
RETURN = "    return c\n"


def write_config(folder, *lines, name="mine.py"):
    path = folder / name
    path.write_text(BASE + "".join(f"    {line}\n" for line in lines) + RETURN)
    return f"--config={path}"


def refused(*arguments):
    """The one line of a refusal."""
    with pytest.raises(ConfigError) as error:
        build_comparison(parse("", list(arguments)).values)
    message = str(error.value)
    assert message.isprintable()
    return message


# --- references to other fields


WARMUP = "c.optimizer.warmup_steps = c.train.get_ref('steps') // 10"


def test_a_reference_follows_an_override(tmp_path):
    config = write_config(tmp_path, WARMUP)
    for arguments, warmup in [((), 100), (("--config.train.steps=200",), 20)]:
        values = parse("", [config, *arguments]).values
        assert build_run(values).optimizer.warmup_steps == warmup
        assert resolved(values)["optimizer"]["warmup_steps"] == warmup
    values = parse("", [config, "--config.train.steps=200", "--config.optimizer.warmup_steps=7"]).values
    assert build_run(values).optimizer.warmup_steps == 7


def test_a_reference_follows_an_override_of_an_arm_and_of_a_grid(tmp_path):
    from tied_lm.study.sweep import Sweep

    arguments = [write_config(tmp_path, WARMUP), "--config.compare.arms.tied=model.tying=tied train.steps=200"]
    arms = build_comparison(parse("", arguments).values).arms
    assert {name: arm.optimizer.warmup_steps for name, arm in arms.items()} == {"tied": 20, "untied": 100}
    sweep = Sweep.of(parse("", arguments[:1]).values, {"train.steps": [300, 500]}, tmp_path / "sweep")
    assert [p.plan.comparison.base.optimizer.warmup_steps for p in sweep.points] == [30, 50]


def test_a_reference_does_not_break_the_pairing_of_arms(tmp_path):
    config = write_config(tmp_path, "c.data.seed = c.model.get_ref('features') - 32")
    build_comparison(parse("", [config]).values)
    message = refused(config, "--config.compare.arms.tied=model.features=64")
    assert message.startswith("data.seed in compare.arms.tied = 32 is not possible; allowed: in an arm, ")


def test_a_reference_that_gives_nothing_is_one_line(tmp_path):
    config = write_config(tmp_path, "c.seed = c.train.get_ref('steps') % c.compare.get_ref('seeds')")
    assert build_run(parse("", [config]).values).seed == 0
    message = refused(config, "--config.compare.seeds=0")
    assert message.startswith("seed = nothing is not possible; allowed: what can be computed (ZeroDivisionError: ")


def test_a_whole_group_may_be_a_reference(tmp_path):
    config = write_config(tmp_path, "c.train = type(c)({'group': c.train}).get_ref('group')")
    assert build_run(parse("", [config, "--config.train.steps=77"]).values).train.steps == 77


# --- config files


def test_a_variant_and_modules_beside_the_config(tmp_path):
    (tmp_path / "beside_the_config.py").write_text("STEPS = {'short': 60, 'long': 3000}\n")
    (tmp_path / "my.py").write_text(
        "from configs import toy\nfrom beside_the_config import STEPS\n\n\ndef get_config(variant):\n"
        "    c = toy.get_config()\n    c.train.steps = STEPS[variant]\n    return c\n"
    )
    before = list(sys.path)
    command = parse("", [f"--config={tmp_path}/my.py:short"])
    assert command.values["train"]["steps"] == 60
    assert command.name == "my-short"
    assert sys.path == before
    assert "KeyError" in refused(f"--config={tmp_path}/my.py:medium")
    assert "TypeError" in refused(f"--config={tmp_path}/my.py")  # get_config() lacks its argument


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise SystemExit('two\\nlines')", "SystemExit: two\\nlines"),
        ("raise ValueError('\\x1b[31mred')", r"\x1b[31mred"),
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
        ("def get_config(): raise SystemExit", "SystemExit"),
        ("def get_config(: pass", "SyntaxError"),
        ("def get_config(): return {}", "TypeError"),
        ("def get_config(): return 3", "AttributeError"),
        ("x = 1", "AttributeError"),
        ("import absent_module", "absent_module"),
        ("def get_config(): return get_config()", "RecursionError"),
    ],
)
def test_a_config_that_fails_is_one_line(tmp_path, body, words):
    (tmp_path / "bad.py").write_text(body + "\n")
    message = refused(f"--config={tmp_path / 'bad.py'}")
    assert message.startswith("config = ")
    assert words in message


def test_a_config_that_prints_may_print(tmp_path, capsys):
    config = write_config(tmp_path, "print('hello')")
    parse("", [config])
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("name", ["absent.py", "", ".", "/", "absent.py:x", "a.txt", "\0.py", "x" * 300 + ".py"])
def test_a_config_that_is_no_file_is_one_line(name):
    assert refused(f"--config={name}").startswith("config = ")


def test_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("", []).name == "toy"
    assert parse("", ["--config=configs/text.py"]).values["data"]["source"] == "text"
    (tmp_path / "configs").mkdir()
    write_config(tmp_path / "configs", "c.train.steps = 77", name="toy.py")
    assert parse("", []).values["train"]["steps"] == 77


# --- flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.train.steps", "--workdir=x"], "train.steps = nothing is not possible; allowed: a value"),
        (["--config.train.steps"], "train.steps = nothing"),
        (["--flagfile=flags.txt"], "flagfile = 'flags.txt' is not possible; allowed: no such flag"),
        (["--workdir=" + "x" * 300], "workdir = "),
        ([f"--workdir={__file__}/x"], "workdir = "),
        (["--workdir=\udcff"], "workdir = "),
        (["--config.=3"], " = '3' is not possible; allowed: no such field"),
        (["--config.compare=3"], "compare = '3'"),
    ],
)
def test_flags_that_are_refused_by_name(arguments, words):
    assert refused(*arguments).startswith(words)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workdir", "--config.seed=3", "x"],
        ["--config", "--config.seed=3", "x"],
        ["--con=x"],
        ["x"],
        ["--\x1b[31m"],
        ["--", "--config.seed=3"],
    ],
)
def test_flags_without_a_value_do_not_take_the_next_one(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("", arguments)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()


def test_a_value_may_follow_its_field():
    values = parse("", ["--config.train.steps", "7", "--config.log.tokens", "-1", "--config.seed=3"]).values
    assert (values["train"]["steps"], values["log"]["tokens"], values["seed"]) == (7, (-1,), 3)


@pytest.mark.parametrize("field", ["vocab_size=1e30", "batch_size=1e9", "length=1e9", "eval_tokens=1e9 data.length=1"])
def test_what_no_machine_holds_is_refused_before_it_is_made(field):
    overrides = [f"--config.{item}" for item in f"data.{field}".split()]
    with pytest.raises(ConfigError, match=r"^data\.(vocab_size|batch_size|length|eval_tokens) = "):
        Plan.of(parse("", overrides).values)


# --- environments


def run_in(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=300,
    )


SHORT = [*SMALL, "--config.train.steps=5", "--config.compare.seeds=1"]


@pytest.mark.slow
def test_64_bits_and_another_folder_give_the_same_numbers(tmp_path):
    done = run_in(tmp_path, "experiments.train", "--workdir=a", *SHORT)
    assert done.returncode == 0, done.stderr
    done = run_in(tmp_path, "experiments.train", "--workdir=b", *SHORT, JAX_ENABLE_X64="1")
    assert done.returncode == 0, done.stderr
    assert tiny.metrics(tmp_path / "a") == tiny.metrics(tmp_path / "b")
    for name in ("rows.zarr", "probe.zarr"):
        tiny.assert_same_bits(*(tiny.dataset(tmp_path / run / name) for run in "ab"))


@pytest.mark.slow
def test_a_locale_of_ascii_changes_the_terminal_alone(tmp_path):
    place, text = tmp_path / "run", tmp_path / "é.txt"
    text.write_text("naïve café, ça va ␣ " * 200, encoding="utf-8")
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    arguments = [a for a in SHORT if "vocab_size" not in a and "classes" not in a]
    fields = ["--config=configs/text.py", f"--config.data.paths={text}", f"--workdir={place}"]
    done = run_in(tmp_path, "experiments.compare", *fields, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "�" not in (place / "report.html").read_text(encoding="utf-8")
    done = run_in(tmp_path, "experiments.compare", "--config.model.tying=é", **environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("platform", ["cuda", "no_such_platform"])
def test_a_platform_that_is_not_here_is_one_line(tmp_path, platform):
    if platform == "cuda" and any(Path("/dev").glob("nvidia*")):
        pytest.skip("there is one here")
    done = run_in(tmp_path, "experiments.train", "--workdir=a", *SHORT, JAX_PLATFORMS=platform)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: JAX_PLATFORMS = '{platform}' is not possible; allowed: a platform that is")
    assert not list(tmp_path.iterdir())


def test_no_home_is_told(monkeypatch, capsys):
    import jax

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    set_up_jax()
    assert "compiled programs are not kept: XDG_CACHE_HOME = nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_home_that_cannot_be_written_costs_the_cache_alone(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    home = str(tmp_path / "file" / "home")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    done = run_in(tmp_path, "experiments.train", "--workdir=a", *SHORT, HOME=home, XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr
    assert "compiled programs are not kept" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_there_is_anything_to_save_ends_a_command_at_once(number):
    script = (
        "import os; from tied_lm.cli.command import run; run(lambda _, stop: os.kill(os.getpid(), %d) or stop.wait(9))"
    )
    # In a shell whose interrupts are ignored, a script takes them as it finds them.
    before = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    done = subprocess.run([sys.executable, "-c", before + script % number], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-number, b"")
