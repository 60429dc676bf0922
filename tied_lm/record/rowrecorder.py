"""The recorder of this project, for anybody's training loop."""

import dataclasses
import json
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from tied_lm.bands import bands_of
from tied_lm.checks import check_integer, choose
from tied_lm.config.folder import CONFIG
from tied_lm.record.histogram import log_histogram
from tied_lm.record.keeper import Keeper
from tied_lm.record.recorder import Log, Recorder
from tied_lm.record.rowtags import TOKENS, Rows, attributes_of, row_scalars, tagged, token_norms
from tied_lm.record.runrecorder import ROWS
from tied_lm.record.scalars import METRICS, read_metrics
from tied_lm.rows import FIELDS, Stats, shown_by_row
from tied_lm.tokenstring import visible

LABEL = ".rows"  # in the name of the event file, so that those of other writers are left alone
NONFINITE = "rows_nonfinite"  # the tag of how many rows are not finite

LARGEST = float(np.finfo(np.float32).max)  # rows are kept in float32, and scalars by TensorBoard

_log_histogram = jax.jit(log_histogram)


class RowRecorder:
    """Writes row statistics to metrics.jsonl, TensorBoard and rows.zarr, as a run of this project does.

    Read them with `open_run(workdir)`. A record is on the disk within ten seconds, and when the process ends, whether
    the recorder is closed or not. A step is never written twice: a folder that is opened again is continued after the
    last step in it, or, with `first_step`, from there on, and what stands past that is cut off.

    Args:
        workdir: a folder; other files in it are left alone. `~` is the home; it is made absolute at once.
        vocab_size: V, the rows of the table.
        token_strings: a text for each row, shown in `rows.zarr` and beside the curves of single tokens.
        counts: how often each token occurs in the training data, or any multiple of that. Without it nothing is told by
            band, and of single tokens only `tokens`.
        tied: False if lookup and scoring are of two matrices, which makes their sum and their cosine hypothetical.
        tokens: ids to follow as curves, beside a frequent, a middle and a rare one.
        first_step: the first step that this recorder will write.
        on_nonfinite: what to do with rows and scalars that are not finite in float32: "record" them as they are, with
            one warning, or "raise".

    Raises:
        ValueError: the arguments do not fit the vocabulary, or the folder belongs to something else, or another process
            or another recorder of this process is writing it.
    """

    def __init__(
        self,
        workdir: str | Path,
        vocab_size: int,
        token_strings: Sequence[str] | None = None,
        counts: Int[np.ndarray, "V"] | Float[np.ndarray, "V"] | None = None,
        *,
        tied: bool = True,
        tokens: Sequence[int] = (),
        first_step: int | None = None,
        on_nonfinite: Literal["record", "raise"] = "record",
    ):
        self.folder = Path(os.path.expanduser(workdir)).resolve()
        self.vocab_size, self.tied = check_integer("vocab_size", vocab_size, 1), tied
        self.raises = choose({"record": False, "raise": True}, "on_nonfinite", on_nonfinite)
        self.warned = False
        strings = [] if token_strings is None else list(_sequence("token_strings", token_strings))
        if token_strings is not None and len(strings) != vocab_size:
            raise ValueError(f"token_strings has {len(strings)} entries, not one for each of {vocab_size} rows")
        if not all(isinstance(text, str) for text in strings):
            raise ValueError("token_strings are not all texts")
        named = [check_integer("tokens", token, 0) for token in _sequence("tokens", tokens)]
        if not all(token < vocab_size for token in named):
            raise ValueError(f"tokens = {named} are not all in [0, {vocab_size})")
        self.next_step = 0 if first_step is None else check_integer("first_step", first_step, 0)
        frequencies = None if counts is None else _frequencies(counts, vocab_size)
        bands = None if frequencies is None else bands_of(frequencies)
        self.rows = Rows([visible(text) for text in strings], frequencies, bands, named)
        foreign = METRICS if (self.folder / METRICS).exists() and not (self.folder / ROWS).exists() else CONFIG
        if (self.folder / foreign).exists():
            raise ValueError(f"{self.folder} holds a {foreign} that no RowRecorder wrote; take another folder")
        self.keeper = Keeper(self.folder)
        weakref.finalize(self, self.keeper.abandon).atexit = False
        try:
            if first_step is None:
                self.next_step = max((line["step"] + 1 for line in read_metrics(self.folder)), default=0)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        stands = "closed" if self.keeper.closed else f"next step {self.next_step}"
        return f"RowRecorder({str(self.folder)!r}, {self.vocab_size} rows, {stands})"

    def record(self, step: SupportsIndex, stats: Stats, scalars: Mapping[str, SupportsFloat] | None = None) -> None:
        """Write down one step. It is on the disk within ten seconds, or after `flush`.

        Args:
            step: of the training, an integer of Python, NumPy or JAX; larger than that of the last record.
            stats: row norms, (V,) each, from `row_stats`, `loss_and_gradients`, `embed_loss_and_gradients` or
                `UseSplit.stats`. The first record decides which of the two kinds it is. A cosine that is undefined is
                written as NaN. Rows that are not finite are counted in the scalar `rows_nonfinite`.
            scalars: other values by tag, such as a loss: numbers, or arrays of one.

        Raises:
            ValueError: the step is not a new one; the statistics are of another vocabulary, or of several layers or
                steps; a scalar is no number, or has a tag that the recorder itself writes; something is not finite, and
                `on_nonfinite` is "raise". Nothing of the record is written then.
            OSError: the disk did not take the records before; what was flushed until then stays good.
        """
        if self.keeper.closed:
            raise ValueError(f"the recorder of {self.folder} is closed")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((step, stats))):
            raise ValueError("record is called within jit or scan, where there are no values; record what these return")
        step = check_integer("step", step, 0)
        if step < self.next_step:
            raise ValueError(f"step {step} comes too late: {self.folder} is written up to step {self.next_step - 1}")
        rows = self._rows(stats)
        odd = _nonfinite(rows)
        with np.errstate(invalid="ignore"):  # infinity times 0
            values, fields = row_scalars(rows, self.rows, self.tied), rows._asdict()
        values |= token_norms(rows, self.rows, self.tied)
        values[NONFINITE] = float(np.any(list(odd.values()), axis=0).sum())
        histograms = {part: np.asarray(_log_histogram(fields[part])) for part in shown_by_row(rows._fields)}
        tagged_histograms = tagged(histograms, self.tied)
        taken = {"step", f"{TOKENS}/text_summary", "custom_scalars__config__", *values, *tagged_histograms}
        given = _numbers(scalars or {}, taken)
        opened = self.keeper.recorder
        if opened is not None and set(fields) != set(opened.arrays[ROWS].arrays) - {"step"}:
            raise ValueError(f"these are {', '.join(fields)}; the records before had other fields")
        told = [name for name, odd_V in odd.items() if odd_V.any()]
        told += [f"{tag} = {value!r}" for tag, value in given.items() if not abs(value) <= LARGEST]
        if told:
            self._tell(f"at step {step}, {', '.join(told)} is not finite in float32", int(values[NONFINITE]))
        if opened is None:
            self.keeper.recorder = self._open(rows._fields)
        self.next_step = step + 1  # before anything is written, so that an interrupt leads to no step twice
        self.keeper.write(step, values | given, tagged_histograms, {ROWS: fields})

    def _tell(self, what: str, rows: int) -> None:
        """Warn once, or raise."""
        if self.raises:
            raise ValueError(what)
        if not self.warned:
            words = f"({rows} of {self.vocab_size} rows); it is recorded as it is, and later without a word"
            warnings.warn(f"{what} {words}", stacklevel=3)
        self.warned = True

    def _rows(self, stats: Stats) -> Stats:
        """The statistics as they are kept, with undefined values marked; a copy, which nobody changes any more."""
        if not isinstance(stats, Stats):
            hint = "; with rows=True there are some" if stats is None else ""
            raise ValueError(f"stats are a {type(stats).__name__}, not RowStats or UseStats{hint}")
        values: list[Any] = [np.array(field) for field in jax.device_get(tuple(stats))]
        for name, field_V in zip(stats._fields, values, strict=True):
            if field_V.shape != (self.vocab_size,):
                stacked = field_V.ndim > 1 and field_V.shape[-1] == self.vocab_size
                hint = ": of several layers or steps record one at a time, jax.tree.map(lambda x: x[k], stats)"
                raise ValueError(f"{name} has shape {field_V.shape}, not ({self.vocab_size},){hint if stacked else ''}")
            if not _is_real(field_V):
                raise ValueError(f"{name} is of {field_V.dtype}, not of numbers")
        with np.errstate(over="ignore"):
            return type(stats)(*(field_V.astype(np.float32) for field_V in values)).marked()

    def _open(self, fields: Sequence[str]) -> Recorder:
        self._check(fields)
        if not self.rows.strings:
            self.rows = dataclasses.replace(self.rows, strings=[str(row) for row in range(self.vocab_size)])
        attributes = {name: attributes_of(name, None if self.tied else 0) for name in fields}
        log = Log(attributes, self.rows.constants, self.rows.strings)
        recorder = Recorder(self.folder, self.next_step, {ROWS: log}, ["tensorboard"], LABEL)
        recorder.name_tokens(self.rows.followed_strings)
        if self.next_step == 0 or not read_metrics(self.folder):
            charts = {"batch, by band": self.rows.charts(fields, "", self.tied)} if self.rows.present else {}
            recorder.describe({TOKENS: self.rows.token_table()}, charts)
        return recorder

    def _check(self, fields: Sequence[str]) -> None:
        """Refuse to continue rows of another kind."""
        path = self.folder / ROWS / "zarr.json"
        if not path.exists():
            return
        arrays = json.loads(path.read_text(encoding="utf-8"))["consolidated_metadata"]["metadata"]
        old = {name for name, array in arrays.items() if len(array["shape"]) == 2}
        size = arrays["token"]["shape"][0]
        if old != set(fields) or size != self.vocab_size:
            told = f"{', '.join(sorted(old))} of {size} rows, not {', '.join(sorted(fields))} of {self.vocab_size}"
            raise ValueError(f"{self.folder / ROWS} holds {told}; take another folder")
        with xr.open_zarr(self.folder / ROWS) as rows:
            old_counts = rows.frequency.values if "frequency" in rows else np.zeros(0)
        if not np.array_equal(old_counts, np.zeros(0) if self.rows.frequencies is None else self.rows.frequencies):
            raise ValueError(f"{self.folder / ROWS} holds bands of other counts; take another folder")

    def flush(self) -> None:
        """Put all that was recorded on the disk. The metrics come last: what they hold, the rest holds too."""
        if not self.keeper.closed:
            self.keeper.flush()

    def close(self) -> None:
        """Flush, and give the folder free. Nothing can be recorded after that."""
        self.keeper.close()

    def __enter__(self) -> "RowRecorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sequence(name: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence | np.ndarray):
        raise ValueError(f"{name} = {values!r} is no list")
    return values  # type: ignore[return-value]


