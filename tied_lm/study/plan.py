"""What a comparison needs: its arms and their programs. A mistake shows here, before anything is written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from tied_lm import bands
from tied_lm.config import VERSION, Comparison, Config, Data, build_comparison, completed, defaults, resolved, to_dict
from tied_lm.data.documents import Account
from tied_lm.data.sources import Stream, with_vocabulary
from tied_lm.record.recorder import writers_of
from tied_lm.study.matching import Matching, match
from tied_lm.train import resources
from tied_lm.train.build import build_mesh, build_model, build_stream
from tied_lm.train.step import Trainer


@dataclasses.dataclass(frozen=True)
class Arm:
    """What all runs of an arm share."""

    config: Config
    stream: Stream
    trainer: Trainer

    @classmethod
    def of(cls, config: Config, stream: Stream, mesh: Mesh | None = None) -> "Arm":
        """An arm on some devices; by default on one, which is enough to read what others trained."""
        writers_of(config.log.writers)
        return cls(config, stream, Trainer(config, bands.bands_of(stream.frequencies), mesh))

    def disk_bytes(self) -> int:
        """What the folder of one run takes at most."""
        return resources.disk_bytes(self.trainer, self.stream.token_strings)


def build_arms(comparison: Comparison, streams: dict[Data, Stream] | None = None) -> dict[str, Arm]:
    """Everything that the runs need, so that a mistake shows before anything is written.

    Args:
        streams: those that are there already; new ones are added, so that comparisons of the same tokens share them.

    Raises:
        ConfigError: a field names nothing that exists, or the tokens cannot be had.
    """
    base = comparison.base
    build_model(base)  # even where every arm overrides it, a mistake in it is one
    for config in comparison.arms.values():
        resources.check_memory(config)
    streams = {} if streams is None else streams
    if base.data not in streams:
        streams[base.data] = build_stream(base)
    stream = streams[base.data].with_seed(base.seed)
    return {name: Arm.of(config, stream, build_mesh(config)) for name, config in comparison.arms.items()}


def comparison_values(values: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """The resolved config of a comparison, without what it does not say of the text."""
    compare = {
        "arms": {name: str(text) for name, text in resolved(values)["compare"]["arms"].items()},
        "baseline": comparison.baseline,
        "seeds": comparison.seeds,
        "match": comparison.match,
        "margin": comparison.margin,
    }
    return to_dict(comparison.base) | {"version": VERSION, "compare": compare}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison and everything that its runs need; nothing is written yet."""

    comparison: Comparison
    arms: dict[str, Arm]
    matched: Matching
    values: dict[str, Any]  # the content of config.json

    @classmethod
    def of(cls, values: Mapping[str, Any], streams: dict[Data, Stream] | None = None) -> "Plan":
        """The plan that nested values describe.

        Args:
            streams: see `build_arms`.

        Raises:
            ConfigError: of `build_comparison`, `match` and `build_arms`.
        """
        values = with_vocabulary(completed(values, defaults()))
        comparison, matched = match(build_comparison(values))
        arms = build_arms(comparison, streams)
        resolved = comparison_values(values, comparison) | arms[comparison.baseline].stream.content
        return cls(comparison, arms, matched, resolved)

    @property
    def about(self) -> Account | None:
        """How the text is split, if there is one."""
        return self.arms[self.comparison.baseline].stream.about

    def updates(self) -> list[tuple[str, int]]:
        """Arm and number of updates of each run, in their order."""
        return [(name, config.train.steps) for name, config in self.comparison.runs()]

    def disk_bytes(self) -> int:
        """What the folder of the comparison takes at most."""
        seeds = self.comparison.seeds
        runs = seeds * sum(arm.disk_bytes() for arm in self.arms.values())
        return runs + resources.summary_bytes(self.comparison.base, len(self.arms), seeds)
