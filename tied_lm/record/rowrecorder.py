"""The recorder of this project, for anybody's training loop."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsFloat
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from tied_lm.bands import bands_of
from tied_lm.checks import check_integer
from tied_lm.folder import CONFIG, locked
from tied_lm.record.histogram import log_histogram
from tied_lm.record.recorder import Log, Recorder
from tied_lm.record.rowtags import TOKENS, Rows, attributes_of, row_scalars, tagged
from tied_lm.record.runrecorder import ROWS
from tied_lm.record.scalars import METRICS, read_metrics
from tied_lm.rows import FIELDS, RowStats, UseStats, shown_by_row
from tied_lm.tokenstring import visible

FLUSH_SECONDS = 10.0
LABEL = ".rows"  # in the name of the event file, so that those of other writers are left alone

LARGEST = float(np.finfo(np.float32).max)  # rows are kept in float32, and scalars by TensorBoard

_log_histogram = jax.jit(log_histogram)
_open_here: WeakValueDictionary[Path, "RowRecorder"] = WeakValueDictionary()  # those of this process, by folder


class RowRecorder:
    """Writes row statistics to metrics.jsonl, TensorBoard and rows.zarr, as a run of this project does.

    Read them with `open_run(workdir)`. A step is never written twice: a folder that is opened again is continued after
    the last step in it, or, with `first_step`, from there on, and what stands past that is cut off.

    Args:
        workdir: a folder; other files in it are left alone.
        vocab_size: V, the rows of the table.
        token_strings: a text for each row, shown in `rows.zarr` and beside the curves of single tokens.
        counts: how often each token occurs in the training data, or any multiple of that. Without it nothing is told by
            band, and of single tokens only `tokens`.
        tied: False if lookup and scoring are of two matrices, which makes their sum and their cosine hypothetical.
        tokens: ids to follow as curves, beside a frequent, a middle and a rare one.
        first_step: the first step that this recorder will write.

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
    ):
        self.folder, self.vocab_size, self.tied = Path(workdir), check_integer("vocab_size", vocab_size, 1), tied
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
        if self.folder.resolve() in _open_here:
            raise ValueError(f"{self.folder} is open in another RowRecorder of this process: close() that one first")
        with ExitStack() as lock:
            lock.enter_context(locked(self.folder))
            if first_step is None:
                self.next_step = max((line["step"] + 1 for line in read_metrics(self.folder)), default=0)
            self.lock = lock.pop_all()
        self.recorder: Recorder | None = None  # from the first record on, which decides what there is of each row
        self.flushed, self.closed = time.monotonic(), False
        _open_here[self.folder.resolve()] = self

    def __repr__(self) -> str:
        stands = "closed" if self.closed else f"next step {self.next_step}"
        return f"RowRecorder({str(self.folder)!r}, {self.vocab_size} rows, {stands})"

    def record(self, step: int, stats: RowStats | UseStats, scalars: Mapping[str, SupportsFloat] | None = None) -> None:
        """Write down one step. It is on the disk some seconds later, or after `flush`.

        Args:
            step: of the training, an integer; larger than that of the last record.
            stats: row norms, (V,) each, from `row_stats`, `embed_loss_and_gradients` or `UseSplit.stats`. The first
                record decides which of the two kinds it is. A cosine that is undefined is written as NaN.
            scalars: other values by tag, such as a loss: finite numbers.

        Raises:
            ValueError: the step is not a new one, the statistics are not finite, or of another vocabulary, or a scalar
                is no number, or has a tag that the recorder itself writes. Nothing of the record is written then.
        """
        if self.closed:
            raise ValueError(f"the recorder of {self.folder} is closed")
        step = check_integer("step", step, 0)
        if step < self.next_step:
            raise ValueError(f"step {step} comes too late: {self.folder} is written up to step {self.next_step - 1}")
        rows = self._rows(step, stats)
        values, fields = row_scalars(rows, self.rows, self.tied), rows._asdict()
        histograms = {part: np.asarray(_log_histogram(fields[part])) for part in shown_by_row(rows._fields)}
        tagged_histograms = tagged(histograms, self.tied)
        taken = {"step", f"{TOKENS}/text_summary", "custom_scalars__config__", *values, *tagged_histograms}
        values |= _numbers(scalars or {}, taken)
        if self.recorder is None:
            self.recorder = self._open(rows._fields)
        elif set(fields) != set(self.recorder.arrays[ROWS].arrays) - {"step"}:
            raise ValueError(f"these are {', '.join(fields)}; the records before had other fields")
        self.next_step = step + 1  # before anything is written, so that an interrupt leads to no step twice
        self.recorder.write(step, values, tagged_histograms, {ROWS: fields})
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def _rows(self, step: int, stats: RowStats | UseStats) -> RowStats | UseStats:
        """The statistics on the host, with undefined values marked."""
        if not isinstance(stats, RowStats | UseStats):
            raise ValueError(f"stats are a {type(stats).__name__}, not RowStats or UseStats")
        values: list[Any] = [np.asarray(field) for field in jax.device_get(tuple(stats))]
        rows = type(stats)(*values)
        for name, field_V in rows._asdict().items():
            if field_V.shape != (self.vocab_size,):
                raise ValueError(f"{name} has shape {field_V.shape}, not ({self.vocab_size},)")
            if not _is_real(field_V):
                raise ValueError(f"{name} is of {field_V.dtype}, not of numbers")
        rows = rows.marked()
        for name, field_V in rows._asdict().items():
            defined = FIELDS[name].kind.defined
            if not ((np.abs(field_V) <= LARGEST) | (False if defined is None else ~np.asarray(defined(rows)))).all():
                raise ValueError(f"{name} is not finite at step {step}")
        return rows

    def _open(self, fields: Sequence[str]) -> Recorder:
        self._check(fields)
        if not self.rows.strings:
            self.rows = dataclasses.replace(self.rows, strings=[str(row) for row in range(self.vocab_size)])
        attributes = {name: attributes_of(name, None if self.tied else 0) for name in fields}
        log = Log(attributes, self.rows.constants, self.rows.strings)
        recorder = Recorder(self.folder, self.next_step, {ROWS: log}, ["tensorboard"], LABEL)
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
        if self.recorder is not None:
            self.recorder.flush()
        self.flushed = time.monotonic()

    def close(self) -> None:
        """Flush, and give the folder free. Nothing can be recorded after that."""
        try:
            if self.recorder is not None:
                self.recorder.close()
        finally:
            self.recorder, self.closed = None, True
            _open_here.pop(self.folder.resolve(), None)
            self.lock.close()

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


def _numbers(scalars: Mapping[str, Any], taken: set[str]) -> dict[str, float]:
    """Scalars as they can be written in every place.

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
        if np.ndim(value) or not _is_real(np.asarray(value)):
            raise ValueError(f"{tag} = {value!r} is not one number")
        found[tag] = float(value)
        if not abs(found[tag]) <= LARGEST:
            raise ValueError(f"{tag} = {value!r} is not finite in float32")
    return found


def _is_real(array: np.ndarray) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
