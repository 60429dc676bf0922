"""Reading runs back, finished or still running."""

import difflib
import html
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tied_lm.config import Config, read_run
from tied_lm.config.folder import CONFIG, RESTORE, SWEEP, read_config
from tied_lm.files import Damaged, read_json
from tied_lm.record import manifest
from tied_lm.record.history import STRINGS, check, readable
from tied_lm.record.matrices import MATRICES, step_of
from tied_lm.record.openblock import kind_of, records_in
from tied_lm.record.runrecorder import HELDOUT, PROBE, ROWS
from tied_lm.record.scalars import METRICS, read_metrics

if TYPE_CHECKING:
    import xarray

HEADLINE = {
    "loss/eval": "held-out loss, nats a token",
    "loss/perplexity": "perplexity",
    "loss/bits_per_byte": "bits a byte",
    "loss/excess": "above the best possible loss",
    "probe/split/share": "lookup's share of the squared gradient (probe)",
    "probe/split/cosine": "cosine of lookup and scoring (probe)",
}
CONTENT = ("text_train", "text_heldout", "text_tokenizer")
BESIDE = ("version", *CONTENT)  # in config.json, beside the fields of the config


class Shelf:
    """Logs of finished runs that were read and found whole, for those who need them several times, up to some bytes."""

    def __init__(self, most: int = 2**28):
        self.left, self.logs = most, dict[Path, "xarray.Dataset"]()

    def takes(self, rows: "xarray.Dataset") -> bool:
        """Whether there is room."""
        return rows.nbytes <= self.left

    def put(self, path: Path, rows: "xarray.Dataset") -> None:
        self.left -= rows.nbytes
        self.logs[path] = rows


