"""The recorder of a run of this project: its records, probes and evaluations."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from tied_lm.bands import split_scalars
from tied_lm.files import AGAIN, Damaged
from tied_lm.record.cards import is_headline
from tied_lm.record.matrices import Matrices
from tied_lm.record.recorder import Histograms, Log, Recorder
from tied_lm.record.rowtags import (
    TOKENS,
    Rows,
    attributes_of,
    of_probe,
    part_scalars,
    row_scalars,
    tagged,
    token_norms,
    token_scalars,
)
from tied_lm.record.scalars import METRICS
from tied_lm.record.slots import Evaluation, Probe, Record, Recorded, drift_field
from tied_lm.rows import DRIFT, PARTS, RowStats, mark_undefined

ROWS = "rows.zarr"
PROBE = "probe.zarr"
HELDOUT = "heldout.zarr"
METRIC = "loss/eval"

ASIDE = re.compile(r"(hypothetical/)?band/.*/(lookup|scoring|pull|push|total)")  # of a batch, beside share and cosine
UPDATE = "of the update from this step to the next; none follows the last"


def _marked(drift: Mapping[str, Float[Array, "V"]]) -> dict[str, Any]:
    """A drift with NaN for what is undefined."""
    return {
        name: mark_undefined(values_V != 0, values_V) if name.startswith("cosine") else values_V
        for name, values_V in drift.items()
    }


class RunRecorder:
    """Keeps the scalars of a run (metrics.jsonl and by the writers), its rows (histograms, curves, rows.zarr,
    probe.zarr), and its loss by held-out sequence (heldout.zarr).

    Opening it cuts off everything from `first_step` on, since that will be written again.

    Args:
        config: nested values, shown as they are; `log.writers` names the writers.
        untied_from: the step from which lookup and scoring have a matrix each; None if there is none.
        clusters: of the held-out sequences.
        evaluated: what an evaluation has beside losses and tokens.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        config: Mapping[str, Any],
        model: Recorded,
        rows: Rows,
        *,
        untied_from: int | None,
        clusters: Int[np.ndarray, "S"],
        evaluated: tuple[str, ...] = (),
    ):
        self.folder, self.rows, self.untied_from = folder, rows, untied_from
        self.suffixes = {name: drift_field("", name, model.vocabulary) for name in model.vocabulary}
        self.has_drift = not first_step or all((folder / PROBE / name).exists() for name in self._drift())
        stats = {name: attributes_of(name, untied_from) for name in (*RowStats._fields, *model.push_parts)}
        losses = {f"nll_{band}": {"units": "nats"} for band in rows.present}
        counts = {f"tokens_{band}": {"units": "tokens"} for band in rows.present}
        others = {name: {"units": "bytes" if name == "bytes" else "nats"} for name in evaluated}
        logs = {
            ROWS: Log(stats | self._parameters(), rows.constants, rows.strings),
            PROBE: Log(stats | (self._drift() if self.has_drift else {}), rows.constants, rows.strings),
            HELDOUT: Log(losses | counts | others, {"cluster": clusters}, dimension="sequence"),
        }
        self.recorder = Recorder(folder, first_step, logs, config["log"]["writers"])
        if config["log"].get("matrices"):
            self.recorder.writers.insert(0, Matrices(folder, first_step))
        self.recorder.name_tokens(rows.followed_strings)
        if first_step == 0:
            texts = {"config": "```json\n" + json.dumps(config, indent=2) + "\n```", TOKENS: rows.token_table()}
            self.recorder.describe(texts, {})
        self.flush()

    def _parameters(self) -> dict[str, dict[str, str]]:
        """Attributes of what is kept of the vocabulary's parameters, by field."""
        found = {}
        for name, suffix in self.suffixes.items():
            shared = name == "output" and self.untied_from
            late = f"; before step {self.untied_from} of the one matrix, `embedding`" if shared else ""
            for field, text in {"update": UPDATE, "weight": "at this step"}.items():
                found[field + suffix] = {"units": "parameter", "description": text + late}
        return found

    def _drift(self) -> dict[str, dict[str, str]]:
        """Attributes of what probe.zarr keeps of the vocabulary's parameters, by field. Folders of older versions have
        none of it, and are continued without."""
        return {
            field + suffix: {"units": kind.units, "description": f"of {name}, to its row at step 0"}
            for name, suffix in self.suffixes.items()
            for field, kind in DRIFT.items()
        }

    def _tied(self, step: int) -> bool:
        return self.untied_from is None or step < self.untied_from

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
        tags, kept = self.recorder.metrics.tags, {name: log.kept_steps for name, log in self.recorder.arrays.items()}
        for name, wanted, found in (
            (ROWS, rows, kept[ROWS]),
            (PROBE, probes, kept[PROBE]),
            (HELDOUT, evaluations, kept[HELDOUT]),
            (METRICS, scalars, [step for step in tags if "time/seconds" in tags[step]]),
            (METRICS, evaluations, [step for step in tags if METRIC in tags[step]]),
        ):
            missing = sorted({step for step in wanted if step < first_step} - set(found))
            if missing:
                self.recorder.let_go()
                steps = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
                raise Damaged(f"{self.folder / name} lacks what was written at step {steps}; {AGAIN}")

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        record: Record | None = None,
        probe: Probe | None = None,
        evaluation: Evaluation | None = None,
        geometry: Mapping[str, float] | None = None,
        drift: Mapping[str, Float[Array, "V"]] | None = None,
        every_row: bool = True,
        matrices: Mapping[str, Float[Array, "V D"]] | None = None,
    ) -> None:
        """Write down all there is of one step; each step is written once, in order.

        Args:
            scalars: values by tag; NaN where one is undefined.
            record: of this step's batch and update.
            probe: row statistics over the probe.
            evaluation: sums by held-out sequence.
            geometry: how the vocabulary's parameters lie and what they predict, by tag.
            drift: of the rows of the vocabulary's parameters, beside every probe; by field, see `slots.Geometry`.
            every_row: whether rows.zarr keeps the record, too.
            matrices: the vocabulary's parameters as they are, to be kept.
        """
        scalars, tied = dict(scalars), self._tied(step)
        histograms: Histograms = {}
        arrays: dict[str, Any] = {}
        aside: dict[str, float] = {}  # curves that the probe shows with less noise, and what heads no card
        if record is not None:
            histograms = tagged(dict(zip(PARTS, record.histograms, strict=True)), tied)
            of_batch = row_scalars(record.stats, self.rows, tied) | part_scalars(record.push_parts, self.rows)
            aside = {tag: value for tag, value in of_batch.items() if ASIDE.fullmatch(tag)}
            scalars |= {tag: value for tag, value in of_batch.items() if tag not in aside}
            aside |= token_norms(record.stats, self.rows, tied)
            for name, norms in record.others.items():
                scalars |= {f"grad_norm/{name}/{use}": float(norms[i]) for i, use in enumerate(("lookup", "scoring"))}
            arrays |= {ROWS: self._rows_of(record)} if every_row else {}
        if probe is not None:
            found = split_scalars(probe.stats, self.rows.bands, tied) | part_scalars(probe.push_parts, self.rows)
            scalars |= of_probe(found | token_scalars(probe.stats, self.rows, tied))
            arrays[PROBE] = probe.stats.marked()._asdict() | probe.push_parts | _marked(drift or {})
        for tag, value in (geometry or {}).items():
            (scalars if is_headline(tag) else aside)[tag] = value
        if evaluation is not None:
            arrays[HELDOUT] = evaluation.by_sequence()
        self.recorder.write(step, scalars, histograms, arrays, aside, matrices)

    def _rows_of(self, record: Record) -> dict[str, Any]:
        """What rows.zarr keeps of a record, by field."""
        rows = record.stats.marked()._asdict() | record.push_parts
        for name, suffix in self.suffixes.items():
            rows |= {"update" + suffix: record.updates[name], "weight" + suffix: record.weights[name]}
        return rows

    def flush(self) -> None:
        """Put all that was written on the disk."""
        self.recorder.flush()

    def close(self) -> None:
        self.recorder.close()
