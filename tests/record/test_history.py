"""The history of the rows on the disk."""

import json

import numpy as np
import pytest
import tensorstore as ts
import xarray as xr
import zarr

from tied_lm.record.history import STEPS_IN_CHUNK, RowLog

V = 7
FIELDS = {"a": {"units": "nats"}, "b": {}}
STRINGS = ["a", "é", "<0x0A>", "\u2423the", "|", '"', "漢"]
CONSTANTS = {"frequency": np.linspace(0.0, 1.0, V), "band": np.arange(V) % 3}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rows.zarr"


def open_log(folder, first_step=0):
    log = RowLog(folder, FIELDS, CONSTANTS, first_step, STRINGS)
    log.cut()
    return log


def values(step, sign=1):
    return {"a": sign * (step + np.arange(V, dtype=np.float32) / 10), "b": np.full(V, -step, np.float32)}


def fill(log, steps, sign=1):
    for step in steps:
        log.append(step, values(step, sign))


def assert_holds(folder, steps, sign=1):
    """The log holds these steps and nothing else, for every way of reading it."""
    with xr.open_zarr(folder) as rows:
        assert dict(rows.sizes) == {"step": len(steps), "token": V}
        np.testing.assert_array_equal(rows.step, steps)
        np.testing.assert_array_equal(rows.token, np.arange(V))
        assert rows.token.attrs == {"strings": STRINGS}
        for name in FIELDS:
            assert rows[name].dims == ("step", "token")
            assert rows[name].dtype == np.float32
            expected = np.array([values(step, sign)[name] for step in steps], np.float32).reshape(-1, V)
            np.testing.assert_array_equal(rows[name], expected)
        for name, expected in CONSTANTS.items():
            np.testing.assert_array_equal(rows[name], expected)


def array_length(folder, name):
    return json.loads((folder / name / "zarr.json").read_text())["shape"][0]


def test_a_new_log_is_empty_and_opens(folder):
    open_log(folder)
    assert_holds(folder, [])


def test_it_is_a_group_with_consolidated_metadata(folder):
    log = open_log(folder)
    fill(log, [0, 1])
    log.flush()
    group = zarr.open_group(folder, mode="r", zarr_format=3, use_consolidated=True)
    assert set(group.array_keys()) == {"a", "b", "step", "token", "frequency", "band"}
    assert group["a"].shape == (2, V)
    assert group["a"].metadata.dimension_names == ("step", "token")
    with xr.open_zarr(folder) as rows:
        assert rows.a.attrs == {"units": "nats"}
        assert rows.step.attrs == {"units": "updates"}
        assert rows.step.dtype == np.int64


@pytest.mark.parametrize("block", [1, 5, STEPS_IN_CHUNK, 1000])
def test_blocks_of_any_size_across_chunk_borders(folder, block):
    steps = [3 * k for k in range(2 * STEPS_IN_CHUNK + 9)]
    log = open_log(folder)
    for start in range(0, len(steps), block):
        fill(log, steps[start : start + block])
        log.flush()
    assert len(steps) > 64
    assert_holds(folder, steps)


def test_what_is_not_flushed_is_written_once_a_chunk_is_full(folder):
    log = open_log(folder)
    fill(log, range(STEPS_IN_CHUNK - 1))
    assert_holds(folder, [])
    fill(log, [STEPS_IN_CHUNK - 1, STEPS_IN_CHUNK])
    assert_holds(folder, range(STEPS_IN_CHUNK))
    log.flush()
    assert_holds(folder, range(STEPS_IN_CHUNK + 1))


