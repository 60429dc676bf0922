"""Reading runs back, finished or still running."""

import json
from pathlib import Path
from typing import Any

import xarray as xr

from tied_lm.config import Config, build_run
from tied_lm.folder import CONFIG, METRICS, read_metrics
from tied_lm.journal import PROBE, ROWS
from tied_lm.rowlog import STRINGS

CONTENT = ("text_train", "text_heldout", "text_tokenizer")
BESIDE = ("version", *CONTENT)  # in config.json, beside the fields of the config


class Run:
    """What one run has written down so far."""

    def __init__(self, folder: Path):
        if not (folder / CONFIG).exists() and not (folder / METRICS).exists():
            raise FileNotFoundError(f"{folder} is no run: it has neither {CONFIG} nor {METRICS}")
        self.folder = folder

    @property
    def config(self) -> Config:
        """The resolved config.

        Raises:
            FileNotFoundError: there is none, since the run was written by a `RowRecorder`.
        """
        path = self.folder / CONFIG
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no {CONFIG}: its model and training are not this project's")
        values = json.loads(path.read_text())
        return build_run({name: value for name, value in values.items() if name not in BESIDE})

    @property
    def content(self) -> dict[str, Any]:
        """What the config does not say of the text: its sizes and hashes."""
        values = json.loads((self.folder / CONFIG).read_text())
        return {name: values[name] for name in CONTENT if name in values}

    def last(self) -> dict[str, float]:
        """Values by tag at the newest step."""
        return read_metrics(self.folder)[-1]

    def tags(self) -> set[str]:
        """Names of all scalars so far."""
        return {name for line in read_metrics(self.folder) for name in line} - {"step"}

    def scalars(self, tag: str) -> dict[int, float]:
        """Values by step.

        Raises:
            KeyError: there is no such tag; the message lists those there are.
        """
        values = {line["step"]: line[tag] for line in read_metrics(self.folder) if tag in line}
        if not values:
            raise KeyError(f"{tag!r} is not among the tags {', '.join(sorted(self.tags()))}")
        return values

    @property
    def rows(self) -> xr.Dataset:
        """Row statistics of single batches, over `step` and `token`; `token_string` shows each token."""
        return _open_rows(self.folder / ROWS)

    @property
    def probe(self) -> xr.Dataset:
        """Row statistics over the probe, over `step` and `token`; `token_string` shows each token."""
        return _open_rows(self.folder / PROBE)


def _open_rows(path: Path) -> xr.Dataset:
    rows = xr.open_zarr(path)
    strings = rows["token"].attrs.pop(STRINGS, None)  # those of older runs have none
    return rows if strings is None else rows.assign_coords(token_string=("token", strings))


def open_run(path: str | Path) -> Run:
    """Open the folder of one run.

    Args:
        path: DIR/<arm>/seed<k> of a comparison, the folder of a single run, or that of a `RowRecorder`.

    Raises:
        FileNotFoundError: there is no run.
    """
    return Run(Path(path))
