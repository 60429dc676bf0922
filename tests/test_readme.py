"""What the README says can be typed."""

import re
from pathlib import Path

import pytest

from configs import toy
from tied_lm.cli.command import load_config
from tied_lm.config import build_comparison, override

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_example_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(5, 3) [2 0 1 0 0]\n"


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--config\.([\w.]+=[^\s'`)]+|[\w.]+=model[^']+)", README))))
def test_every_field_exists(flag):
    values = toy.get_config().to_dict()
    field, _, text = flag.partition("=")
    override(values, field, text)
    build_comparison(values)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"configs/\w+\.py", README))))
def test_every_config_exists(path):
    build_comparison(load_config(str(ROOT / path)))
