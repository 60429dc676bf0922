"""Everything that a run writes down step by step, in every place where it is kept."""

import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tied_lm import bands as bands_
from tied_lm.board import Board
from tied_lm.folder import METRICS, read_metrics
from tied_lm.gradients import PARTS, RowStats
from tied_lm.records import Record
from tied_lm.rowlog import RowLog

ROWS = "rows.zarr"
PROBE = "probe.zarr"
UNITS = {"cosine": "1", "input_count": "tokens", "target_count": "tokens"}


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
        self.tied = len(vocabulary) == 1
        self.bands = bands
        self.suffixes = {name: "" if self.tied else f"_{name}" for name in vocabulary}
        self.tracked = _tracked(frequencies, config["log"]["tokens"])

        kept = [line for line in read_metrics(folder) if line["step"] < first_step]
        new = folder / (METRICS + ".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(new, folder / METRICS)
        self.metrics = (folder / METRICS).open("a")
        self.lines: list[str] = []

        stats = {name: self._attributes(name) for name in RowStats._fields}
        parameters = [field + suffix for suffix in self.suffixes.values() for field in ("update", "weight")]
        constants = {"frequency": frequencies, "band": bands}
        self.rows = RowLog(
            folder / ROWS, stats | {name: {"units": "parameter"} for name in parameters}, constants, first_step
        )
        self.probe = RowLog(folder / PROBE, stats, constants, first_step)

        self.board = Board(folder, first_step)
        if first_step == 0:
            self._describe(config, token_strings)

    def _attributes(self, name: str) -> dict[str, Any]:
        attributes: dict[str, Any] = {"units": UNITS.get(name, "nats / parameter")}
        if not self.tied and name in ("total", "cosine"):
            attributes["hypothetical"] = "lookup and scoring are gradients of two matrices of arbitrary scales"
        return attributes

    def _describe(self, config: Mapping[str, Any], token_strings: list[str]) -> None:
        self.board.text("config", "```json\n" + json.dumps(config, indent=2) + "\n```")
        shown = {token: html.escape(token_strings[token]).replace("|", "&#124;") for token in self.tracked.values()}
        rows = [f"| {name} | {token} | {shown[token]} |" for name, token in self.tracked.items()]
        self.board.text("tokens", "| curve | id | token |\n|---|---|---|\n" + "\n".join(rows))
        present = [bands_.NAMES[band] for band in np.unique(self.bands)]
        layout: dict[str, dict[str, list[object]]] = {}
        for prefix, category in (("", "batch, by band"), ("probe/", "probe, by band")):
            keys = [*PARTS[:-1], *(("total", "share", "cosine") if self.tied else ())]
            layout[category] = {key: ["Multiline", [f"{prefix}band/{band}/{key}" for band in present]] for key in keys}
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
            stats = record.stats
            scalars |= bands_.split_scalars(stats, self.bands, self.tied)
            for part, counts in zip(PARTS, record.histograms, strict=True):
                hypothetical = "hypothetical/" if part == "total" and not self.tied else ""
                norms_V = np.asarray(getattr(stats, part))
                scalars[f"{hypothetical}rows_zero/{part}"] = float(np.mean(norms_V == 0))
                self.board.row_histogram(step, f"{hypothetical}rows/{part}", np.asarray(counts))
                for name, token in self.tracked.items():
                    scalars[f"{hypothetical}token/{name}/{part}"] = float(norms_V[token])
            rows = stats._asdict()
            for name, suffix in self.suffixes.items():
                rows |= {"update" + suffix: record.updates[name], "weight" + suffix: record.weights[name]}
            self.rows.append(step, rows)
        if probe is not None:
            scalars |= {
                f"probe/{tag}": value for tag, value in bands_.split_scalars(probe, self.bands, self.tied).items()
            }
            self.probe.append(step, probe._asdict())
        if scalars:
            self.board.scalars(step, scalars)
            self.lines.append(json.dumps({"step": step} | scalars) + "\n")

    def flush(self) -> None:
        """Put all that was written on the disk. The metrics come last: what they hold, the rest holds too."""
        self.rows.flush()
        self.probe.flush()
        self.board.flush()
        self.metrics.writelines(self.lines)
        self.metrics.flush()
        self.lines = []

    def close(self) -> None:
        self.flush()
        self.board.close()
        self.metrics.close()


def _tracked(frequencies: Float[np.ndarray, "V"], named: list[int]) -> dict[str, int]:
    """Ids to follow by curve name: a frequent, a middle and a rare one, and those that the user names."""
    order = np.argsort(-frequencies, kind="stable")
    seen = order[: np.count_nonzero(frequencies)]
    chosen = {"frequent": seen[0], "middle": seen[len(seen) // 2], "rare": seen[-1]}
    return {f"{name}_{token}": int(token) for name, token in chosen.items()} | {f"named_{t}": t for t in named}
