"""The console command `tied-lm`, inside and outside of the repository."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import tomllib
import venv
from pathlib import Path

import pytest

from tied_lm.cli import __main__ as console
from tied_lm.cli import command
from tied_lm.config import build_comparison, completed, defaults

ROOT = Path(__file__).parent.parent


@pytest.fixture
def call(monkeypatch, capsys):
    def call_main(*arguments):
        monkeypatch.setattr(sys, "argv", ["tied-lm", *arguments])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as exit_:
            console.main()
        return exit_.value.code, *capsys.readouterr()

    return call_main


def test_the_wheel_installs_it():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"tied-lm": "tied_lm.cli.__main__:main"}


def test_every_script_is_a_command():
    scripts = {path.stem for path in (ROOT / "experiments").glob("[a-z]*.py")}
    assert scripts == set(console.COMMANDS)


def test_help_lists_the_commands(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert all(f"\n{name} " in out for name in console.COMMANDS if name != "compare")


@pytest.mark.parametrize("name", console.COMMANDS)
def test_each_command_has_its_help(call, name):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: tied-lm {name} [")


@pytest.mark.parametrize("arguments", [[], ["x"], ["comp"], ["--x"], ["\x1b[31m"], ["x", "compare"]])
def test_what_is_no_command_is_one_line(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()


def test_a_mistake_is_one_line(call):
    assert call("train", "--config.train.stepz=3") == (
        2,
        "",
        "error: train.stepz = '3' is not possible; allowed: no such field; the fields are steps, eval_every\n",
    )


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["train", "--config.train.stepz=3"], ["x"]])
def test_what_needs_no_arrays_loads_no_jax(arguments):
    code = f"import sys; sys.argv = ['tied-lm', *{arguments}]\nfrom tied_lm.cli.__main__ import main\n"
    code += "try: main()\nexcept SystemExit: assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_training_waits_for_no_library_that_it_does_not_need(tmp_path):
    (tmp_path / "torch.py").write_text("")
    code = "import sys\nfrom tied_lm.study import comparison, sweep\nfrom tied_lm.train import loop\n"
    code += "found = {'torch', 'matplotlib', 'scipy.stats', 'pandas', 'xarray', 'altair'} & sys.modules.keys()\n"
    code += "import torch\nassert not found, found"
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def in_terminal(*arguments, columns=80, **environment):
    """What a terminal is sent, from the first byte to the last."""
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "tied_lm.cli", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ) | environment, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    sent = b""
    with contextlib.suppress(OSError):  # so it ends
        while new := os.read(terminal, 4096):
            sent += new
    os.close(terminal)
    return process.wait(), sent.decode()


def test_a_terminal_is_told_something_at_once_and_of_a_mistake_in_one_line():
    code, sent = in_terminal("compare", "--config.model.features=0")
    assert code == 2
    first, error = sent.split("\r\x1b[K")
    assert first == "configs/toy.py: loading the libraries ..."
    assert error == "error: model.features = 0 is not possible; allowed: at least 1\r\n"


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """An empty folder, with no repository around the package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ROOT", tmp_path / "site-packages")
    return tmp_path


def test_the_default_experiment_needs_no_file(outside):
    parsed = command.parse("", ["--config.scheme.rank=7", "--config.compare.arms.x=model.tying=low_rank"])
    assert parsed.name == "toy"
    values = completed({}, defaults())
    assert build_comparison(command.parse("", []).values) == build_comparison(values)
    values["scheme"]["rank"], values["compare"]["arms"]["x"] = 7, "model.tying=low_rank"
    assert json.dumps(parsed.values) == json.dumps(values)


def test_a_config_gives_what_it_changes(outside):
    (outside / "mine.py").write_text(
        "from ml_collections import ConfigDict\n\n\ndef get_config():\n    c = ConfigDict({'train': {'steps': 300}})\n"
        "    c.optimizer = {'warmup_steps': c.train.get_ref('steps') // 10}\n    return c\n"
    )
    base = build_comparison(command.parse("", ["--config=mine.py", "--config.train.steps=200"]).values).base
    assert (base.train.steps, base.train.eval_every, base.optimizer.warmup_steps) == (200, 100, 20)


def test_a_config_in_a_package_finds_the_others(outside, monkeypatch):
    monkeypatch.delitem(sys.modules, "own_configs", raising=False)
    (outside / "own_configs").mkdir()
    (outside / "own_configs" / "base.py").write_text("STEPS = 77\n")
    (outside / "own_configs" / "mine.py").write_text(
        "from ml_collections import ConfigDict\nfrom own_configs.base import STEPS\n\n\n"
        "def get_config():\n    return ConfigDict({'train': {'steps': STEPS}})\n"
    )
    assert command.parse("", ["--config=own_configs/mine.py"]).values["train"]["steps"] == 77


@pytest.mark.slow
def test_an_installed_wheel_tells_the_fields_in_an_empty_folder(tmp_path):
    tree, empty = tmp_path / "tree", tmp_path / "empty"
    empty.mkdir()
    for name in ("tied_lm", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={tmp_path}", str(tree)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    places = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    (packages,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    environment = os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{places}"}
    call = [python, "-m", "tied_lm.cli", "compare", "--help"]
    told = subprocess.run(call, cwd=empty, env=environment, check=True, capture_output=True, text=True, timeout=300)
    assert "--config.model.features=32 D, embedding width --config.model.body" in " ".join(told.stdout.split())
    assert "--config.compare.arms.untied=model.tying=untied" in told.stdout


def test_a_command_is_kept_as_it_was_typed(call, monkeypatch):
    """`provenance.json` has it from `sys.argv`."""
    kept = []
    monkeypatch.setattr("tied_lm.cli.show.main", lambda arguments, stop: kept.extend((arguments, list(sys.argv))))
    call("show", "DIR")
    assert kept == [["DIR"], ["tied-lm show", "DIR"]]
