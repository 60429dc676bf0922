"""What `import tied_lm` alone gives."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tied_lm

ROOT = Path(__file__).parent.parent
TEXT = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_public_names_are_listed_before_anything_is_loaded():
    listed = python("import sys, tied_lm; print(*dir(tied_lm)); assert 'jax' not in sys.modules")
    assert listed == sorted(tied_lm.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(re.findall(r"\btied_lm\.(\w+(?:\.\w+)*)(?=[`(])", TEXT))))
def test_what_the_pages_name_needs_no_further_import(name):
    python(f"import tied_lm; tied_lm.{name}")


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="'tied_lm' has no attribute 'tie'"):
        _ = tied_lm.tie
    with pytest.raises(ImportError):
        from tied_lm import tie  # noqa: F401
