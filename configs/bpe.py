"""Byte pairs of real text, by default of the documentation and source text that ship with Python."""

from ml_collections import ConfigDict

from configs import text


def get_config() -> ConfigDict:
    c = text.get_config()
    c.data.tokenizer = "bpe"
    c.data.vocab_size = 4096
    return c
