"""A summary in words and as a table, for the terminal."""

import textwrap
from collections.abc import Callable, Sequence

from tied_lm.data.documents import told
from tied_lm.intervals import Estimate, with_interval
from tied_lm.study.summary import Split, Summary
from tied_lm.study.table import table


def intervals(summary: Summary) -> str:
    """What the intervals of the losses cover."""
    if summary.clusters is None:
        return "No arm has a result."
    if len(summary.seeds) == 1:
        return f"In brackets the 95% interval over {summary.clusters} alone: it says nothing of other seeds."
    together = "; those of the differences hold all at once" if len(summary.differences) > 1 else ""
    return f"In brackets the 95% interval over {len(summary.seeds)} seeds and {summary.clusters}{together}."


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _conclusion(summary: Summary, name: str) -> str:
    """One sentence that a person can act on, about one arm against the baseline."""
    baseline = summary.baseline
    arm, base = summary.arms[name], summary.arms[baseline]
    difference = summary.differences[name]
    spared = base.parameters - arm.parameters
    share = abs(spared) / base.parameters
    size = "the same number of parameters"
    matched = summary.match.rule != "width"
    if matched:
        size = "its number of parameters matched within 1%"
        if summary.match.rule == "depth":
            size = f"{arm.parameters / base.parameters:.4f} times its number of parameters"
    elif spared:
        size = f"{abs(spared):,} {'fewer' if spared > 0 else 'more'} parameters ({share:.0%})"
    shown = with_interval(difference, "+", unit=" nats a token")
    if difference.ci95_simultaneous is None:
        few = "one seed: there is no interval over seeds"
        more = "Run more seeds (--config.compare.seeds=5)"
        if len(summary.seeds) > 1:
            few = f"{summary.clusters} alone: there is no interval over held-out tokens"
            more = "Raise data.eval_tokens, or hold out more text"
        return f"{name} - {baseline} = {shown} with {size}, from {few}, so this does not say which is better. {more}."
    outcome, margin = difference.outcome, summary.margin
    said = f"{name} - {baseline} = {shown}"
    if outcome in ("better", "worse"):
        return f"{name} is {outcome} than {baseline} here, by more than {margin:g} nats: {said}, with {size}."
    if outcome == "differs":
        side = "below" if difference.mean < 0 else "above"
        return (
            f"The loss of {name} is {side} that of {baseline} here, perhaps by less than matters ({margin:g} nats): "
            f"{said}, with {size}."
        )
    if outcome == "equal":
        advice = ", so prefer it if size matters" if spared > 0 and not matched else ""
        equal = f"{name} and {baseline} are equal for practical purposes here, within {margin:g} nats"
        return f"{equal}: {said}. {name} has {size}{advice}."
    low, high = difference.ci95_simultaneous
    seeds = difference.seeds_to_decide
    more = (
        "the held-out tokens vary too much for that: raise data.eval_tokens, or hold out more text"
        if seeds is None
        else f"about {seeds:,} seeds (--config.compare.seeds={seeds}) would decide whether it is {margin:g} nats"
    )
    return (
        f"{name} and {baseline} are not told apart here: {said}. A difference beyond {(high - low) / 2:.2g} nats would "
        f"have been seen; {more}. {name} has {size}."
    )


def _against_law(summary: Summary) -> list[str]:
    """How far each arm ends above the best possible loss."""
    if summary.entropy is None or summary.law_loss is None:
        return []
    excess = {name: arm.excess.mean for name, arm in summary.arms.items() if arm.excess is not None}
    far = ", ".join(f"{name} by {with_interval(Estimate(mean, None, ()))}" for name, mean in excess.items())
    return [
        f"On the same tokens the true law has a loss of {summary.law_loss:.4f} nats (its entropy is "
        f"{summary.entropy:.4f}). Expected losses lie above the best possible one, exactly: {far} nats."
    ]


def looks(seeds: Sequence[int]) -> list[str]:
    """Whether seeds were added after a look at the result.

    Args:
        seeds: numbers of seeds at which there was a look.
    """
    earlier = seeds[:-1]
    if not earlier:
        return []
    count = "once" if len(earlier) == 1 else f"{len(earlier)} times"
    return [
        f"Seeds were added after the result had been looked at {count}, with {', '.join(map(str, earlier))}: the "
        "intervals are those of a number of seeds fixed beforehand, and a chance difference is met more often than "
        "they say."
    ]


def _matches(summary: Summary) -> list[str]:
    """What was done to the arms, so that they have as many parameters as the baseline."""
    said = []
    for name, changes in summary.match.arms.items():
        before, after = changes["parameters"]
        fields = [f"{field} {a} -> {b}" for field, (a, b) in changes.items() if field != "parameters"]
        goal = f"To match the parameters of {summary.baseline} within 1%"
        done = "widened" if after > before else "narrowed"
        if summary.match.rule == "depth":
            goal = f"To come near the parameters of {summary.baseline} by whole blocks, then by their width"
            done = "changed"
        left = after / summary.arms[summary.baseline].parameters if summary.baseline in summary.arms else None
        ratio = "" if left is None or summary.match.rule != "depth" else f"; {left:.4f} times its number is left"
        said.append(f"{goal}, {name} was {done}: {', '.join(fields)}{ratio}.")
    return said


