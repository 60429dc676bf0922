"""The scalars of a run, by step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tied_lm.durable import replace
from tied_lm.folder import METRICS, read_metrics


def _json(line: Mapping[str, float]) -> str:
    values = {tag: None if math.isnan(value) else value for tag, value in line.items()}
    return json.dumps(values, allow_nan=False) + "\n"


class Metrics:
    """Writes metrics.jsonl, one line for each step. Opening it cuts off everything from `first_step` on."""

    def __init__(self, folder: Path, first_step: int):
        kept = [line for line in read_metrics(folder) if line["step"] < first_step] if first_step else []
        self.path, self.tags = folder / METRICS, {int(line["step"]): set(line) for line in kept}
        replace(self.path, "".join(map(_json, kept)).encode())
        self.file = self.path.open("a", encoding="utf-8")
        self.lines: list[str] = []

    def append(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a line; it is on disk after the next `flush`. NaN stands for what is undefined, in JSON null."""
        self.lines.append(_json({"step": step} | dict(scalars)))

    def flush(self) -> None:
        self.file.writelines(self.lines)
        self.file.flush()
        self.lines = []

    def close(self) -> None:
        self.flush()
        self.file.close()
