"""Evaluate a run from one of its checkpoints, and let it write."""

import argparse
import json
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tied_lm.checks import ConfigError
from tied_lm.cli import terminal
from tied_lm.cli.command import Parser, check_path, set_up_jax, tell
from tied_lm.tokenstring import printable

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from tied_lm.data.sources import Stream
    from tied_lm.study.evaluation import Evaluated
    from tied_lm.train.step import Trainer

BOUNDS = {
    "tokens": (1, 10**9),
    "samples": (0, 1000),
    "length": (1, 100_000),
    "window": (1, 100_000),
    "top_k": (1, 10**9),
    "seed": (0, 2**32 - 1),
    "temperature": (0, 1000),
}
MOST_PREDICTED = 2048  # tokens whose predictions are measured: up to 4 CPU seconds with 50,000 rows


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description="Evaluate a run from one of its checkpoints, and sample from it.", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run: DIR/<arm>/seed<k> of a comparison")
    parser.add_argument("--step", default="last", metavar="N|best|last", help="the checkpoint; default: %(default)s")
    parser.add_argument("--tokens", type=int, metavar="N", help="held-out tokens; default: data.eval_tokens of the run")
    parser.add_argument("--samples", type=int, default=3, metavar="K", help="texts to write; default: %(default)s")
    parser.add_argument("--length", type=int, default=100, metavar="L", help="tokens of each; default: %(default)s")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what each begins with; default: a token drawn by its frequency"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="score each token with the W before it; default: data.length, what the model was trained on, or all for "
        "a body that carries a state",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: %(default)s")
    choice.add_argument("--greedy", action="store_true", help="take the likeliest token every time")
    parser.add_argument("--top_k", type=int, metavar="K", help="sample among the K likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the samples; default: %(default)s")
    flags = parser.parse_args(arguments)
    for name, (low, high) in BOUNDS.items():
        value = getattr(flags, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(name, value, f"{low} to {high:,}")
    check_path("run", flags.run)
    return flags


def _utf8(text: str) -> str:
    """A text of the command line, which may hold bytes of another encoding."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError("prompt", text, "UTF-8 text")
    return text


def _check_folder(place: Path) -> None:
    """Refuse what is not the folder of a run."""
    allowed = "the folder of a run: DIR/<arm>/seed<k> of a comparison, or that of a single run"
    try:
        values = dict(json.loads((place / "config.json").read_text(encoding="utf-8")))
        arms = ", ".join(values["compare"]["arms"]) if "compare" in values else None
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        raise ConfigError("run", str(place), allowed) from None
    if arms is not None:
        raise ConfigError("run", str(place), f"{allowed}; this is a comparison with {arms}")


def main(arguments: list[str], stop: threading.Event) -> None:
    flags = _parse(arguments)
    _check_folder(flags.run)
    terminal.begin(printable(f"{flags.run}: loading the libraries ..."))

    import numpy as np

    from tied_lm import open_run
    from tied_lm.config import differing_fields
    from tied_lm.config.folder import CONFIG
    from tied_lm.files import read_json
    from tied_lm.record.reader import check_logs
    from tied_lm.study.evaluation import evaluate
    from tied_lm.study.geometry import geometry_rows, prediction_rows, predictions_of
    from tied_lm.study.plan import Arm
    from tied_lm.study.table import table
    from tied_lm.train.build import build_stream
    from tied_lm.train.checkpoint import Checkpoints
    from tied_lm.train.resources import check_sampling

    set_up_jax()
    opened = open_run(flags.run)
    check_logs(flags.run)
    config, stream = opened.config, build_stream(opened.config)
    changed = differing_fields(opened.content, stream.content)
    if changed:
        raise ConfigError(
            "data.paths", config.data.paths, f"the text that the run was trained on; {'; '.join(changed)}"
        )
    if flags.top_k is not None and flags.top_k > config.data.vocab_size:
        raise ConfigError("top_k", flags.top_k, f"at most data.vocab_size = {config.data.vocab_size}")
    prompt = None if flags.prompt is None else stream.encode(_utf8(flags.prompt))
    if prompt == []:
        raise ConfigError("prompt", flags.prompt, "a text of at least one token")
    trainer = Arm.of(config, stream).trainer
    checkpoints = Checkpoints(flags.run / "checkpoints", config.checkpoint.keep, read_only=True)
    step = checkpoints.find(flags.step)
    fresh = trainer.init(np.uint32(config.seed))
    state = checkpoints.restore(fresh, step=step, config=read_json(flags.run / CONFIG, "restore it"))
    assert state is not None  # there is one of this step

    longest = (1 if prompt is None else len(prompt)) + flags.length - 1
    window = flags.window or (None if trainer.stateful else config.data.length)
    check_sampling(config, flags.samples, min(window or longest, longest))

    wanted = flags.tokens or config.data.eval_tokens
    tokens = int(min(wanted, stream.heldout_tokens))
    if flags.tokens is not None and tokens < wanted:
        tell(f"--tokens={wanted:,}: the held-out text has whole sequences of {tokens:,} only; all of these are used")
    print(f"{printable(str(flags.run))} after {step:,} updates: {config.model.tying}, body {config.model.body}")
    print(_told(evaluate(trainer, state.params, stream, tokens)))
    names = trainer.model.vocabulary
    ends, starts = ({name: params[name] for name in names} for params in (state.params, fresh.params))
    print(f"\nThe vocabulary matrices:\n{table(geometry_rows(ends, stream.frequencies, starts))}")
    predicted = predictions_of(trainer, state.params, stream, MOST_PREDICTED)
    print(f"\nWhat is predicted ({predicted.tokens:,} held-out tokens):\n{table(prediction_rows(predicted))}")

    with trainer.precision:
        _sample(flags, trainer, state.params, stream, prompt, longest, window)


def _sample(
    flags: argparse.Namespace,
    trainer: "Trainer",
    params: "PyTree",
    stream: "Stream",
    prompt: list[int] | None,
    longest: int,
    window: int | None,
) -> None:
    """Draw texts and show them.

    Args:
        longest: tokens before the last one of a text.
        window: with how many tokens before it a token is scored; all of them where it is None.
    """
    import jax.numpy as jnp
    import numpy as np

    from tied_lm.data.stream import named_key
    from tied_lm.model import sampling

    temperature = 0.0 if flags.greedy else flags.temperature
    count = flags.samples if temperature or prompt is None else min(flags.samples, 1)  # the others would be the same
    if not count:
        return
    key = named_key(flags.seed, "samples")
    if prompt is None:
        prompts = sampling.first_tokens(stream.frequencies, count, named_key(flags.seed, "prompts"))
    else:
        prompts = jnp.tile(jnp.asarray(prompt, jnp.int32), (count, 1))
    texts = sampling.sample(trainer.model, params, prompts, flags.length, key, temperature, flags.top_k, window)
    most, trained = min(window or longest, longest), trainer.config.data.length
    if trainer.model.body is not None and longest > min(most, trained):
        scored = f"Each token is scored with up to {most} tokens before it; the model was trained on {trained}"
        print(f"\n{scored}{' at a time, with the state of those before' if trainer.stateful else ''}.")
    how = f"temperature {temperature:g}, seed {flags.seed}" if temperature else "the likeliest token every time"
    among = f", among the {flags.top_k} likeliest tokens" if flags.top_k and temperature else ""
    for number, ids in enumerate(np.asarray(texts)):
        print(f"\nSample {number + 1} of {count} ({how}{among}):")
        print(textwrap.indent(printable(stream.decode(ids.tolist()), keep="\n"), "  "))


def _told(found: "Evaluated") -> str:
    """The evaluation as text."""
    from tied_lm.intervals import with_interval
    from tied_lm.study.table import table

    rows = [["loss, nats a token", with_interval(found.eval_loss)]]
    if found.excess is not None:
        rows.append(["above the best possible loss", with_interval(found.excess)])
    if found.law_loss is not None:
        rows.append(["loss of the true law on these tokens", f"{found.law_loss:.4f}"])
    if found.perplexity is not None:
        rows.append(["perplexity, exp(loss)", with_interval(found.perplexity, digits=2)])
    if found.bits_per_byte is not None:
        rows.append(["bits per byte", with_interval(found.bits_per_byte)])
    rows += [[f"loss in band {name}", with_interval(loss)] for name, loss in found.bands.items()]
    state = (
        f"The body starts each sequence with the state after the {found.warm_up} tokens before it.\n"
        if found.warm_up
        else ""
    )
    return (
        f"Held out, {found.tokens:,} tokens in {found.sequences:,} sequences. In brackets the 95% t interval\n"
        f"over {found.clusters}, since tokens near each other are alike. It says nothing of other seeds.\n"
        f"{table(rows)}\n"
        f"{state}Band 0 holds the most frequent tokens."
    )
