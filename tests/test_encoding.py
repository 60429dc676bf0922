"""Files are UTF-8, whatever the locale."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for folder in ("tied_lm", "experiments", "configs") for path in sorted((ROOT / folder).rglob("*.py"))]


def opened_without_encoding(source):
    """Lines of the calls that read or write text in the encoding of the locale."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        named = {keyword.arg for keyword in call.keywords}
        match call.func:
            case ast.Attribute(attr="read_text" | "write_text"):
                text = True
            case ast.Name(id="open") | ast.Attribute(attr="open", value=ast.Name(id="io")):
                text = not any(isinstance(a, ast.Constant) and "b" in str(a.value) for a in call.args[1:2])
            case ast.Attribute(attr="open", value=ast.Name(id="os")):
                text = False  # a descriptor, whose bytes have no encoding
            case ast.Attribute(attr="open"):  # of a path; without a mode it may be of any class
                text = any("b" not in str(a.value) for a in call.args[:1] if isinstance(a, ast.Constant))
            case _:
                text = False
        if text and "encoding" not in named:
            yield call.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_text_file_has_an_encoding(path):
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    assert [f"{path.name}:{n}: {lines[n - 1].strip()}" for n in opened_without_encoding(source)] == []


def test_the_check_finds_them():
    for line in ("p.read_text()", "p.write_text('x')", "open('x')", "open('x', 'w')", "p.open('a')", "p.open('w')"):
        assert list(opened_without_encoding(line)) == [1], line
    for line in ("p.read_text(encoding='utf-8')", "open('x', 'rb')", "p.open('wb')", "ts.open(spec, open=True)"):
        assert not list(opened_without_encoding(line)), line
