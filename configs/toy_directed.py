"""The toy stream with a directed chain, which symmetric tied logits cannot follow."""

from ml_collections import ConfigDict

from configs import toy


def get_config() -> ConfigDict:
    c = toy.get_config()
    c.data.reversibility = 0.0
    return c
