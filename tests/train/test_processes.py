"""Two processes that do one run together, on this machine; beside one process with as many devices, and with one."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests import linen, tiny
from tests.on_processes import FIELDS, configs
from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.config import read_mesh
from tied_lm.train import loop
from tied_lm.train.loop import Interrupted

SECONDS = 30  # after which a process that is gone has ended the others


def start(devices, *arguments):
    hurry = [f"--{name}={value}".lower() for name, value in linen.HURRY.items()]
    flags = " ".join([*hurry, f"--xla_force_host_platform_device_count={devices}"])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.on_processes", *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start_pair(folder):
    address = f"127.0.0.1:{free_port()}"
    return [start(2, folder, address, process) for process in "01"]


def assert_same_bits(a, b, config):
    assert tiny.metrics(a) == tiny.metrics(b)
    for name in ("rows.zarr", "probe.zarr", "heldout.zarr"):
        tiny.assert_same_bits(tiny.dataset(a / name), tiny.dataset(b / name))
    tiny.assert_same_bits(tiny.saved_state(a, config), tiny.saved_state(b, config))


def assert_near(a, b):
    found, true = open_run(a), open_run(b)
    for tag in ("loss/eval", "loss/train", "loss/excess"):
        assert list(found.scalars(tag)) == list(true.scalars(tag))
        assert_allclose(list(found.scalars(tag).values()), list(true.scalars(tag).values()), atol=1e-5, err_msg=tag)
    for name, values in true.rows.items():
        last = np.nanmax(np.abs(values)) or 1
        assert_allclose(found.rows[name], values, rtol=0, atol=2e-4 * last, err_msg=name)


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path, monkeypatch):
    toy, text = configs(tmp_path)
    here = tiny.make_config(*FIELDS)
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "begun by one", here, 20)
    shutil.copytree(tmp_path / "begun by one", tmp_path / "damaged")

    for process in "01":
        (tmp_path / process).mkdir()
    pair = start_pair(tmp_path)
    alone = start(4, tmp_path)
    said = [process.communicate(timeout=400) for process in (*pair, alone)]
    assert alone.returncode == 0, said[2]

    # To the last bit, since all sums are of two parts: the stop of one of the two and unequal speeds change nothing.
    assert_same_bits(tmp_path / "compared" / "tied" / "seed0", tmp_path / "alone" / "toy", toy)
    assert_same_bits(tmp_path / "stopped", tmp_path / "alone" / "toy", toy)
    assert_same_bits(tmp_path / "text", tmp_path / "alone" / "text", text)
    # Begun on one device by one process.
    assert_near(tmp_path / "begun by one", tmp_path / "alone" / "toy")

    # The first process speaks for both; the end of the second is told in one line, and another start goes on.
    assert [process.returncode for process in pair] == [1, -signal.SIGKILL]
    out, err = said[0]
    assert "less untied" in out
    assert re.search(r"stopped after \d+ updates.*\n", err)
    assert err.endswith("\nerror: another process of this run has ended; the same command continues\n")
    assert "Gloo" not in out + err
    assert said[1][0] == ""
    assert re.fullmatch(r"stopped after \d+ updates, all of them saved\n", said[1][1])

    # It goes on in one process, and in two, where a checkpoint that one alone cannot read ends both with the same line.
    assert (tmp_path / "killed" / "checkpoints" / "9").exists()
    shutil.copytree(tmp_path / "killed", tmp_path / "by one")
    saved = tmp_path / "damaged" / "checkpoints"
    shutil.copytree(saved, saved.with_name("cut"))
    newest = max(saved.iterdir(), key=lambda path: int(path.name))
    for path in (tmp_path / "damaged" / "cut" / newest.name / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    pair = start_pair(tmp_path)
    tiny.train(tmp_path / "by one", here)
    assert_near(tmp_path / "by one", tmp_path / "alone" / "toy")
    errors = [process.communicate(timeout=200)[1].splitlines()[-1] for process in pair]
    assert_same_bits(tmp_path / "killed", tmp_path / "alone" / "toy", toy)
    assert [process.returncode for process in pair] == [1, 1]
    assert re.fullmatch(f"error: the checkpoint {newest} is damaged .*; remove that folder to continue .*", errors[0])
    assert errors[1] == errors[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"processes": 2}, "mesh.processes = 2 is not possible; allowed: 0, unless mesh.distributed = True"),
        ({"distributed": True, "coordinator": "here"}, "mesh.coordinator = 'here' .* a host and a port, HOST:PORT"),
        ({"distributed": True, "processes": 2, "process": 2}, "mesh.process = 2 .* below mesh.processes = 2"),
    ],
)
def test_processes_that_there_cannot_be(fields, said):
    with pytest.raises(ConfigError, match=said):
        read_mesh({"mesh": fields})
