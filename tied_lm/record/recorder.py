"""The recorder: all that is written of a run, in every place where it is kept."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from tied_lm.checks import ConfigError, choose
from tied_lm.record.history import RowLog
from tied_lm.record.manifest import Manifest
from tied_lm.record.scalars import METRICS, Metrics, lines_before
from tied_lm.record.tensorboard import Board
from tied_lm.record.writer import Writer

WRITERS: dict[str, type[Writer]] = {"tensorboard": Board}  # beside metrics.jsonl, without which nothing is read back

Histograms = Mapping[str, Int[np.ndarray, "bins"]]  # by tag
Arrays = Mapping[str, Mapping[str, Float[np.ndarray, "V"]]]  # by log and field


def writers_of(names: Sequence[str]) -> list[type[Writer]]:
    """The writers of some names.

    Raises:
        ConfigError: there is none of a name, or a name stands there twice.
    """
    if len(set(names)) < len(names):
        raise ConfigError("log.writers", tuple(names), "each writer once")
    return [choose(WRITERS, "log.writers", name) for name in names]


@dataclasses.dataclass(frozen=True)
class Log:
    """The arrays of one log: over steps and, within each, over rows or sequences."""

    fields: Mapping[str, dict[str, Any]]  # attributes of each
    constants: Mapping[str, Any]  # values that do not change with the steps
    strings: Sequence[str] = ()  # one for each row
    dimension: str = "token"


class Recorder:
    """Writes scalars, histograms and texts by its writers, and arrays into zarr; a manifest vouches for all of it.

    Opening it cuts off everything from `first_step` on, since that will be written again.

    Args:
        logs: by name.
        writers: names of `WRITERS`.
        label: see `Writer`.
    """

    failed = False

    def __init__(self, folder: Path, first_step: int, logs: Mapping[str, Log], writers: Sequence[str], label: str = ""):
        self.folder, self.manifest = folder, Manifest(folder, first_step)
        self.arrays = {name: self._open(name, log, first_step) for name, log in logs.items()}
        blocks = {path: data for log in self.arrays.values() for path, data in log.held().items()}
        metrics = b"".join(written for written, _ in lines_before(folder, first_step))
        self.manifest.replace(blocks | {folder / METRICS: metrics}, self._entries())
        for array in self.arrays.values():
            array.cut()
        # After the arrays, which may turn out to be damaged, since these keep files open. The metrics stand last: what
        # they hold, the rest holds too.
        self.metrics = Metrics(folder, first_step)
        self.writers: list[Writer] = [*(kind(folder, first_step, label) for kind in writers_of(writers)), self.metrics]

    def _open(self, name: str, log: Log, first_step: int) -> RowLog:
        length, block = self.manifest.kept(name)
        folder = self.folder / name
        return RowLog(folder, log.fields, log.constants, first_step, log.strings, log.dimension, length, block)

    def _entries(self) -> dict[str, dict[str, Any]]:
        return {name: log.entry() for name, log in self.arrays.items()}

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Histograms,
        arrays: Arrays,
        aside: Mapping[str, float] | None = None,
        matrices: Mapping[str, Float[Array, "V D"]] | None = None,
    ) -> None:
        """Write down all there is of one step; each step is written once, in order.

        Args:
            aside: scalars that metrics.jsonl alone keeps.
        """
        with self._all():
            for name, values in arrays.items():
                self.arrays[name].append(step, values)
            for writer in self.writers:
                if matrices:
                    writer.matrices(step, matrices)
                for tag, counts in histograms.items():
                    writer.histogram(step, tag, counts)
                shown = {**scalars, **(aside or {})} if writer is self.metrics else scalars
                if shown:
                    writer.scalars(step, shown)
        if any(not self.arrays[name].pending for name in arrays):  # a block is a chunk now, and its file may go
            self.flush()

    def name_tokens(self, strings: Mapping[str, str]) -> None:
        """See `Writer.name_tokens`."""
        for writer in self.writers:
            writer.name_tokens(strings)

    def describe(self, texts: Mapping[str, str], charts: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Write down what is said once."""
        for writer in self.writers:
            for tag, markdown in texts.items():
                writer.text(tag, markdown)
            if charts:
                writer.charts(charts)

    def flush(self) -> None:
        """Put all that was written on the disk."""
        with self._all():
            for log in self.arrays.values():
                log.hold()
            for writer in self.writers:
                writer.flush()
            files = [path for writer in self.writers for path in writer.files()]
            files += [path for log in self.arrays.values() for path in log.block.files]
            self.manifest.publish(files, self._entries())
            for log in self.arrays.values():
                log.tidy()

    @contextlib.contextmanager
    def _all(self) -> Iterator[None]:
        """After an error nothing more is vouched for: a part may have been written, and would be once more."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def let_go(self) -> None:
        """Close the files, and write no more."""
        with contextlib.ExitStack() as files:  # an error of one leaves none of the others open
            for writer in self.writers:
                files.callback(writer.close)

    def close(self) -> None:
        """Put all that was written on the disk, the arrays as zarr alone."""
        try:
            if not self.failed:
                with self._all():
                    for log in self.arrays.values():
                        log.flush()
                self.flush()
        finally:
            self.let_go()
