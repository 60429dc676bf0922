"""How tokens are shown."""

import html
import itertools

import markdown
import pytest

from tied_lm import tokenstring


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b"the", "the"),
        (b" the", "␣the"),
        ("naïve 漢 😀".encode(), "naïve␣漢␣😀"),
        (b"a\nb\tc\r", "a<0x0A>b<0x09>c<0x0D>"),
        (b"\x00\x1b[31m", "<0x00><0x1B>[31m"),
        (b"\xff\xc3(", "<0xFF><0xC3>("),
        (b"\xe6\xbc", "<0xE6><0xBC>"),
        ("\u202e\u200b\xa0\u2028".encode(), "<0xE2><0x80><0xAE><0xE2><0x80><0x8B><0xC2><0xA0><0xE2><0x80><0xA8>"),
        ("␣".encode(), "<0xE2><0x90><0xA3>"),
        (b"<0x0A>", "<0x3C>0x0A>"),
        (b"<unk>", "<unk>"),
        ("a str", "a␣str"),
        ("\ud800", "<0xED><0xA0><0x80>"),
    ],
)
def test_what_cannot_be_seen_is_written_out(token, shown):
    assert tokenstring.visible(token) == shown


def test_different_tokens_are_shown_differently():
    signs = [b"<", b"0x", b"0A", b">", b"\n", b" ", b"\xe2", b"\x90", b"\xa3", b"a"]
    tokens = {b"".join(parts) for n in range(5) for parts in itertools.product(signs, repeat=n)}
    assert len({tokenstring.visible(token) for token in tokens}) == len(tokens)


@pytest.mark.parametrize(
    "token", ["a|b", "<script>x</script>", "__init__", "`c`", "*", "&amp;", "[a](b)", "\n\n", "\\|"]
)
def test_markdown_shows_every_sign(token):
    cell = tokenstring.markdown(tokenstring.visible(token))
    page = markdown.markdown(f"| id | token |\n|---|---|\n| 0 | {cell} |", extensions=["tables"])
    (shown,) = page.split("<td>0</td>\n<td>")[1].split("</td>")[:1]
    assert "<" not in shown
    assert html.unescape(shown) == tokenstring.visible(token)


def test_a_terminal_is_safe():
    text = "tab\tbell\a\x1b[2J\r é 東\u202e\udc80\nnext"
    escaped = "tab\\tbell\\x07\\x1b[2J\\r é 東\\u202e\\udc80"
    assert tokenstring.printable(text) == escaped + "\\nnext"
    assert tokenstring.printable(text, keep="\n") == escaped + "\nnext"