def _frequencies(counts: Any, vocab_size: int) -> Float[np.ndarray, "V"]:
    try:
        counts_V = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        counts_V = np.zeros(0)
    if counts_V.shape != (vocab_size,) or not np.isfinite(counts_V).all() or counts_V.min() < 0 or not counts_V.any():
        raise ValueError(f"counts are not {vocab_size} numbers of at least 0, one of them larger")
    return counts_V / counts_V.sum()


def _nonfinite(rows: Stats) -> dict[str, Bool[np.ndarray, "V"]]:
    """The rows in which a field is defined and not finite, by field."""
    defined = {name: FIELDS[name].kind.defined for name in rows._fields}
    return {
        name: ~np.isfinite(field_V) & (True if (of := defined[name]) is None else np.asarray(of(rows)))
        for name, field_V in rows._asdict().items()
    }


def _numbers(scalars: Mapping[str, Any], taken: set[str]) -> dict[str, float]:
    """Scalars as numbers.

    Args:
        taken: tags that are written already.
    """
    if not isinstance(scalars, Mapping):
        raise ValueError(f"scalars are a {type(scalars).__name__}, not a dict of numbers by tag")
    for tag in scalars:
        if not isinstance(tag, str) or not tag or not tag.isprintable():
            raise ValueError(f"{tag!r} is no tag: a text of printable characters")
        if tag in taken:
            raise ValueError(f"the tag {tag!r} is one that the recorder itself writes")
    found = {}
    for tag, value in jax.device_get(dict(scalars)).items():
        if isinstance(value, Sequence) or np.size(value) != 1 or not _is_real(np.asarray(value)):
            raise ValueError(f"{tag} = {value!r} is not one number")
        found[tag] = float(np.asarray(value).reshape(()))
    return found


def _is_real(array: np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
