"""Several devices; the machine's one is taken for eight in a process of its own, since JAX counts them at its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import linen


def on_eight_devices(marks):
    hurry = [f"--{name}={value}".lower() for name, value in linen.HURRY.items()]  # as the quick tests are compiled
    flags = " ".join([*hurry, "--xla_force_host_platform_device_count=8"])
    command = [sys.executable, "-m", "pytest", "-qxm", marks, "-n0", "-p", "no:cacheprovider", "on_devices.py"]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_eight_devices():
    on_eight_devices("not slow")


@pytest.mark.slow
def test_runs_on_eight_devices():
    on_eight_devices("slow")
