"""What an update would take of each device of a mesh that need not be there: memory, and what devices tell each other.

Of a tied model without a body, in float32, with AdamW.
"""

import dataclasses

import jax
from jax.sharding import AxisType

from tied_lm.checks import ConfigError
from tied_lm.config import Config
from tied_lm.model.mesh import DATA, VOCAB
from tied_lm.record.slots import Records
from tied_lm.study.plan import Arm
from tied_lm.train.build import build_stream
from tied_lm.train.resources import shown

FLOAT = 4  # bytes


def collective_bytes(vocab_size: int, features: int, tokens: int, data: int, vocab: int) -> int:
    """What a device gives to sums over others in an update without a record.

    Over the rows: the largest logit, the sum of exponentials and the logit of the target of each token, its vector and
    the gradient of that. Over the tokens: the tables of the lookup, of what involves every row, and of the scoring.
    """
    rows, own = -(-vocab_size // vocab), tokens // data
    over_rows = own * (3 + 2 * features) if vocab > 1 else 0
    over_tokens = 3 * rows * features if data > 1 else 0
    return FLOAT * (over_rows + over_tokens)


def record_bytes(vocab_size: int, features: int, data: int, vocab: int) -> int:
    """What a record of the rows adds to them, but for what is a number for each row: the tables of the lookup, of
    `own` and of `data`."""
    return FLOAT * 3 * -(-vocab_size // vocab) * features if data > 1 else 0


def _arm(vocab_size: int, features: int, tokens: int, sequences: int) -> Arm:
    """The default run of such sizes, on a machine that need not hold it."""
    config = Config()
    data = dataclasses.replace(config.data, vocab_size=vocab_size, batch_size=sequences, length=tokens // sequences)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, features=features), data=data)
    # A mesh, though of one device, since what has none records rows in another way.
    mesh = jax.make_mesh((1, 1), (DATA, VOCAB), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    return Arm.of(config, build_stream(config), mesh)


def device_bytes(vocab_size: int, features: int, tokens: int, data: int, vocab: int) -> int:
    """Memory of a device: that of its rows and tokens by themselves, as compiled here, and the records of all rows."""

    def of_records(arm: Arm) -> int:
        slots = jax.eval_shape(lambda: Records.empty(arm.trainer.slots + 1, arm.trainer.model))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots))

    part = _arm(-(-vocab_size // vocab), features, tokens // data, 1)
    peak = part.trainer.peak_bytes(part.stream.ahead(0, 1)) or 0
    return peak + of_records(_arm(vocab_size, features, data, data)) - of_records(part)


def told_scale(vocab_size: int, features: int, tokens: int, data: int, vocab: int) -> str:
    """Both, in a line.

    Raises:
        ConfigError: a number below 1, or tokens that the mesh does not divide.
    """
    shape = (vocab_size, features, tokens, data, vocab)
    if min(shape) < 1 or tokens % data:
        allowed = "V D N DATA VOCAB, all of them at least 1, where DATA divides N"
        raise ConfigError("scale", " ".join(map(str, shape)), allowed)
    memory, told = shown(device_bytes(*shape)), shown(collective_bytes(*shape))
    more = shown(record_bytes(vocab_size, features, data, vocab))
    return (
        f"on each of {data * vocab} devices: {memory} of memory, and {told} to sums over others in an update, "
        f"{more} more where rows are recorded"
    )
