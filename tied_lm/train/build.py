"""From a config to what it describes: the model and the token stream."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from tied_lm.checks import ConfigError, check_options, choose, own_options
from tied_lm.config import Config
from tied_lm.data.sources import STREAMS, Stream
from tied_lm.data.tokenizers import TOKENIZERS
from tied_lm.model.bodies import BODIES, Body
from tied_lm.model.embedding import VocabularyModel
from tied_lm.model.mesh import DATA, make_mesh
from tied_lm.model.schemes import RENAMED, SCHEMES


def build_model(config: Config, frequency_bands: Sequence[int] = (), mesh: Mesh | None = None) -> VocabularyModel:
    """The model that a config names; it may want to know the band of each row, and on which devices rows lie.

    Raises:
        ConfigError: an option of any scheme or body, used or not, is not what its class declares; or the scheme or the
            body cannot be built.
    """
    check_options(SCHEMES.values(), VocabularyModel, config.scheme, "scheme")
    check_options([kind for kind in BODIES.values() if kind is not None], Body, config.body, "body")
    if config.model.tying in RENAMED:
        raise ConfigError("model.tying", config.model.tying, RENAMED[config.model.tying])
    scheme = choose(SCHEMES, "model.tying", config.model.tying)
    m, own = config.model, own_options(scheme, VocabularyModel, config.scheme, "scheme")
    shared = (m.features, build_body(config), jnp.dtype(m.compute_dtype), m.init_std, m.scale_input)
    model = scheme(config.data.vocab_size, *shared, tuple(frequency_bands), m.block_tokens, mesh, **own)
    model.check()
    if model.untied_from is not None and model.untied_from >= config.train.steps:
        raise ConfigError("scheme.untie_step", model.untied_from, f"below train.steps = {config.train.steps}")
    return model


def build_mesh(config: Config) -> Mesh | None:
    """The devices of a run that a config asks for; None for one device.

    Raises:
        ConfigError: the machine has not so many, or they do not divide the batch, or a body has none to lie on.
    """
    mesh, batch_size = make_mesh(config.mesh.data, config.mesh.vocab), config.data.batch_size
    if mesh is not None and batch_size % mesh.shape[DATA]:
        raise ConfigError("mesh.data", mesh.shape[DATA], f"what divides data.batch_size = {batch_size}")
    if config.mesh.body == "sharded" and (mesh is None or mesh.shape[DATA] == 1):
        raise ConfigError("mesh.body", "sharded", "replicated, unless mesh.data has several devices")
    return mesh


def build_body(config: Config) -> Body | None:
    """The body that a config names; None if there is none."""
    kind = choose(BODIES, "model.body", config.model.body)
    if kind is None:
        return None
    body = kind(jnp.dtype(config.model.compute_dtype), **own_options(kind, Body, config.body, "body"))
    body.check(config.model.features)
    if getattr(body, "stateful", False) and config.data.order != "contiguous":
        raise ConfigError("body.stateful", True, "false, unless data.order = 'contiguous'")
    return body


def build_stream(config: Config) -> Stream:
    """The token stream that a config names.

    Raises:
        ConfigError: of its `build`; or there is no such tokenizer, used or not.
    """
    choose(TOKENIZERS, "data.tokenizer", config.data.tokenizer)
    return choose(STREAMS, "data.source", config.data.source).build(config.data, config.seed)
