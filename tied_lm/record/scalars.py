"""The scalars of a run, by step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tied_lm.files import AGAIN, Damaged, replace
from tied_lm.record import manifest
from tied_lm.record.writer import Writer

METRICS = "metrics.jsonl"


def _number(value: float) -> str:
    """A number as JSON. What is larger than every double is read as infinity, and JSON has no other word for that."""
    if math.isnan(value):
        return "null"
    return json.dumps(value) if math.isfinite(value) else "1e999" if value > 0 else "-1e999"


def _json(line: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{json.dumps(tag)}: {_number(value)}" for tag, value in line.items()) + "}\n"


class Metrics(Writer):
    """Writes metrics.jsonl, one line for each step. Opening it cuts off everything from `first_step` on."""

    def __init__(self, folder: Path, first_step: int, label: str = ""):
        kept = lines_before(folder, first_step)
        self.path, self.tags = folder / METRICS, {int(line["step"]): set(line) for _, line in kept}
        replace(self.path, b"".join(written for written, _ in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.lines: list[str] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line; it is on disk after the next `flush`. NaN stands for what is undefined, in JSON null."""
        self.lines.append(_json({"step": step} | dict(values)))

    def files(self) -> list[Path]:
        return [self.path]

    def flush(self) -> None:
        self.file.writelines(self.lines)
        self.file.flush()
        self.lines = []

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that its manifest vouches for, with NaN for what is undefined.

    Without a manifest all lines are taken, but for a torn last one.

    Raises:
        Damaged: they are not what was written.
    """
    return [line for _, line in _lines(folder)]


def lines_before(folder: Path, first_step: int) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of steps before one, as they are written and as `read_metrics` tells of them.

    Raises:
        Damaged: they are not what was written.
    """
    if not first_step:
        return []
    return [(written, line) for written, line in _lines(folder) if line["step"] < first_step]


def _lines(folder: Path) -> list[tuple[bytes, dict[str, Any]]]:
    path = folder / METRICS
    entry = manifest.read(folder).get(METRICS)
    try:
        if entry is not None:
            data = manifest.vouched(folder, METRICS, entry)
        else:
            data = path.read_bytes() if path.exists() else b""
        found = [(line + b"\n", dict(json.loads(line))) for line in data.split(b"\n")[:-1]]
    except Damaged:
        # A run that is continued cuts its logs, and replaces the manifest first.
        if manifest.read(folder).get(METRICS) == entry:
            raise
        return _lines(folder)
    except (ValueError, TypeError):
        raise Damaged(f"{path} is damaged (a line is no JSON object); {AGAIN}") from None
    return [
        (written, {_named(tag): math.nan if value is None else value for tag, value in line.items()})
        for written, line in found
    ]


def _named(tag: str) -> str:
    """A tag as it is now; older folders have some in another form."""
    plain = tag.removeprefix("probe/hypothetical/")
    return tag if plain == tag else f"hypothetical/probe/{plain}"


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run is complete: the last line of the metrics is written after everything else."""
    lines = read_metrics(folder)
    return bool(lines) and lines[-1]["step"] == steps
