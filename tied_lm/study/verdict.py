"""A summary in words and as a table, for the terminal."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from tied_lm.data.documents import told

LARGEST_DIGITS = 8  # behind the point, before figures are written with an exponent


def with_interval(
    values: Mapping[str, Any] | None, sign: str = "", digits: int = 4, key: str = "ci95", unit: str = ""
) -> str:
    """`mean [low, high]`, or the mean alone where there is no interval, or `-` where nothing is defined.

    Figures get more digits where the largest of them would show fewer than two that count. Where there is no interval
    over seeds, that over the held-out tokens is shown.

    Args:
        digits: behind the point, at least.
        key: of the interval.
        unit: written behind all of it.
    """
    if values is None:
        return "-"
    ends = values.get(key) or values.get("ci95_heldout") or []
    figures = [values["mean"], *ends]
    largest = max(map(abs, figures))
    if largest and math.isfinite(largest):
        digits = max(digits, 1 - math.floor(math.log10(largest)))
    # z: what is rounded to 0 has no sign.
    form = f"{sign}z.{digits}f" if digits <= LARGEST_DIGITS else f"{sign}.1e"
    mean, *shown = [f"{figure:{form}}" for figure in figures]
    return mean + (f" [{', '.join(shown)}]" if shown else "") + unit


def counted(clusters: Mapping[str, Any]) -> str:
    """What an interval over the held-out tokens is over, in words."""
    kind = {"block": "block of windows", "lane": "lane of windows"}.get(clusters["kind"], clusters["kind"])
    first, *rest = kind.split(" ")
    words = " ".join([first + ("" if clusters["count"] == 1 else "s"), *rest])
    return f"{clusters['count']:,} held-out {words}"


def intervals(summary: Mapping[str, Any]) -> str:
    """What the intervals of the losses cover."""
    if summary["clusters"] is None:
        return "No arm has a result."
    over = counted(summary["clusters"])
    if len(summary["seeds"]) == 1:
        return f"In brackets the 95% interval over {over} alone: it says nothing of other seeds."
    together = "; those of the differences hold all at once" if len(summary["differences"]) > 1 else ""
    return f"In brackets the 95% interval over {len(summary['seeds'])} seeds and {over}{together}."


def table(rows: list[list[str]]) -> str:
    """Columns of equal width, the first aligned left and the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join("  " + line.rstrip() for line in lines)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _conclusion(summary: Mapping[str, Any], name: str) -> str:
    """One sentence that a person can act on, about one arm against the baseline."""
    baseline = summary["baseline"]
    arm, base = summary["arms"][name], summary["arms"][baseline]
    difference = summary["differences"][name]["eval_loss"]
    spared = base["parameters"] - arm["parameters"]
    share = abs(spared) / base["parameters"]
    size = "the same number of parameters"
    matched = summary["match"]["rule"] == "parameters"
    if matched:
        size = "its number of parameters matched within 1%"
    elif spared:
        size = f"{abs(spared):,} {'fewer' if spared > 0 else 'more'} parameters ({share:.0%})"
    shown = with_interval(difference, "+", key="ci95_simultaneous", unit=" nats a token")
    if difference["ci95_simultaneous"] is None:
        return (
            f"{name} - {baseline} = {shown} with {size}, from one seed: there is no interval over seeds, so this does "
            "not say which is better. Run more seeds (--config.compare.seeds=5)."
        )
    outcome, margin = difference["outcome"], summary["margin"]
    said = f"{name} - {baseline} = {shown}"
    if outcome in ("better", "worse"):
        return f"{name} is {outcome} than {baseline} here, by more than {margin:g} nats: {said}, with {size}."
    if outcome == "differs":
        side = "below" if difference["mean"] < 0 else "above"
        return (
            f"The loss of {name} is {side} that of {baseline} here, perhaps by less than matters ({margin:g} nats): "
            f"{said}, with {size}."
        )
    if outcome == "equal":
        advice = ", so prefer it if size matters" if spared > 0 and not matched else ""
        equal = f"{name} and {baseline} are equal for practical purposes here, within {margin:g} nats"
        return f"{equal}: {said}. {name} has {size}{advice}."
    low, high = difference["ci95_simultaneous"]
    seeds = difference["seeds_to_decide"]
    more = (
        "the held-out tokens vary too much for that: raise data.eval_tokens, or hold out more text"
        if seeds is None
        else f"about {seeds:,} seeds (--config.compare.seeds={seeds}) would decide whether it is {margin:g} nats"
    )
    return (
        f"{name} and {baseline} are not told apart here: {said}. A difference beyond {(high - low) / 2:.2g} nats would "
        f"have been seen; {more}. {name} has {size}."
    )