class Run:
    """What one run has written down so far.

    All that reads data raises `FileNotFoundError`, and says so, while the run has not written any.
    """

    def __init__(self, folder: Path, shelf: Shelf | None = None):
        _check_is_run(folder)
        self.folder, self.shelf = folder, shelf or Shelf(0)

    def __repr__(self) -> str:
        lines = read_metrics(self.folder)
        stands = f"step {lines[-1]['step']}" if lines else "no data yet"
        return f"Run({str(self.folder)!r}, {stands})"

    @property
    def config(self) -> Config:
        """The resolved config.

        Raises:
            FileNotFoundError: there is none, since the run was written by a `RowRecorder`.
        """
        path = self.folder / CONFIG
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no {CONFIG}: its model and training are not this project's")
        values = read_config(self.folder)
        return read_run({name: value for name, value in values.items() if name not in BESIDE})

    @property
    def content(self) -> dict[str, Any]:
        """What the config does not say of the text: its sizes and hashes."""
        values = read_config(self.folder)
        return {name: values[name] for name in CONTENT if name in values}

    def lines(self) -> list[dict[str, Any]]:
        """All scalars: values by tag for each step, the `step` among them; NaN for what is undefined."""
        lines = read_metrics(self.folder)
        if not lines:
            raise FileNotFoundError(f"{self.folder} has no data yet: the run has not written anything so far")
        return lines

    def has_data(self) -> bool:
        """Whether the run has written any scalars so far."""
        return bool(read_metrics(self.folder))

    def steps(self) -> list[int]:
        """Steps of all scalars so far."""
        return [line["step"] for line in self.lines()]

    def last(self) -> dict[str, float]:
        """Values by tag at the newest step; NaN for what is undefined there, as a share of 0 / 0."""
        return self.lines()[-1]

    def table(self) -> list[list[str]]:
        """What matters most, with its newest value; `-` where it is undefined. The first row is the head."""
        newest = {tag: (line["step"], line[tag]) for line in self.lines() for tag in HEADLINE if tag in line}
        rows = [["", "value", "at step"]]
        for tag, words in HEADLINE.items():
            step, value = newest.get(tag, (0, None))
            if value is not None:
                rows.append([words, "-" if math.isnan(value) else f"{value:.4f}", f"{step:,}"])
        return rows

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = self.table() if self.has_data() else []
        cells = (f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<p>{html.escape(repr(self))}</p><table>{''.join(cells)}</table>"

    def tags(self) -> set[str]:
        """Names of all scalars so far."""
        return {name for line in self.lines() for name in line} - {"step"}

    def scalars(self, tag: str) -> dict[int, float]:
        """Values by step; NaN where it is undefined.

        Raises:
            KeyError: there is no such tag; the message names the nearest, and lists those there are.
        """
        values = {line["step"]: line[tag] for line in self.lines() if tag in line}
        if not values:
            tags = sorted(self.tags())
            near = difflib.get_close_matches(tag, tags, 1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise KeyError(f"{tag!r} is not among the tags{meant} There are {', '.join(tags)}")
        return values

    @property
    def rows(self) -> "xarray.Dataset":
        """Row statistics of single batches, over `step` and `token`; `token_string` shows each token. The cosine of a
        row of 0 is NaN."""
        return self._open_rows(ROWS)

    @property
    def probe(self) -> "xarray.Dataset":
        """Row statistics over the probe, over `step` and `token`; `token_string` shows each token."""
        return self._open_rows(PROBE)

    @property
    def heldout(self) -> "xarray.Dataset":
        """Sums by held-out sequence at each evaluation, over `step` and `sequence`: `nll_<band>`, `tokens_<band>`, and
        where they mean something `excess`, `law` and `bytes`; see `records.Evaluation`. `cluster` is that of each
        sequence."""
        return self._open_rows(HELDOUT)

    def matrices(self, name: str) -> Iterator[tuple[int, Float[np.ndarray, "V D"]]]:
        """A vocabulary matrix at each step at which it was kept (`log.matrices`), one by one, with the step.

        Raises:
            FileNotFoundError: none was kept.
            Damaged: one is not what was written.
        """
        entries = manifest.read(self.folder)
        # Those that the manifest vouches for, so that one that is gone is noticed.
        found = [self.folder / one for one in entries] or (self.folder / MATRICES).glob("*.npy")
        paths = sorted(path for path in found if path.parent.name == MATRICES and path.name.startswith(f"{name}-"))
        if not paths:
            raise FileNotFoundError(f"{self.folder} has no matrices of {name!r}: log.matrices keeps them")
        for path in paths:
            if entries:
                one = path.relative_to(self.folder).as_posix()
                yield (
                    step_of(path),
                    np.load(io.BytesIO(manifest.vouched(self.folder, one, entries[one])), allow_pickle=False),
                )
            else:
                yield step_of(path), np.load(path, allow_pickle=False)

    def _open_rows(self, name: str) -> "xarray.Dataset":
        path = self.folder / name
        if name != ROWS and not (self.folder / CONFIG).exists():
            raise FileNotFoundError(f"{self.folder} has no {name}: it was written by a RowRecorder, which has none")
        if name not in manifest.read(self.folder) and not (path / "zarr.json").exists():
            raise FileNotFoundError(f"{path} has no data yet: the run has not written any rows so far")
        if path in self.shelf.logs:
            return self.shelf.logs[path].copy()
        rows = open_log(self.folder, name, self.shelf)
        if not rows.sizes["step"]:
            rows.close()
            raise FileNotFoundError(f"{path} has no data yet: the run has not written any rows so far")
        # Older runs have none, and sequences have none either.
        strings = rows["token"].attrs.pop(STRINGS, None) if "token" in rows.dims else None
        rows = rows if strings is None else rows.assign_coords(token_string=("token", strings))
        if self.shelf.takes(rows) and name in manifest.read(self.folder):
            self.shelf.put(path, rows)
            return rows.copy()
        return rows


def _checked(path: Path, entry: Mapping[str, Any] | None, shelf: Shelf | None = None) -> "xarray.Dataset":
    """A log as far as the manifest vouches for it; in memory, if it goes on the shelf."""
    import xarray  # here, since a run that is trained needs none, and it takes its time

    with readable(path):
        rows = xarray.open_zarr(path, chunks=None)  # as it is without dask
        if shelf is not None and shelf.takes(rows):
            rows.load()
        if entry is None:
            return rows
        group = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
        metadata = group["consolidated_metadata"]["metadata"]
        check(path, entry, metadata, rows.variables, lambda part: part.values)
        return rows.isel(step=slice(entry["length"]))


def open_log(folder: Path, name: str, shelf: Shelf | None = None) -> "xarray.Dataset":
    """A log as far as the manifest vouches for it: the records in its chunks, and after them those in its open block.

    Args:
        shelf: what it may go on.

    Raises:
        Damaged: it is not what was written.
    """
    entries = manifest.read(folder)
    try:
        rows = _checked(folder / name, entries.get(name), shelf)
        block = manifest.open_block(folder, name, entries, rows.sizes["step"])
    except (Damaged, FileNotFoundError):
        # A run that is continued cuts its logs, and replaces the manifest first; so does one whose block is full.
        if manifest.read(folder) == entries:
            raise
        return open_log(folder, name, shelf)
    return _joined(rows, block) if block else rows


def _joined(rows: "xarray.Dataset", block: bytes) -> "xarray.Dataset":
    """The records of a log's chunks, read where they are asked for, with those of its open block."""
    from tied_lm.record.joined import join  # here, since it takes xarray

    fields = [str(name) for name, values in rows.data_vars.items() if "step" in values.dims]
    return join(rows, records_in(block, kind_of(fields, rows[fields[0]].shape[1])))


def check_logs(folder: Path) -> None:
    """Read all logs of a run, and see that they hold what its manifest vouches for.

    Raises:
        Damaged: a log is not what was written.
    """
    entries = manifest.read(folder)
    try:
        for name, entry in entries.items():
            if "arrays" in entry:
                _checked(folder / name, entry).close()
            else:
                manifest.vouched(folder, name, entry)
    except Damaged:
        # A run that is continued cuts its logs, and replaces the manifest first.
        if manifest.read(folder) == entries:
            raise
        check_logs(folder)


def _check_is_run(folder: Path) -> None:
    """Refuse what is not the folder of one run, and name one that is, if there is one below."""
    config = folder / CONFIG
    is_comparison = config.exists() and "compare" in read_json(config, RESTORE)
    if not is_comparison and (config.exists() or (folder / METRICS).exists()):
        return
    kind = f"no run: it has neither {CONFIG} nor {METRICS}"
    if is_comparison:
        kind = "a comparison, not a run: open_comparison reads all of it"
    elif (folder / SWEEP).exists():
        kind = "a sweep, not a run: open_sweep reads all of it"
    below = sorted(path.parent for depth in (1, 2, 3) for path in folder.glob("*/" * depth + METRICS))
    raise FileNotFoundError(f"{folder} is {kind}" + (f"; a run in it is {below[0]}" if below else ""))


def open_run(path: str | Path, shelf: Shelf | None = None) -> Run:
    """Open the folder of one run.

    Args:
        path: DIR/<arm>/seed<k> of a comparison, the folder of a single run, or that of a `RowRecorder`.
        shelf: for the logs of a finished run that will be read several times.

    Raises:
        FileNotFoundError: it is not the folder of one run, but that of a comparison or of something else.
    """
    return Run(Path(path), shelf)
