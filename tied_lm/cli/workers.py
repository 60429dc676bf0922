"""Worker processes, each of which does parts of the work, one after the other."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

POLL_SECONDS = 0.1
WORKER = "TIED_LM_WORKER"  # in the environment of a worker, whose standard input ends with its parent: its cores
END = "end"

_given: "queue.SimpleQueue[str]" = queue.SimpleQueue()  # to this process, if it is a worker


def stop_with_parent() -> None:
    """In a worker: keep to its cores, take what the parent gives, and be told to stop, as by SIGTERM, once the parent
    is gone, however it ended."""
    cores = os.environ.pop(WORKER, None)
    if cores is None:
        return
    if cores:  # before anything counts them
        os.sched_setaffinity(0, set(map(int, cores.split(","))))

    def take() -> None:
        with open(0, encoding="ascii", closefd=False) as lines:
            for line in lines:
                _given.put(line.strip())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=take, daemon=True).start()


def parts_to_do() -> Iterator[int]:
    """In a worker: the parts that the parent gives it. Each has to be answered before the next one comes."""
    while (line := _given.get()) != END:
        yield int(line)


def answer(problem: str | None) -> None:
    """In a worker: a part is done, or what is wrong."""
    print(json.dumps(problem), flush=True)


def cores_of(worker: int, count: int) -> list[int]:
    """The cores that one of some workers keeps to; none where a process cannot choose them."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if count >= len(cores):
        return [cores[worker % len(cores)]]
    return cores[worker * len(cores) // count : (worker + 1) * len(cores) // count]


class _Worker:
    """One process and the part that it has."""

    def __init__(self, command: Sequence[str], number: int, cores: Sequence[int], errors: Path):
        self.number, self.errors, self.part = number, errors, -1
        # Several processes may share an accelerator: none may take all of its memory beforehand.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ | {WORKER: ",".join(map(str, cores))}
        with errors.open("wb") as file:
            # In a session of its own, so that an interrupt from the keyboard does not reach it a second time.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def give(self, line: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is told elsewhere
            assert self.process.stdin is not None
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def listen(self, answers: "queue.SimpleQueue[tuple[_Worker, str]]") -> None:
        """Pass its answers on, and an empty one once it has ended."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                answers.put((self, line.decode()))
        self.process.wait()
        answers.put((self, ""))

    def problem(self) -> str:
        """Why it has ended, in one line."""
        status = self.process.returncode
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"exit status {status}"


def run_workers(
    command: Sequence[str],
    parts: Sequence[int],
    count: int,
    stop: threading.Event,
    done: Callable[[int, str | None], None],
) -> None:
    """Share parts among processes of one command, at most `count` at a time; none outlives this process for long. Each
    keeps to cores of its own, if there are enough. One that ends with a part is replaced.

    Args:
        stop: once set, the running processes are asked to stop, no other is started, and all are waited for.
        done: called with each part that has come to an end by itself, and what is wrong: None, or one line.
    """
    waiting, free = list(parts), list(range(count))
    answers: queue.SimpleQueue[tuple[_Worker, str]] = queue.SimpleQueue()
    running: list[_Worker] = []
    asked = False

    def give(worker: _Worker) -> None:
        worker.part = -1 if stop.is_set() or not waiting else waiting.pop(0)
        worker.give(END if worker.part < 0 else worker.part)

    with tempfile.TemporaryDirectory() as folder:
        while running or (waiting and not stop.is_set()):
            while waiting and free and not stop.is_set():
                number = free.pop(0)
                worker = _Worker(command, number, cores_of(number, count), Path(folder) / str(number))
                running.append(worker)
                give(worker)
                threading.Thread(target=worker.listen, args=(answers,), daemon=True).start()
            if stop.is_set() and not asked:
                for worker in running:
                    worker.process.send_signal(signal.SIGTERM)
                asked = True
            try:
                worker, line = answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if line:
                done(worker.part, json.loads(line))
                give(worker)
                continue
            running.remove(worker)
            free.append(worker.number)
            worker.close()
            stopped = asked and worker.process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
            if worker.part >= 0 and not stopped:
                done(worker.part, worker.problem())
