"""The arms of a comparison, from the group `compare`."""

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from tied_lm.checks import ConfigError, build
from tied_lm.config.fields import Compare, Config, build_run, defaults
from tied_lm.config.overrides import override
from tied_lm.config.values import completed, flatten, resolved

MOST_ARMS = 100
RESERVED = ("mean", "hypothetical")  # names of what stands beside the arms
ARM_NAMES = (
    f"at most 64 letters, digits, - and _, the first a letter or digit; {' and '.join(RESERVED)} have another meaning"
)
# What an arm may set. All else is shared: on other tokens, seeds or probes its numbers could not be paired.
OF_AN_ARM = ("model.", "scheme.", "body.", "loss.", "optimizer.", "train.steps")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Arms by name, each with its config at the first seed, and how many seeds each is run with."""

    base: Config  # before the overrides of the arms
    arms: dict[str, Config]
    baseline: str
    seeds: int
    match: str
    margin: float  # of losses, nats a token: a smaller difference does not matter

    def runs(self) -> list[tuple[str, Config]]:
        """Every run as (arm, config), seed by seed, so that an early stop leaves whole pairs."""
        return [
            (arm, dataclasses.replace(config, seed=config.seed + k))
            for k in range(self.seeds)
            for arm, config in self.arms.items()
        ]


def overrides_of(arm: str, overrides: str) -> dict[str, str]:
    """What an arm sets, as text by field.

    Raises:
        ConfigError: it is something else.
    """
    found = {}
    for item in overrides.split():
        name, equals, text = item.partition("=")
        if not equals or name.startswith("compare"):
            allowed = "field=value, several separated by spaces; no field of compare"
            raise ConfigError(f"compare.arms.{arm}", overrides, allowed)
        found[name] = text
    return found


def _build_arm(values: Mapping[str, Any], arm: str, overrides: str) -> Config:
    """The config of one arm: `field=value` for each of its overrides, separated by spaces."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", arm) or arm in RESERVED:
        raise ConfigError("compare.arms", arm, ARM_NAMES)
    try:
        return _build_of(values, arm, overrides)
    except ConfigError as error:
        here = f"compare.arms.{arm}"
        if here in error.field:
            raise
        raise ConfigError(f"{error.field} in {here}", error.value, error.allowed) from None


def _build_of(values: Mapping[str, Any], arm: str, overrides: str) -> Config:
    own, changed = copy.deepcopy(dict(values)), {}
    for name, text in overrides_of(arm, overrides).items():
        override(own, name, text)
        changed[name] = text
    before, after = flatten(resolved(values)), flatten(resolved(own))
    # Those that refer to an overridden field among them.
    changed |= {name: value for name, value in after.items() if name not in changed and value != before.get(name)}
    for name, value in changed.items():
        if not name.startswith(OF_AN_ARM):
            raise ConfigError(
                f"{name} in compare.arms.{arm}",
                value,
                "in an arm, train.steps and the fields of model, scheme, body, loss and optimizer; the arms of a "
                f"comparison share all else, and `sweep --grid {name}=...` compares across it",
            )
    return build_run(own)


def build_comparison(values: Mapping[str, Any]) -> Comparison:
    """The comparison that nested values describe.

    Raises:
        ConfigError: unknown field, wrong type, impossible value, or an arm that cannot be built.
    """
    values = completed(values, defaults())
    base = build_run(values)
    compare = build(Compare, resolved(values)["compare"], "compare.")
    if len(compare.arms) > MOST_ARMS:
        raise ConfigError("compare.arms", f"{len(compare.arms):,} arms", f"at most {MOST_ARMS}")
    arms = {str(arm): _build_arm(values, str(arm), str(text)) for arm, text in compare.arms.items()}
    if len(arms) < 2:
        raise ConfigError("compare.arms", tuple(arms), "at least two arms")
    baseline, seeds, last = compare.baseline, compare.seeds, base.seed + compare.seeds - 1
    if baseline not in arms:
        raise ConfigError("compare.baseline", baseline, " | ".join(arms))
    if last >= 2**32:
        raise ConfigError("seed", base.seed, f"at most 2**32 - {seeds}, so that compare.seeds = {seeds} fit")
    return Comparison(base, arms, baseline, seeds, compare.match, compare.margin)
