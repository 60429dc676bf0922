"""How a token is shown: as text that harms no table, tag or terminal."""

import re

SPACE = "␣"


def visible(token: bytes | str) -> str:
    """A token's text, with spaces as ␣, and what cannot be seen (or is no UTF-8) byte by byte as <0x..>.

    Different tokens are shown differently: a ␣, and a < that would begin such a byte, are written as bytes, too.
    """
    text = token.decode(errors="surrogateescape") if isinstance(token, bytes) else token
    return re.sub(r"<(?=0x)|[^!-~]", lambda found: _shown(found.group()), text)


def _shown(character: str) -> str:
    if character == " ":
        return SPACE
    if character.isprintable() and character not in ("<", SPACE):
        return character
    code = ord(character)
    # A surrogate of this range stands for a byte that is no UTF-8.
    raw = bytes([code - 0xDC00]) if 0xDC80 <= code <= 0xDCFF else character.encode(errors="surrogatepass")
    return "".join(f"<0x{byte:02X}>" for byte in raw)


def printable(text: str, keep: str = "") -> str:
    """A text that does nothing to a terminal: all but what can be seen, and `keep`, is written as an escape."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def markdown(shown: str) -> str:
    """A shown token for a cell of a Markdown table: no sign of it is read as Markdown or HTML."""
    return re.sub(r"[^\w]|_", lambda found: f"&#{ord(found.group())};", shown)
