"""A whole comparison, or a whole sweep, as one xarray Dataset."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tied_lm.config.folder import CONFIG, SWEEP, read_config
from tied_lm.record.history import STEPS_IN_CHUNK, TOKENS_IN_CHUNK
from tied_lm.record.reader import BESIDE, Run
from tied_lm.study.labels import HYPOTHETICAL, label
from tied_lm.study.members import members
from tied_lm.study.sweep import folder_name, settings_of, short_names, show

MOST_BYTES = 2 * 10**9  # that are read at once, without dask
EXTRA = "lazy"  # of pyproject.toml
COORDINATES = ("token_string", "band", "frequency")


def open_comparison(path: str | Path) -> xr.Dataset:
    """All runs of a comparison, finished or not.

    `rows/<field>` and `probe/<field>` have the dimensions (arm, seed, step, token), those of `update` and `weight`
    `matrix` as well; scalars, by their tag, (arm, seed, step). NaN stands where nothing was recorded: of each variable
    `dropna("step", how="all")` leaves the steps of its own. Coordinates of `token` are `token_string`, `band` and
    `frequency`; `rows/share` and `probe/share` are the lookup's share in each row. What is hypothetical, since there
    are two matrices, is a variable `hypothetical/...` of its own, and NaN in that of the tied arms. All variables have
    a `long_name` and `units`; the attributes hold `config`, `N_batch` and `N_probe` (tokens).

    With dask (the extra `lazy`) values are read when they are used; without, all at once.

    Args:
        path: DIR of `tied-lm compare`, or a point of a sweep.

    Raises:
        FileNotFoundError: it is no comparison, or has no data yet.
        ValueError: there is no dask, and there are more than `MOST_BYTES`.
        Damaged: a log is not what was written.
    """
    place = Path(path)
    found = _comparison(place, _room([place]))
    if found is None:
        raise FileNotFoundError(f"{place} has no data yet: no run of it has written anything so far")
    return found


def open_sweep(path: str | Path) -> xr.Dataset:
    """All points of a sweep that have data: as `open_comparison`, with `point` as the first dimension.

    The fields of the grid are coordinates of `point`, by the last part of their name, and so are `N_batch` and
    `N_probe`. Where the points have other vocabularies, `token_string`, `band` and `frequency` depend on `point`.

    Args:
        path: DIR of `tied-lm sweep`.

    Raises:
        FileNotFoundError, ValueError, Damaged: see `open_comparison`.
    """
    place = Path(path)
    values = _values(place, SWEEP, "a sweep")
    combinations = settings_of(values["grid"])
    names = short_names(list(values["grid"]))
    places = {index: place / folder_name(index, settings) for index, settings in enumerate(combinations)}
    lazy = _room([point for point in places.values() if (point / CONFIG).exists()])
    found = []
    for index, point in places.items():
        one = _comparison(point, lazy) if (point / CONFIG).exists() else None
        if one is not None:
            known = {name: one.attrs.pop(name) for name in ("N_batch", "N_probe")}
            known |= {names[field]: _plain(value) for field, value in combinations[index].items()}
            found.append(one.expand_dims(point=[index]).assign_coords({k: ("point", [v]) for k, v in known.items()}))
    if not found:
        raise FileNotFoundError(f"{place} has no data yet: no run of it has written anything so far")
    joined = xr.concat(
        found, "point", data_vars="all", coords="different", compat="equals", join="outer", combine_attrs="override"
    )
    return _labelled(joined, values)


def _plain(value: Any) -> Any:
    """A value of the grid as a coordinate."""
    return show(value) if isinstance(value, (list, tuple)) else value


def _values(place: Path, file: str, kind: str) -> dict[str, Any]:
    """The config in a folder of that kind."""
    values = read_config(place, file) if (place / file).exists() else {}
    if "compare" in values:
        return values
    hint = "; it is a sweep: use open_sweep" if (place / SWEEP).exists() else ""
    hint = "; it is a comparison: use open_comparison" if file == SWEEP and (place / CONFIG).exists() else hint
    if values:
        hint = "; it is a run: use open_run"
    raise FileNotFoundError(f"{place} is not {kind}: it has no {file} of one{hint}")


def _runs(place: Path) -> Iterator[tuple[str, int, Run]]:
    """Arm, seed and run, for each run that has data."""
    for arm, seed, run in members(place, _values(place, CONFIG, "a comparison")):
        if run.has_data():
            yield arm, seed, run


def _room(places: list[Path]) -> bool:
    """Whether to read when values are used; else all of them have to be small enough."""
    if importlib.util.find_spec("dask") is not None:
        return True
    size = 0
    for place in places:
        for _, _, run in _runs(place):
            logs = [log for _, log in _logs(run)]
            steps = len({step for log in logs for step in log["step"].values.tolist()} | set(run.steps()))
            size += sum(steps * log.sizes["token"] * 4 * (len(log.data_vars) + 1) for log in logs)
    if size > MOST_BYTES:
        raise ValueError(
            f"{places[0].parent if len(places) > 1 else places[0]} holds {size / 1e9:.3g} GB, and without dask at most "
            f"{MOST_BYTES / 1e9:g} GB are read, all at once: install the extra (pip install 'tied_lm[{EXTRA}]'), or "
            "open single runs with open_run"
        )
    return False


def _comparison(place: Path, lazy: bool) -> xr.Dataset | None:
    by_arm: dict[str, dict[int, xr.Dataset]] = {}
    for arm, seed, run in _runs(place):
        by_arm.setdefault(arm, {})[seed] = _of_run(run, lazy)
    if not by_arm:
        return None
    how: dict[str, Any] = {"data_vars": "all", "coords": "minimal", "compat": "override", "join": "outer"}
    arms = [
        xr.concat(list(runs.values()), xr.Variable("seed", list(runs)), combine_attrs="override", **how)
        for runs in by_arm.values()
    ]
    joined = xr.concat(arms, xr.Variable("arm", list(by_arm)), combine_attrs="override", **how)
    return _labelled(joined, _values(place, CONFIG, "a comparison"))


def _labelled(data: xr.Dataset, config: Mapping[str, Any]) -> xr.Dataset:
    """With long names and units, and the config."""
    for name, variable in data.data_vars.items():
        variable.attrs = label(str(name))
    words = {
        "step": ("updates done", "updates"),
        "token": ("id of the token", "1"),
        "token_string": ("token as it is shown", "1"),
        "band": ("band of rows of similar frequency, 0 the most frequent, 5 the unseen", "1"),
        "frequency": ("frequency of the token in the training data", "1"),
        "matrix": ("which matrix; a tied one is `embedding`", "1"),
        "arm": ("arm of the comparison", "1"),
        "seed": ("seed of the run", "1"),
        "point": ("point of the grid", "1"),
        "N_batch": ("N of a batch", "tokens"),
        "N_probe": ("N of the probe", "tokens"),
    }
    for name in data.coords:
        long_name, units = words.get(str(name), (f"{name} of the grid", "1"))
        data[name].attrs = {"long_name": long_name, "units": units}
    data.attrs["config"] = {name: value for name, value in config.items() if name not in BESIDE}
    return data


def _logs(run: Run) -> Iterator[tuple[str, xr.Dataset]]:
    """Rows and probe, as far as they are written."""
    for name in ("rows", "probe"):
        try:
            yield name, getattr(run, name)
        except FileNotFoundError:
            continue


def _of_run(run: Run, lazy: bool) -> xr.Dataset:
    """One run, over step, token and matrix."""
    lines = run.lines()
    scalars = _scalars(lines)
    since = min((line["step"] for line in lines if any(HYPOTHETICAL in tag for tag in line)), default=None)
    parts = [scalars]
    for name, log in _logs(run):
        rows = log.chunk({"step": STEPS_IN_CHUNK, "token": TOKENS_IN_CHUNK}) if lazy else log.load()
        if not lazy:
            log.close()
        rows = rows.set_coords([key for key in COORDINATES if key in rows])
        rows = rows.assign_coords({key: rows[key].load() for key in rows.coords})
        parts.append(_rows(rows, name, since))
    steps = np.unique(np.concatenate([part["step"].values for part in parts]))
    whole = xr.merge([part.reindex(step=steps) for part in parts], compat="override", join="outer")
    config = run.config
    probes = [line["probe/tokens"] for line in lines if "probe/tokens" in line]
    whole.attrs = {
        "N_batch": config.data.batch_size * config.data.length,
        "N_probe": int(probes[-1]) if probes else config.log.probe_tokens,
    }
    return whole


def _scalars(lines: list[dict[str, Any]]) -> xr.Dataset:
    steps = [line["step"] for line in lines]
    tags = dict.fromkeys(tag for line in lines for tag in line if tag != "step")
    found = {}
    for tag in tags:
        plain = tag.replace(HYPOTHETICAL, "")
        name = plain if plain == tag else HYPOTHETICAL + plain
        found[name] = ("step", np.array([line.get(tag, np.nan) for line in lines]))
    return xr.Dataset(found, {"step": steps})


def _rows(rows: xr.Dataset, log: str, since: int | None) -> xr.Dataset:
    """The variables of a log of rows as they are named here.

    Args:
        since: the step from which there are two matrices; None if there is one.
    """
    found: dict[str, xr.DataArray] = {}
    matrices: dict[str, dict[str, xr.DataArray]] = {}
    lookup, scoring = (rows[use].astype(np.float64) ** 2 for use in ("lookup", "scoring"))
    both = lookup + scoring
    share = (lookup / both.where(both > 0)).astype(np.float32)
    share.attrs = {key: value for key, value in rows["cosine"].attrs.items() if key == "hypothetical"}
    for field, values in {**rows.data_vars, "share": share}.items():
        if one := re.fullmatch(r"(update|weight)(?:_(.+))?", str(field)):
            matrices.setdefault(one[1], {})[one[2] or "embedding"] = values
        elif since is None or "hypothetical" not in values.attrs:
            found[f"{log}/{field}"] = values
        else:
            found[f"{HYPOTHETICAL}{log}/{field}"] = values.where(values["step"] >= since)
            if since:
                found[f"{log}/{field}"] = values.where(values["step"] < since)
    for field, of_matrix in matrices.items():
        names = xr.Variable("matrix", list(of_matrix))
        found[f"{log}/{field}"] = xr.concat(list(of_matrix.values()), names, coords="minimal", compat="override")
    return xr.Dataset(found)
