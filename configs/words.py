"""Words of text in the layout of the PTB and WikiText files, whose paths the command line gives.

--config.data.paths=ptb.train.txt --config.data.heldout_paths=ptb.valid.txt
"""

from ml_collections import ConfigDict

from configs import text


def get_config() -> ConfigDict:
    c = text.get_config()
    c.data.tokenizer = "words"
    c.data.vocab_size = 10_000
    c.data.eval_tokens = 100_000  # all of the validation part of PTB
    return c
