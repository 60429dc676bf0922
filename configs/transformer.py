"""A small Transformer on bytes of the text that ships with Python."""

from ml_collections import ConfigDict

from configs import text


def get_config() -> ConfigDict:
    c = text.get_config()
    c.model.body = "transformer"
    c.body.depth = 2
    c.data.batch_size = 16
    c.optimizer.learning_rate = 0.003
    c.data.eval_tokens = 32_768
    c.train.steps = 500
    return c
