"""Everything that a run writes down step by step, in every place where it is kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tied_lm import bands as bands_
from tied_lm.files import AGAIN, Damaged
from tied_lm.record.history import RowLog
from tied_lm.record.manifest import Manifest
from tied_lm.record.rowboard import RowBoard, attributes_of, tracked_tokens
from tied_lm.record.scalars import METRICS, Metrics
from tied_lm.record.slots import Evaluation, Probe, Record, Recorded
from tied_lm.record.tensorboard import Board
from tied_lm.rows import PARTS, RowStats

ROWS = "rows.zarr"
PROBE = "probe.zarr"
HELDOUT = "heldout.zarr"
METRIC = "loss/eval"


class Journal:
    """The scalars of a run (metrics.jsonl and TensorBoard), its rows (histograms, curves, rows.zarr, probe.zarr), and
    its loss by held-out sequence (heldout.zarr).

    Opening it cuts off everything from `first_step` on, since that will be written again.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        config: Mapping[str, Any],
        model: Recorded,
        untied_from: int | None,
        bands: Int[np.ndarray, "V"],
        frequencies: Float[np.ndarray, "V"],
        token_strings: list[str],
        clusters: Int[np.ndarray, "S"],
        evaluated: tuple[str, ...] = (),
    ):
        self.folder, self.untied_from = folder, untied_from
        self.suffixes = {name: f"_{name}" if len(model.vocabulary) > 1 else "" for name in model.vocabulary}
        self.manifest = Manifest(folder, first_step)
        fields = (*RowStats._fields, *model.push_parts)
        stats = {name: attributes_of(name, untied_from) for name in fields}
        about = {"update": "of the update from this step to the next; none follows the last", "weight": "at this step"}
        shared = f"; before step {untied_from} of the one matrix, `embedding`" if untied_from else ""
        parameters = {
            field + suffix: {"units": "parameter", "description": text + (shared if name == "output" else "")}
            for name, suffix in self.suffixes.items()
            for field, text in about.items()
        }
        constants = {"frequency": frequencies, "band": bands}
        self.rows = RowLog(
            folder / ROWS,
            stats | parameters,
            constants,
            first_step,
            token_strings,
            length=self.manifest.length(ROWS),
        )
        self.probe = RowLog(
            folder / PROBE, stats, constants, first_step, token_strings, length=self.manifest.length(PROBE)
        )

        self.heldout = RowLog(
            folder / HELDOUT,
            {f"nll_{bands_.NAMES[band]}": {"units": "nats"} for band in np.unique(bands)}
            | {f"tokens_{bands_.NAMES[band]}": {"units": "tokens"} for band in np.unique(bands)}
            | {name: {"units": "bytes" if name == "bytes" else "nats"} for name in evaluated},
            {"cluster": clusters},
            first_step,
            dimension="sequence",
            length=self.manifest.length(HELDOUT),
        )

        # Last, since these keep a file open, and the logs above may turn out to be damaged.
        self.metrics = Metrics(folder, first_step)
        self.board = Board(folder, first_step)
        self.row_board = RowBoard(untied_from != 0, bands, tracked_tokens(frequencies, config["log"]["tokens"]))
        if first_step == 0:
            self._describe(config, token_strings, bands)
        self.flush()

    def check_whole(
        self,
        first_step: int,
        *,
        rows: Sequence[int],
        probes: Sequence[int],
        evaluations: Sequence[int],
        scalars: Sequence[int],
    ) -> None:
        """See that every step that there had to be of each kind before a checkpoint stands in every log.

        Raises:
            Damaged: the steps that are missing are named.
        """
        tags = self.metrics.tags
        for name, wanted, found in (
            (ROWS, rows, self.rows.kept_steps),
            (PROBE, probes, self.probe.kept_steps),
            (HELDOUT, evaluations, self.heldout.kept_steps),
            (METRICS, scalars, [step for step in tags if "time/seconds" in tags[step]]),
            (METRICS, evaluations, [step for step in tags if METRIC in tags[step]]),
        ):
            missing = sorted({step for step in wanted if step < first_step} - set(found))
            if missing:
                self.board.close()
                self.metrics.file.close()
                steps = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
                raise Damaged(f"{self.folder / name} lacks what was written at step {steps}; {AGAIN}")

    def _describe(self, config: Mapping[str, Any], token_strings: list[str], bands: Int[np.ndarray, "V"]) -> None:
        self.board.text("config", "```json\n" + json.dumps(config, indent=2) + "\n```")
        self.row_board.show_tokens(self.board, token_strings)
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
        probe: Probe | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Write down all there is of one step; each step is written once, in order.

        Args:
            scalars: values by tag; NaN where one is undefined.
            record: of this step's batch and update.
            probe: row statistics over the probe.
            evaluation: sums by held-out sequence.
        """
        scalars = dict(scalars)
        self.row_board.tied = self.untied_from is None or step < self.untied_from
        if record is not None:
            self.row_board.show_histograms(self.board, step, dict(zip(PARTS, record.histograms, strict=True)))
            scalars |= self.row_board.row_scalars(record.stats)
            scalars |= self.row_board.part_scalars(record.push_parts)
            for name, norms in record.others.items():
                scalars |= {f"grad_norm/{name}/{use}": float(norms[i]) for i, use in enumerate(("lookup", "scoring"))}
            rows = record.stats.marked()._asdict() | record.push_parts
            for name, suffix in self.suffixes.items():
                rows |= {"update" + suffix: record.updates[name], "weight" + suffix: record.weights[name]}
            self.rows.append(step, rows)
        if probe is not None:
            found = self.row_board.scalars(probe.stats) | self.row_board.part_scalars(probe.push_parts)
            scalars |= {f"probe/{tag}": value for tag, value in found.items()}
            self.probe.append(step, probe.stats.marked()._asdict() | probe.push_parts)
        if evaluation is not None:
            self.heldout.append(step, evaluation.by_sequence())
        if scalars:
            self.board.scalars(step, scalars)
            self.metrics.append(step, scalars)

    def flush(self) -> None:
        """Put all that was written on the disk. The metrics come last: what they hold, the rest holds too."""
        self.rows.flush()
        self.probe.flush()
        self.heldout.flush()
        self.board.flush()
        self.metrics.flush()
        logs = {ROWS: self.rows.entry(), PROBE: self.probe.entry(), HELDOUT: self.heldout.entry()}
        self.manifest.publish([*self.board.files(), self.metrics.path], logs)

    def close(self) -> None:
        self.flush()
        self.board.close()
        self.metrics.close()
