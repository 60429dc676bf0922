"""A whole comparison or sweep as one Dataset, against the files themselves."""

import json
import math
import shutil
import threading

import numpy as np
import pytest
import xarray as xr

from tests import tiny
from tied_lm import open_comparison, open_run, open_sweep
from tied_lm.config import override
from tied_lm.files import Damaged, write_json
from tied_lm.study import comparison, reading, sweep
from tied_lm.study.subject import Subject

LATE = "model.tying=late_untie scheme.untie_step=8"


def complete(place, plan):
    comparison.complete(place, plan, threading.Event(), lambda *_: lambda _: None)


@pytest.fixture(scope="module")
def values():
    values = tiny.toy.get_config().to_dict()
    for text in (*tiny.FIELDS, "compare.seeds=2", "seed=3"):
        override(values, *text.split("="))
    values["compare"]["arms"]["late"] = LATE
    return values


@pytest.fixture(scope="module")
def place(undrawn, values, tmp_path_factory):
    place = tmp_path_factory.mktemp("reading") / "runs"
    complete(place, tiny.plan_of(values))
    return place


@pytest.fixture(params=[pytest.param("with dask", marks=pytest.mark.slow), "without"])
def data(request, place, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(reading.importlib.util, "find_spec", lambda _: None)
    with open_comparison(place) as data:
        assert (data["rows/lookup"].chunks is None) == (request.param == "without")
        yield data


def lines_of(place, arm, seed):
    text = (place / arm / f"seed{seed}" / "metrics.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def test_dimensions_coordinates_and_what_all_of_it_is(data):
    assert data.arm.values.tolist() == ["tied", "untied", "late"]
    assert data.seed.values.tolist() == [3, 4]
    assert data.token.size == 20
    for name, variable in data.data_vars.items():
        kind = name.removeprefix("hypothetical/").split("/")
        of_rows = kind[0] in ("rows", "probe") and len(kind) == 2 and kind[1] != "tokens"
        matrix = ("matrix",) if kind[-1] in ("update", "weight") else ()
        assert variable.dims == ("arm", "seed", *matrix, "step", *("token",) * of_rows), name
    for name, variable in data.variables.items():
        assert set(variable.attrs) == {"long_name", "units"}, name
        assert all(variable.attrs.values()), name
    assert (data.N_batch, data.N_probe) == (10, 17)
    assert data.config["compare"]["seeds"] == 2
    assert data["rows/lookup"].units == "nats / parameter"
    assert data["band/0/share"].long_name.endswith("of band 0, of one batch")
    xr.testing.assert_equal(data.band, data["rows/lookup"].band)


def test_the_values_are_those_of_the_files(data, place):
    assert len({path.stat().st_ino for path in place.glob("*/seed*/*.zarr/token/zarr.json")}) == 1  # of all runs
    for arm, seed in [("tied", 3), ("untied", 4), ("late", 4)]:
        here = data.sel(arm=arm, seed=seed)
        lines = lines_of(place, arm, seed)
        for tag in ("loss/eval", "grad_norm/push", "probe/band/3/lookup", "time/seconds"):
            expected = {step: line[tag] for step, line in lines.items() if tag in line}
            found = here[tag].dropna("step")
            assert dict(zip(found.step.values.tolist(), found.values.tolist(), strict=True)) == expected
        for log in ("rows", "probe"):
            stored = tiny.dataset(place / arm / f"seed{seed}" / f"{log}.zarr")
            found = here[f"{log}/scoring"].dropna("step", how="all")
            np.testing.assert_array_equal(found.step, stored["step"])
            np.testing.assert_array_equal(found, stored["scoring"])
            np.testing.assert_array_equal(here.frequency, stored["frequency"])


def test_matrices_are_a_coordinate_and_so_the_names_are_the_same(data, place):
    tied, untied = (tiny.dataset(place / arm / "seed3" / "rows.zarr") for arm in ("tied", "untied"))
    found = data["rows/update"].sel(seed=3, step=tied["step"])
    np.testing.assert_array_equal(found.sel(arm="tied", matrix="embedding"), tied["update"])
    assert found.sel(arm="tied", matrix="output").isnull().all()
    for name in ("embedding", "output"):
        np.testing.assert_array_equal(found.sel(arm="untied", matrix=name), untied[f"update_{name}"])


def test_share_of_each_row_and_what_is_hypothetical(data, place):
    for arm, since in {"tied": math.inf, "untied": 0, "late": 8}.items():
        stored = tiny.dataset(place / arm / "seed3" / "probe.zarr")
        lookup, scoring = (stored[use].astype(float) ** 2 for use in ("lookup", "scoring"))
        with np.errstate(invalid="ignore"):
            share = lookup / (lookup + scoring)
        hypothetical = (stored["step"] >= since)[:, None]
        for prefix, shown in {"": ~hypothetical, "hypothetical/": hypothetical}.items():
            found = data[f"{prefix}probe/share"].sel(arm=arm, seed=3, step=stored["step"])
            np.testing.assert_allclose(found, np.where(shown, share, np.nan), rtol=1e-6)
            found = data[f"{prefix}probe/split/share"].sel(arm=arm, seed=3, step=stored["step"])
            assert (found.notnull().values == shown[:, 0]).all()


def test_a_comparison_that_goes_on_and_folders_of_something_else(place, tmp_path):
    shutil.copytree(place, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "untied" / "seed4")
    shutil.rmtree(tmp_path / "part" / "late")
    (tmp_path / "part" / "tied" / "seed4" / "manifest.json").unlink()
    (tmp_path / "part" / "tied" / "seed4" / "metrics.jsonl").write_text("")
    with open_comparison(tmp_path / "part") as data:
        assert (data.arm.size, data.seed.values.tolist()) == (2, [3])
    shutil.rmtree(tmp_path / "part" / "tied")
    shutil.rmtree(tmp_path / "part" / "untied")
    for folder, words in {
        tmp_path / "part": "has no data yet",
        place / "tied" / "seed3": "is not a comparison.* it is a run: use open_run",
        tmp_path: "is not a comparison",
    }.items():
        with pytest.raises(FileNotFoundError, match=words):
            open_comparison(folder)
    with pytest.raises(FileNotFoundError, match="it is a comparison: use open_comparison"):
        open_sweep(place)
    with pytest.raises(FileNotFoundError, match="open_comparison reads all of it"):
        open_run(place)


def test_without_dask_too_much_is_refused_in_one_sentence(place, monkeypatch):
    monkeypatch.setattr(reading.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(reading, "MOST_BYTES", 100_000)
    with pytest.raises(ValueError, match=rf"^{place} holds 0\.000\d+ GB, and without dask at most 0.0001 GB are read"):
        open_comparison(place)


def test_a_sweep_has_its_points_first(values, place, tmp_path):
    grid = {"optimizer.learning_rate": [0.05, 0.1], "data.paths": [["a", "b"], ["c"]]}
    write_json(tmp_path / "sweep.json", values | {"grid": grid})
    for k, settings in list(enumerate(sweep.settings_of(grid)))[1:3]:  # the others are still to be done
        shutil.copytree(place, tmp_path / sweep.folder_name(k, settings))
    with open_sweep(tmp_path) as data, open_comparison(place) as one:
        assert data["rows/lookup"].dims == ("point", "arm", "seed", "step", "token")
        assert data.learning_rate.values.tolist() == [0.05, 0.1]
        assert data.paths.values.tolist() == ["c", "a,b"]
        assert data.N_batch.values.tolist() == [10, 10]
        assert data.band.dims == data.token_string.dims == ("token",)
        assert all(variable.attrs["long_name"] and variable.attrs["units"] for variable in data.variables.values())
        for k in (1, 2):
            for name in ("loss/eval", "probe/share", "rows/update"):
                xr.testing.assert_equal(
                    data[name].sel(point=k).reset_coords(drop=True), one[name].reset_coords(drop=True)
                )
    with pytest.raises(FileNotFoundError, match="open_sweep reads all of it"):
        open_run(tmp_path)


def test_a_run_in_the_place_of_another_is_named(place, tmp_path):
    for one, other in [("tied/seed3", "tied/seed4"), ("tied", "untied")]:
        folder = tmp_path / one.replace("/", "-")
        shutil.copytree(place, folder)
        (folder / one).rename(folder / "aside")
        (folder / other).rename(folder / one)
        (folder / "aside").rename(folder / other)
        for read in (open_comparison, Subject.of):
            with pytest.raises(Damaged, match=rf"^{folder / one}.* holds another run \((seed|model.tying) is "):
                read(folder)
