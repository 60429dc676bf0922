"""The scalars of a run, by step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tied_lm.folder import METRICS, read_metrics


class Metrics:
    """Writes metrics.jsonl, one line for each step. Opening it cuts off everything from `first_step` on."""

    def __init__(self, folder: Path, first_step: int):
        kept = [line for line in read_metrics(folder) if line["step"] < first_step]
        new = folder / (METRICS + ".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(new, folder / METRICS)
        self.file = (folder / METRICS).open("a")
        self.lines: list[str] = []

    def append(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a line; it is on disk after the next `flush`."""
        self.lines.append(json.dumps({"step": step} | dict(scalars)) + "\n")

    def flush(self) -> None:
        self.file.writelines(self.lines)
        self.file.flush()
        self.lines = []

    def close(self) -> None:
        self.flush()
        self.file.close()
