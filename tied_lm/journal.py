"""Everything that a run writes down step by step, in every place where it is kept."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tied_lm import bands as bands_
from tied_lm.board import Board
from tied_lm.gradients import PARTS, RowStats
from tied_lm.metrics import Metrics
from tied_lm.records import Record
from tied_lm.rowboard import RowBoard, attributes_of, tracked_tokens
from tied_lm.rowlog import RowLog

ROWS = "rows.zarr"
PROBE = "probe.zarr"


class Journal:
    """The scalars of a run (metrics.jsonl and TensorBoard), and its rows (histograms, curves, rows.zarr, probe.zarr).

    Opening it cuts off everything from `first_step` on, since that will be written again.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        config: Mapping[str, Any],
        vocabulary: tuple[str, ...],
        bands: Int[np.ndarray, "V"],
        frequencies: Float[np.ndarray, "V"],
        token_strings: list[str],
    ):
        tied = len(vocabulary) == 1
        self.suffixes = {name: "" if tied else f"_{name}" for name in vocabulary}
        self.metrics = Metrics(folder, first_step)

        stats = {name: attributes_of(name, tied) for name in RowStats._fields}
        parameters = [field + suffix for suffix in self.suffixes.values() for field in ("update", "weight")]
        constants = {"frequency": frequencies, "band": bands}
        self.rows = RowLog(
            folder / ROWS, stats | {name: {"units": "parameter"} for name in parameters}, constants, first_step
        )
        self.probe = RowLog(folder / PROBE, stats, constants, first_step)

        self.board = Board(folder, first_step)
        self.row_board = RowBoard(self.board, tied, bands, tracked_tokens(frequencies, config["log"]["tokens"]))
        if first_step == 0:
            self._describe(config, token_strings, bands)

    def _describe(self, config: Mapping[str, Any], token_strings: list[str], bands: Int[np.ndarray, "V"]) -> None:
        self.board.text("config", "```json\n" + json.dumps(config, indent=2) + "\n```")
        self.row_board.show_tokens(token_strings)
        layout = self.row_board.charts(RowStats._fields, "batch, by band")
        layout |= self.row_board.charts(RowStats._fields, "probe, by band", "probe/")
        present = [bands_.NAMES[band] for band in np.unique(bands)]
        layout["held-out loss, by band"] = {"loss": ["Multiline", [f"band/{band}/loss" for band in present]]}
        self.board.charts(layout)

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        record: Record | None = None,
        probe: RowStats | None = None,
    ) -> None:
        """Write down all there is of one step; each step is written once, in order.

        Args:
            scalars: values by tag.
            record: of this step's batch and update.
            probe: row statistics over the probe.
        """
        scalars = dict(scalars)
        if record is not None:
            histograms = dict(zip(PARTS, record.histograms, strict=True))
            scalars |= self.row_board.show_rows(step, record.stats, histograms)
            rows = record.stats._asdict()
            for name, suffix in self.suffixes.items():
                rows |= {"update" + suffix: record.updates[name], "weight" + suffix: record.weights[name]}
            self.rows.append(step, rows)
        if probe is not None:
            scalars |= {f"probe/{tag}": value for tag, value in self.row_board.scalars(probe).items()}
            self.probe.append(step, probe._asdict())
        if scalars:
            self.board.scalars(step, scalars)
            self.metrics.append(step, scalars)

    def flush(self) -> None:
        """Put all that was written on the disk. The metrics come last: what they hold, the rest holds too."""
        self.rows.flush()
        self.probe.flush()
        self.board.flush()
        self.metrics.flush()

    def close(self) -> None:
        self.flush()
        self.board.close()
        self.metrics.close()
