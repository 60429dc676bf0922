"""Whether two configs are the same, and the short name of one."""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tied_lm.config.fields import defaults
from tied_lm.config.values import completed, flatten

# Groups and fields on which no number depends, or no number of a run: neither in a name nor compared.
FREE = ("compare.seeds", "compare.margin", "model.block_tokens", "mesh")
# Of the fields that there were when names were first given, each is part of the name. A later one is where it is off
# its default, so that it changes no name by being added.
FIRST = {
    "": "seed",
    "model": "tying features body compute_dtype init_std scale_input",
    "scheme": "same_start soft_cap projection_penalty readout_multiplier base_features untie_step lookup_weight "
    "scoring_weight rare_band gate_from_frequent gate_from_rare rank factor_features",
    "body": "depth width dropout stateful heads remat",
    "data": "source seed vocab_size batch_size length eval_tokens reversibility classes zipf_exponent tokenizer "
    "min_count bin_dtype paths heldout_paths heldout_fraction order",
    "optimizer": "name learning_rate vocab_learning_rate schedule warmup_steps decay_steps beta1 beta2 weight_decay "
    "vocab_weight_decay clip_norm",
    "train": "steps eval_every",
    "log": "scalars_every rows_every probe_tokens tokens",
    "checkpoint": "every keep",
    "compare": "arms.tied arms.untied baseline match",
}


@functools.cache
def _later() -> dict[str, Any]:
    """The defaults of the fields that came later."""
    first = {f"{group}.{name}".lstrip(".") for group, names in FIRST.items() for name in names.split()}
    return {field: value for field, value in flatten(defaults()).items() if field not in first}


def _is_free(field: str) -> bool:
    return any(field == free or field.startswith(free + ".") for free in FREE)


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field: old -> new` for each dotted field in which two nested configs differ.

    A field that one of them lacks has its default, if it has one; but whether there is a comparison is a difference.
    """
    known = {group: fields for group, fields in defaults().items() if group in old or group in new}
    if not ("compare" in old and "compare" in new):
        known.pop("compare", None)
    a, b = (flatten(completed({"version": 1} | dict(values), known)) for values in (old, new))
    return [
        f"{name}: {a.get(name)!r} -> {b.get(name)!r}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and not _is_free(name)
    ]


def digest(values: Mapping[str, Any]) -> str:
    """A short name for a resolved config: 8 hex digits of the SHA-256 of its sorted JSON."""
    return hashlib.sha256(json.dumps(_named(values), sort_keys=True).encode()).hexdigest()[:8]


def _named(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Of nested values, those that are part of the name."""
    named: dict[str, Any] = {}
    for name, value in values.items():
        field = f"{prefix}{name}"
        if isinstance(value, Mapping):
            fields = _named(value, f"{field}.")
            if fields or not value:
                named[name] = fields
        elif not _is_free(field) and (field not in _later() or value != _later()[field]):
            named[name] = value
    return named