def _conditions(summary: Summary) -> str:
    """What it all holds for."""
    optimizers = set()
    for arm in summary.arms.values():
        o, rate = arm.optimizer, arm.highest_rate or arm.optimizer.learning_rate
        ratio = o.vocab_learning_rate / o.learning_rate
        vocabulary = f" ({ratio * rate:g} for the vocabulary)" if ratio else ""
        optimizers.add(f"{o.name}, {o.schedule} learning rate up to {rate:g}{vocabulary}, {arm.steps:,} updates")
    seeds = len(summary.seeds)
    return (
        f"It holds for {' / '.join(sorted(optimizers))}; {seeds} {'seeds' if seeds > 1 else 'seed'}, "
        f"{summary.eval_tokens:,} held-out tokens in {summary.clusters} at the last step. The arms differ in "
        f"{', '.join(summary.arms_differ_in) or 'nothing'}. Other rates may rank the arms otherwise."
    )


def _band_table(summary: Summary, name: str, split: Split, width: int | None, bold: Callable[[str], str]) -> str:
    """The lookup's share and cosine by band, from the probe."""

    def cells(of: Split) -> list[str]:
        return [with_interval(of.share, digits=3), with_interval(of.cosine, digits=3)]

    arm = summary.arms[name]
    rows = [["band", "rows", "of tokens", "loss", "lookup share", "cosine"]]
    for band, found in arm.bands.items():
        loss = "-" if found.loss is None else f"{found.loss.mean:.4f}"
        rows.append([band, str(found.rows), f"{found.frequency:.1%}", loss, *cells(found)])
    count = sum(band.rows for band in arm.bands.values())
    rows.append(["all", str(count), "100.0%", f"{arm.eval_loss.mean:.4f}", *cells(split)])
    about = (
        f"What the lookup asks of the rows of {name}, against the scoring (probe of N = {summary.probe_tokens:,} "
        "held-out tokens at the last step;\n  band 0 holds the most frequent rows; share = |lookup|^2 / (|lookup|^2 + "
        "|scoring|^2);\n  in brackets the 95% t interval over seeds, at this probe and N):"
    )
    about = about if width is None else textwrap.fill(" ".join(about.split()), min(100, width), subsequent_indent="  ")
    return f"{about}\n{table(rows, width, head=bold)}"


def _divergences(summary: Summary) -> list[str]:
    """Which arms have no result, and what can be said without the baseline."""
    said = [f"{name} diverged, so it has no result: {arm.reason}." for name, arm in summary.diverged.items()]
    if summary.baseline in summary.diverged:
        others = " | ".join(summary.arms)
        said.append(
            f"Without the baseline, {summary.baseline}, there is no difference to tell"
            + (": the losses of the other arms stand for themselves." if summary.arms else ".")
            + (f" To compare these, set compare.baseline = {others}." if len(summary.arms) > 1 else "")
        )
    return said


def conclusions(summary: Summary) -> list[str]:
    """The sentences of the verdict: each arm against the baseline, its size, the entropy, the conditions."""
    sentences = [*(_conclusion(summary, name) for name in summary.differences), *_divergences(summary)]
    if not summary.arms:
        return sentences
    warnings = [sentence for arm in summary.arms.values() for sentence in arm.caveats]
    text = [] if summary.text is None else [f"The {told(summary.text)}."]
    about = [*looks(summary.looks), *_matches(summary), *_against_law(summary)]
    return [*sentences, *about, *warnings, _conditions(summary), *text]


def accounts(summary: Summary) -> list[str]:
    """For each arm, what its parameters are, the memory they take, how often clipping acted, and time and memory of the
    updates."""
    lines = []
    matched = summary.match.rule != "width"  # against another width there is nothing to save
    for name, arm in summary.arms.items():
        account = arm.account
        parts = [
            f"{account['vocabulary']:,} in the vocabulary"
            + (f" ({account['saved']:,} fewer than two matrices have)" if account["saved"] > 0 and not matched else ""),
            f"{account['body']:,} in the body",
            f"{_bytes(account['parameter_bytes'])} and {_bytes(account['optimizer_bytes'])} of optimizer state",
            f"{arm.clipped:.0%} of the updates clipped",
        ]
        if arm.ms_per_update is not None:
            parts.append(f"{arm.ms_per_update:.3g} ms an update")
        if arm.peak_bytes is not None:
            parts.append(f"{_bytes(arm.peak_bytes)} of memory at their peak")
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def verdict(summary: Summary, width: int | None = None, bold: Callable[[str], str] = str) -> str:
    """The summary for the terminal; losses in nats a token, with their 95% intervals in brackets.

    Args:
        width: of the terminal; None if lines may have any length.
        bold: how what matters most is shown.
    """
    head = f"Losses in nats a token. {intervals(summary)}"
    lines = [_filled(head, width), table(summary.table(), width, head=bold)]
    lines += [_filled(line, width, "    ") for line in ("  " + line for line in accounts(summary))]
    parts = ["\n".join(lines)]
    parts += [_band_table(summary, name, arm.split, width, bold) for name, arm in summary.arms.items() if arm.split]
    said = [textwrap.fill(sentence, min(100, width or 100)) for sentence in conclusions(summary)]
    main = len(summary.differences)
    return "\n\n".join([*parts, *map(bold, said[:main]), *said[main:]])


def _filled(line: str, width: int | None, indent: str = "") -> str:
    """A line as it is, or folded where a terminal is narrower."""
    return line if width is None else textwrap.fill(line, width, subsequent_indent=indent)
