"""The recorder of this project, for anybody's training loop."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import jax
import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from tied_lm import bands as bands_
from tied_lm.board import Board
from tied_lm.folder import CONFIG, METRICS, locked, read_metrics
from tied_lm.gradients import RowStats
from tied_lm.histogram import log_histogram
from tied_lm.journal import ROWS
from tied_lm.metrics import Metrics
from tied_lm.rowboard import RowBoard, attributes_of, norms_in, tracked_tokens
from tied_lm.rowlog import RowLog
from tied_lm.tokenstring import visible
from tied_lm.uses import UseStats

FLUSH_SECONDS = 10.0
LABEL = ".rows"  # in the name of the event file, so that those of other writers are left alone

_log_histogram = jax.jit(log_histogram)


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
            is writing it.
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
        self.folder, self.vocab_size, self.tied = Path(workdir), vocab_size, tied
        shown = [str(k) for k in range(vocab_size)] if token_strings is None else token_strings
        self.token_strings = [visible(text) for text in shown]
        if len(self.token_strings) != vocab_size:
            raise ValueError(
                f"token_strings has {len(self.token_strings)} entries, not one for each of {vocab_size} rows"
            )
        if not all(0 <= token < vocab_size for token in tokens):
            raise ValueError(f"tokens = {list(tokens)} are not all in [0, {vocab_size})")
        self.frequencies = None if counts is None else _frequencies(np.asarray(counts, np.float64), vocab_size)
        self.tokens = [int(token) for token in tokens]
        foreign = METRICS if (self.folder / METRICS).exists() and not (self.folder / ROWS).exists() else CONFIG
        if (self.folder / foreign).exists():
            raise ValueError(f"{self.folder} holds a {foreign} that no RowRecorder wrote; take another folder")
        self.lock = ExitStack()
        self.lock.enter_context(locked(self.folder))
        lines = read_metrics(self.folder)
        self.next_step = first_step if first_step is not None else lines[-1]["step"] + 1 if lines else 0
        self.writers: tuple[RowLog, Board, RowBoard, Metrics] | None = None
        self.flushed, self.closed = time.monotonic(), False

    def record(self, step: int, stats: RowStats | UseStats, scalars: Mapping[str, float] | None = None) -> None:
        """Write down one step. It is on the disk some seconds later, or after `flush`.

        Args:
            step: of the training; larger than that of the last record.
            stats: row norms, (V,) each, from `row_stats`, `embed_loss_and_gradients` or `UseSplit.stats`. The first
                record decides which of the two kinds it is.
            scalars: other values by tag, such as a loss.

        Raises:
            ValueError: the step is not a new one, or the statistics are not finite, or of another vocabulary.
        """
        if self.closed:
            raise ValueError(f"the recorder of {self.folder} is closed")
        if step < self.next_step:
            raise ValueError(f"step {step} comes too late: {self.folder} is written up to step {self.next_step - 1}")
        rows = jax.tree.map(np.asarray, jax.device_get(stats))
        for name, field_V in rows._asdict().items():
            if field_V.shape != (self.vocab_size,):
                raise ValueError(f"{name} has shape {field_V.shape}, not ({self.vocab_size},)")
            if not np.isfinite(field_V).all():
                raise ValueError(f"{name} is not finite at step {step}")
        values = {tag: float(value) for tag, value in (scalars or {}).items()}
        if self.writers is None:
            self.writers = self._open(rows._fields)
        elif set(rows._fields) != set(self.writers[0].arrays) - {"step"}:
            raise ValueError(f"these are {', '.join(rows._fields)}; the records before had other fields")
        log, board, row_board, metrics = self.writers
        log.append(step, rows._asdict())
        histograms = {part: np.asarray(_log_histogram(getattr(rows, part))) for part in norms_in(rows._fields)}
        values |= row_board.show_rows(step, rows, histograms)
        board.scalars(step, values)
        metrics.append(step, values)
        self.next_step = step + 1
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def _open(self, fields: Sequence[str]) -> tuple[RowLog, Board, RowBoard, Metrics]:
        self._check(fields)
        first, frequencies = self.next_step, self.frequencies
        constants, bands = {"token": np.arange(self.vocab_size)}, None
        if frequencies is not None:
            bands = bands_.bands_of(frequencies)
            constants |= {"frequency": frequencies, "band": bands}
        attributes = {name: attributes_of(name, None if self.tied else 0) for name in fields}
        log = RowLog(self.folder / ROWS, attributes, constants, first, self.token_strings)
        board = Board(self.folder, first, LABEL)
        row_board = RowBoard(board, self.tied, bands, tracked_tokens(frequencies, self.tokens))
        if first == 0 or not read_metrics(self.folder):
            row_board.show_tokens(self.token_strings)
            if bands is not None:
                board.charts(row_board.charts(fields, "batch, by band"))
        return log, board, row_board, Metrics(self.folder, first)

    def _check(self, fields: Sequence[str]) -> None:
        """Refuse to continue rows of another kind."""
        path = self.folder / ROWS / "zarr.json"
        if not path.exists():
            return
        arrays = json.loads(path.read_text())["consolidated_metadata"]["metadata"]
        old = {name for name, array in arrays.items() if len(array["shape"]) == 2}
        size = arrays["token"]["shape"][0]
        if old != set(fields) or size != self.vocab_size:
            told = f"{', '.join(sorted(old))} of {size} rows, not {', '.join(sorted(fields))} of {self.vocab_size}"
            raise ValueError(f"{self.folder / ROWS} holds {told}; take another folder")
        with xr.open_zarr(self.folder / ROWS) as rows:
            old_counts = rows.frequency.values if "frequency" in rows else np.zeros(0)
        if not np.array_equal(old_counts, np.zeros(0) if self.frequencies is None else self.frequencies):
            raise ValueError(f"{self.folder / ROWS} holds bands of other counts; take another folder")

    def flush(self) -> None:
        """Put all that was recorded on the disk. The metrics come last: what they hold, the rest holds too."""
        if self.writers is not None:
            log, board, _, metrics = self.writers
            log.flush()
            board.flush()
            metrics.flush()
        self.flushed = time.monotonic()

    def close(self) -> None:
        """Flush, and give the folder free. Nothing can be recorded after that."""
        try:
            self.flush()
            if self.writers is not None:
                _, board, _, metrics = self.writers
                board.close()
                metrics.close()
        finally:
            self.writers, self.closed = None, True
            self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _frequencies(counts_V: Float[np.ndarray, "V"], vocab_size: int) -> Float[np.ndarray, "V"]:
    if counts_V.shape != (vocab_size,) or not np.isfinite(counts_V).all() or counts_V.min() < 0 or not counts_V.any():
        raise ValueError(f"counts are not {vocab_size} numbers of at least 0, one of them larger")
    return counts_V / counts_V.sum()
