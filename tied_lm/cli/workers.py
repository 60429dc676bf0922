"""Worker processes, each of which does one part of the work."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_SECONDS = 0.1
WORKER = "TIED_LM_WORKER"  # in the environment of a worker, whose standard input ends with its parent


def stop_with_parent() -> None:
    """In a worker: be told to stop, as by SIGTERM, once the parent is gone, however it ended."""
    if os.environ.pop(WORKER, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _problem(status: int, lines: list[str]) -> str:
    """Why a command failed, in one line."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return lines[-1].removeprefix("error: ") if lines else f"exit status {status}"


def run_workers(
    commands: Sequence[list[str]], count: int, stop: threading.Event, done: Callable[[int, str | None], None]
) -> None:
    """Run each command in a process of its own, at most `count` at a time; none outlives this process for long.

    Args:
        stop: once set, the running processes are asked to stop, no other is started, and all are waited for.
        done: called with the number of each command that has ended by itself, and what is wrong: None, or the last
            line that it wrote to its standard error.
    """
    # Several processes may share an accelerator: none may take all of its memory beforehand.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | {WORKER: "1"}
    waiting = list(range(len(commands)))
    running: dict[int, subprocess.Popen[bytes]] = {}
    asked = False
    with tempfile.TemporaryDirectory() as folder:
        while running or (waiting and not stop.is_set()):
            while waiting and len(running) < count and not stop.is_set():
                part = waiting.pop(0)
                with (Path(folder) / str(part)).open("wb") as errors:
                    # In a session of its own, so that an interrupt from the keyboard does not reach it a second time.
                    running[part] = subprocess.Popen(
                        commands[part],
                        stdin=subprocess.PIPE,  # never written to: its end tells that this process is gone
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        env=environment,
                        start_new_session=True,
                    )
            if stop.is_set() and not asked:
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
                asked = True
            for part in [part for part, process in running.items() if process.poll() is not None]:
                process = running.pop(part)
                status = process.returncode
                if process.stdin is not None:
                    process.stdin.close()
                lines = (Path(folder) / str(part)).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                if status == 0:
                    done(part, None)
                elif not asked or status not in (-signal.SIGTERM, 128 + signal.SIGTERM):
                    done(part, _problem(status, lines))
            time.sleep(POLL_SECONDS)