def _against_law(summary: Mapping[str, Any]) -> str | None:
    """How far each arm ends above the best possible loss."""
    if summary["entropy"] is None:
        return None
    far = [f"{name} by {with_interval({'mean': arm['excess']['mean']})}" for name, arm in summary["arms"].items()]
    return (
        f"On the same tokens the true law has a loss of {summary['law_loss']:.4f} nats (its entropy is "
        f"{summary['entropy']:.4f}). Expected losses lie above the best possible one, exactly: {', '.join(far)} nats."
    )


def _looks(summary: Mapping[str, Any]) -> list[str]:
    """Whether seeds were added after a look at the result."""
    earlier = summary.get("looks", [])[:-1]
    if not earlier:
        return []
    count = "once" if len(earlier) == 1 else f"{len(earlier)} times"
    return [
        f"Seeds were added after the result had been looked at {count}, with {', '.join(map(str, earlier))}: the "
        "intervals are those of a number of seeds fixed beforehand, and a chance difference is met more often than "
        "they say."
    ]


def _matches(summary: Mapping[str, Any]) -> list[str]:
    """What was done to the arms, so that they have as many parameters as the baseline."""
    said = []
    for name, changes in summary["match"]["arms"].items():
        before, after = changes["parameters"]
        fields = [f"{field} {a} -> {b}" for field, (a, b) in changes.items() if field != "parameters"]
        said.append(
            f"To match the parameters of {summary['baseline']} within 1%, {name} was "
            f"{'widened' if after > before else 'narrowed'}: {', '.join(fields)}."
        )
    return said


def _conditions(summary: Mapping[str, Any]) -> str:
    """What it all holds for."""
    optimizers = set()
    for arm in summary["arms"].values():
        o = arm["optimizer"]
        rate = arm.get("highest_rate", o["learning_rate"])  # older summaries do not have it
        ratio = o["vocab_learning_rate"] / o["learning_rate"]
        vocabulary = f" ({ratio * rate:g} for the vocabulary)" if ratio else ""
        updates = f"{arm['steps']:,} updates"
        optimizers.add(f"{o['name']}, {o['schedule']} learning rate up to {rate:g}{vocabulary}, {updates}")
    seeds = summary["seeds"]
    count = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
    return (
        f"It holds for {' / '.join(sorted(optimizers))}; {count}, {summary['eval_tokens']:,} held-out tokens in "
        f"{counted(summary['clusters'])} at the last step. The arms differ in "
        f"{', '.join(summary['arms_differ_in']) or 'nothing'}. Other rates may rank the arms otherwise."
    )


def _text(summary: Mapping[str, Any]) -> list[str]:
    """What text it was; the summaries of older folders do not say."""
    return [f"The {told(summary['text'])}."] if summary.get("text") else []


def _band_table(summary: Mapping[str, Any], name: str) -> str:
    """The lookup's share and cosine by band, from the probe."""
    arm = summary["arms"][name]
    rows = [["band", "rows", "of tokens", "loss", "lookup share", "cosine"]]
    for band, values in arm["bands"].items():
        loss = "-" if values["loss"] is None else f"{values['loss']['mean']:.4f}"
        cells = [with_interval(values[key], digits=3) for key in ("share", "cosine")]
        rows.append([band, str(values["rows"]), f"{values['frequency']:.1%}", loss, *cells])
    whole = [with_interval(arm["split"][key], digits=3) for key in ("share", "cosine")]
    rows.append(
        ["all", str(sum(b["rows"] for b in arm["bands"].values())), "100.0%", f"{arm['eval_loss']['mean']:.4f}", *whole]
    )
    return (
        f"What the lookup asks of the rows of {name}, against the scoring (probe of N = {summary['probe_tokens']:,} "
        "held-out tokens at the last step;\n  band 0 holds the most frequent rows; share = |lookup|^2 / (|lookup|^2 + "
        "|scoring|^2);\n  in brackets the 95% t interval over seeds, at this probe and N):\n" + table(rows)
    )


