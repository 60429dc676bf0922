"""What was trained, in a line, and every field of it, in a table."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tied_lm.config import Config, completed, defaults, flatten
from tied_lm.study.page import folded, html_table
from tied_lm.study.provenance import without_places
from tied_lm.study.subject import Subject


def _same_or_each(subject: Subject, told: Callable[[Config], str]) -> str:
    """What is the same in all arms once, and else by arm."""
    found: dict[str, list[str]] = {}
    for name, arm in subject.arms.items():
        found.setdefault(told(arm.config), []).append(name)
    if len(found) == 1:
        return next(iter(found))
    return " / ".join(f"{text} ({', '.join(names)})" for text, names in found.items())


def _data(subject: Subject, config: Config) -> str:
    data = config.data
    if data.source == "toy":
        return (
            f"toy stream (law {data.seed}: {data.classes} classes, Zipf exponent {data.zipf_exponent:g}, reversibility "
            f"{data.reversibility:g})"
        )
    sizes = [subject.values.get(part, {}).get("tokens") for part in ("text_train", "text_heldout")]
    known = f" of {sizes[0]:,} training and {sizes[1]:,} held-out tokens" if all(sizes) else ""
    return f"{data.source}{known}, tokenizer {data.tokenizer}"


def _body(config: Config) -> str:
    if config.model.body == "none":
        return "no body"
    body = {name: value for name, value in config.body.items() if name in ("depth", "width") and value}
    return f"body {config.model.body} ({', '.join(f'{name} {value}' for name, value in body.items())})"


def _rate(config: Config) -> str:
    optimizer = config.optimizer
    vocabulary = optimizer.vocab_learning_rate
    own = f", {vocabulary:g} for the vocabulary" if vocabulary else ""
    return f"{optimizer.name}, {optimizer.schedule} rate {optimizer.learning_rate:g}{own}"


def trained(subject: Subject) -> str:
    """Data, tokenizer, V, D, body, batch, steps, rate and seeds."""
    config = next(iter(subject.arms.values())).config
    data = config.data
    seeds = sorted({seed for _, seed, *_ in subject.states})
    parts = [
        _data(subject, config),
        f"V = {data.vocab_size:,}",
        f"D = {_same_or_each(subject, lambda c: f'{c.model.features:,}')}",
        _same_or_each(subject, _body),
        f"batches of {data.batch_size:,} x {data.length:,} = {data.batch_size * data.length:,} tokens",
        f"{_same_or_each(subject, lambda c: f'{c.train.steps:,}')} updates",
        _same_or_each(subject, _rate),
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}",
    ]
    return "; ".join(parts) + "."


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return without_places(text)


def config_table(values: Mapping[str, Any]) -> str:
    """Every field with its value and its default, folded; those that differ are marked. Paths are cut short."""
    usual = {name: group for name, group in defaults().items() if name in values}
    flat, standard = flatten(completed(values, usual)), flatten(usual)
    rows, marked = [["field", "value", "default"]], []
    for field, value in flat.items():
        default = _shown(standard[field]) if field in standard else "-"
        shown = _shown(value)
        if shown != default and (field in standard or field.startswith("compare.")):
            marked.append(len(rows) - 1)
        rows.append([field, shown, default])
    title = f"Resolved config: {len(rows) - 1} fields, {len(marked)} not the default"
    return folded(title, html_table(rows, marked=marked))
