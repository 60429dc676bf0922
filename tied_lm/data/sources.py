"""The token streams, found by name."""

import copy
from collections.abc import Mapping
from typing import Any

from tied_lm.config import put, read_data
from tied_lm.data.corpus import whole_vocabulary
from tied_lm.data.text import HeldoutWindows, TextStream, Windows
from tied_lm.data.toy import ToyStream

Stream = ToyStream | TextStream
Ahead = ToyStream | Windows
Heldout = ToyStream | HeldoutWindows


def with_vocabulary(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Nested values in which a `data.vocab_size` of 0 has become the number of rows that the text has.

    Raises:
        ConfigError: the text cannot be had, or has no such number.
    """
    data = read_data(values)
    if data.vocab_size or data.source != "text":
        return values
    own = copy.deepcopy(dict(values))
    put(own, "data.vocab_size", whole_vocabulary(data))
    return own


STREAMS: dict[str, type[ToyStream] | type[TextStream]] = {"toy": ToyStream, "text": TextStream}