def diverged_arms(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Reason and parameters of each arm without a result. The summaries of older folders do not have the field."""
    return summary.get("diverged", {})


def _divergences(summary: Mapping[str, Any]) -> list[str]:
    """Which arms have no result, and what can be said without the baseline."""
    said = [f"{name} diverged, so it has no result: {arm['reason']}." for name, arm in diverged_arms(summary).items()]
    if summary["baseline"] in diverged_arms(summary):
        others = " | ".join(summary["arms"])
        said.append(
            f"Without the baseline, {summary['baseline']}, there is no difference to tell: the losses of the other "
            "arms stand for themselves."
            + (f" To compare these, set compare.baseline = {others}." if len(summary["arms"]) > 1 else "")
        )
    return said


def conclusions(summary: Mapping[str, Any]) -> list[str]:
    """The sentences of the verdict: each arm against the baseline, its size, the entropy, the conditions."""
    sentences = [*(_conclusion(summary, name) for name in summary["differences"]), *_divergences(summary)]
    if not summary["arms"]:
        return sentences
    # The summaries of older folders have no caveats.
    warnings = [sentence for arm in summary["arms"].values() for sentence in arm.get("caveats", [])]
    law = filter(None, [_against_law(summary)])
    return [*sentences, *_looks(summary), *_matches(summary), *law, *warnings, _conditions(summary), *_text(summary)]


def arm_table(summary: Mapping[str, Any]) -> list[list[str]]:
    """One row for each arm: parameters, loss, what the loss amounts to (where that means something), difference."""
    digits = {"excess": 4, "perplexity": 2, "bits_per_byte": 4}
    # The summaries of older folders lack the last two.
    present = [key for key in digits if any(arm.get(key) for arm in summary["arms"].values())]
    names = [key.replace("_", " ") for key in present]
    rows = [["arm", "parameters", "held-out loss", *names, f"less {summary['baseline']}"]]
    for name, arm in summary["arms"].items():
        difference = summary["differences"].get(name)
        rows.append(
            [
                name,
                f"{arm['parameters']:,}",
                with_interval(arm["eval_loss"]),
                *(with_interval(arm[key], digits=digits[key]) if arm.get(key) else "-" for key in present),
                "-" if difference is None else with_interval(difference["eval_loss"], "+", key="ci95_simultaneous"),
            ]
        )
    for name, arm in diverged_arms(summary).items():
        rows.append([name, f"{arm['parameters']:,}", "diverged", *("-" for _ in present), "-"])
    return rows


def accounts(summary: Mapping[str, Any]) -> list[str]:
    """For each arm, what its parameters are, the memory they take, and how often clipping acted."""
    lines = []
    matched = summary["match"]["rule"] == "parameters"  # against another width there is nothing to save
    for name, arm in summary["arms"].items():
        account = arm["account"]
        parts = [
            f"{account['vocabulary']:,} in the vocabulary"
            + (f" ({account['saved']:,} fewer than two matrices have)" if account["saved"] > 0 and not matched else ""),
            f"{account['body']:,} in the body",
            f"{_bytes(account['parameter_bytes'])} and {_bytes(account['optimizer_bytes'])} of optimizer state",
            f"{arm['clipped']:.0%} of the updates clipped",
        ]
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def verdict(summary: Mapping[str, Any]) -> str:
    """The summary for the terminal; losses in nats a token, with their 95% intervals in brackets."""
    parts = [f"Losses in nats a token. {intervals(summary)}\n{table(arm_table(summary))}"]
    parts += [_band_table(summary, name) for name, arm in summary["arms"].items() if arm["tied"]]
    parts[0] += "\n" + "\n".join("  " + line for line in accounts(summary))
    return "\n\n".join([*parts, *(textwrap.fill(sentence, 100) for sentence in conclusions(summary))])
