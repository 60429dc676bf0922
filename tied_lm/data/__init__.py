"""Where tokens come from: the toy stream and real text, and what turns text into ids.

A stream is a pure function: a batch depends on the seed and the step alone. May import the config and the root.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "stream": "Batch",
        "sources": "STREAMS Stream",
        "toy": "ToyStream",
        "text": "TextStream",
        "tokenizers": "TOKENIZERS",
        "corpus": "Corpus",
    },
)