@pytest.mark.parametrize(("tokens", "files"), [(3, 3), (1, 1)])
def test_vocabularies_larger_than_a_chunk(folder, monkeypatch, tokens, files):
    """Few chunks of a block of records are a file each, many are one shard, which no other block touches."""
    monkeypatch.setattr("tied_lm.record.history.TOKENS_IN_CHUNK", tokens)
    log = open_log(folder)
    fill(log, range(40))
    log.flush()
    assert_holds(folder, range(40))
    blocks = [sorted((folder / "a" / "c" / block).iterdir()) for block in "01"]
    assert [len(of_block) for of_block in blocks] == [files, files]
    assert len(list((folder / "frequency" / "c").iterdir())) == files
    written = blocks[0][0].stat().st_ino
    log = open_log(folder, 38)
    fill(log, range(38, 70))
    log.flush()
    assert_holds(folder, range(70))
    assert blocks[0][0].stat().st_ino == written
    with xr.open_zarr(folder) as rows:
        np.testing.assert_array_equal(rows.a.sel(token=5), [values(step)["a"][5] for step in range(70)])


@pytest.mark.parametrize("kept_steps", [0, 1, STEPS_IN_CHUNK - 1, STEPS_IN_CHUNK, STEPS_IN_CHUNK + 1, 69, 70])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_cut_removes_all_from_the_step_on_and_nothing_else(folder, kept_steps, odd):
    steps = [2 * k for k in range(70)]
    first_step = max(2 * kept_steps - odd, 0)
    log = open_log(folder)
    fill(log, steps)
    log.flush()
    kept = [step for step in steps if step < first_step]
    log = open_log(folder, first_step)
    assert_holds(folder, kept)
    assert {array_length(folder, name) for name in ("a", "b", "step")} == {len(kept)}
    again = [first_step + k for k in range(40)]
    fill(log, again)
    log.flush()
    assert_holds(folder, kept + again)


def test_nothing_of_what_was_cut_comes_back(folder):
    log = open_log(folder)
    fill(log, range(40), sign=-1)
    log.flush()
    log = open_log(folder, 0)
    fill(log, range(40))
    log.flush()
    assert_holds(folder, range(40))


class Crash(Exception):
    pass


def crash(*_):
    raise Crash


def test_a_crash_before_the_records_are_published(folder, monkeypatch):
    log = open_log(folder)
    fill(log, range(40))
    log.flush()
    with monkeypatch.context() as patched:
        patched.setattr(RowLog, "_publish", crash)
        fill(log, range(40, 50))
        with pytest.raises(Crash):
            log.flush()
    assert array_length(folder, "a") == 50
    assert_holds(folder, range(40))
    log = open_log(folder, 45)
    assert_holds(folder, range(40))
    fill(log, range(40, 70))
    log.flush()
    assert_holds(folder, range(70))


def test_a_crash_between_the_resizes(folder):
    log = open_log(folder)
    fill(log, range(40))
    log.flush()
    log.arrays["a"].resize(exclusive_max=[50, None]).result()
    assert_holds(folder, range(40))
    log = open_log(folder, 38)
    fill(log, range(38, 41))
    log.flush()
    assert_holds(folder, range(41))


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_crash_in_a_cut_leaves_a_log_of_one_length(folder, monkeypatch, crash_at):
    log = open_log(folder)
    fill(log, range(70))
    log.flush()
    calls = 0
    resize = ts.TensorStore.resize

    def failing(array, **bounds):
        nonlocal calls
        calls += 1
        if calls == crash_at:
            raise Crash
        return resize(array, **bounds)

    with monkeypatch.context() as patched:
        patched.setattr(ts.TensorStore, "resize", failing)
        with pytest.raises(Crash):
            open_log(folder, 40)
    assert_holds(folder, range(40))
    log = open_log(folder, 40)
    fill(log, range(40, 45))
    log.flush()
    assert_holds(folder, range(45))


def test_a_crash_while_the_log_is_created(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RowLog, "_publish", crash)
        with pytest.raises(Crash):
            open_log(folder)
    log = open_log(folder)
    fill(log, [0, 1])
    log.flush()
    assert_holds(folder, [0, 1])


def test_a_reader_meets_whole_records_while_the_log_grows(folder):
    log = open_log(folder)
    for step in range(STEPS_IN_CHUNK + 3):
        with xr.open_zarr(folder) as before:
            fill(log, [step])
            log.flush()
            np.testing.assert_array_equal(before.step, range(step))
            assert before.a.shape == (step, V)
        assert_holds(folder, range(step + 1))
