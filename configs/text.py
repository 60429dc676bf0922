"""Bytes of real text: by default the documentation and source text that ship with Python."""

from ml_collections import ConfigDict

from configs import toy


def get_config() -> ConfigDict:
    c = toy.get_config()
    c.data.source = "text"
    c.model.features = 64
    c.model.body = "mlp"
    c.compare.seeds = 3
    return c
