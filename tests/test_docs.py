"""What the README and the pages of docs/ say can be typed."""

import re
import shlex
import threading
from pathlib import Path

import pytest

from configs import toy
from tests import tiny
from tied_lm.cli import compare
from tied_lm.cli.command import load_config
from tied_lm.config import build_comparison, override

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
TEXT = "".join(PAGES.values())


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.S)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the runs that the pages speak of are there, small."""
    place = tmp_path_factory.mktemp("docs")
    run = place / re.search(r"runs/toy-\w+", TEXT)[0]
    fields = [*tiny.FIELDS, "compare.seeds=2", "train.steps=12"]
    compare.main([f"--workdir={run}", *(f"--config.{field}" for field in fields)], threading.Event())
    return place


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_examples_run(page, place, monkeypatch):
    monkeypatch.chdir(place)
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


def test_the_first_example_says_what_it_computes(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    exec(compile(blocks("python.md", "python")[0], "python.md", "exec"), {})
    assert capsys.readouterr().out == "(5, 3) [2 0 1 0 0]\n"


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--config\.([\w.]+=[^\s'`)]+|[\w.]+=model[^']+)", TEXT))))
def test_every_field_exists(flag):
    values = toy.get_config().to_dict()
    field, _, text = flag.partition("=")
    override(values, field, text)
    build_comparison(values)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"configs/\w+\.py", TEXT))))
def test_every_config_exists(path):
    build_comparison(load_config(str(ROOT / path)))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    links = [link for link in re.findall(r"\]\(([^)#]+)", PAGES[page]) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page):
    scripts = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    lines = [line.partition("#")[0] for block in blocks(page, "sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1] for line in lines if line.startswith("tied-lm ")]
    assert [command for command in commands if command not in scripts] == []
