"""The keeper of a folder that a recorder writes: its lock, and what is not on the disk yet."""

import atexit
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tied_lm.config.folder import locked
from tied_lm.record.background import Background
from tied_lm.record.recorder import Recorder

SOON = 4.0  # seconds; what was written is on the disk after twice as many, and what a flush takes
WAITING = 8  # records

_open_here: dict[Path, "Keeper"] = {}  # those of this process, by folder


class Keeper:
    """Writes in a thread of its own, so that no interrupt leaves half a record, and flushes without being asked.

    It does not know for whom: a recorder that nobody holds any more is `abandoned`, and then it closes itself.

    Args:
        folder: absolute, without links.

    Raises:
        ValueError: the folder is open already, in this process or in another.
    """

    abandoned = closed = False

    def __init__(self, folder: Path):
        if (other := _open_here.get(folder)) is not None:
            if not other.abandoned:
                raise ValueError(f"{folder} is open in another RowRecorder of this process: close() that one first")
            other.close()
        with ExitStack() as lock:
            lock.enter_context(locked(folder))
            self.lock = lock.pop_all()
        self.folder = folder
        self.recorder: Recorder | None = None  # from the first record on
        self.flushed, self.is_flushed = time.monotonic(), True
        self.ending = threading.Lock()
        self.background = Background(WAITING, self._rest, SOON)
        _open_here[folder] = self

    def write(self, *record: Any) -> None:
        """Leave a record to the thread: what `Recorder.write` takes.

        Raises:
            OSError: the disk does not take what was written before.
        """
        self.background.submit(self._write, *record)

    def _write(self, *record: Any) -> None:
        assert self.recorder is not None
        self.is_flushed = False
        self.recorder.write(*record)
        if time.monotonic() - self.flushed > SOON:
            self._flush()

    def _flush(self) -> None:
        if self.recorder is not None and not self.is_flushed:
            self.recorder.flush()
            self.flushed, self.is_flushed = time.monotonic(), True

    def _rest(self) -> None:
        """No record has come for a while."""
        self._flush()
        if self.abandoned:
            self._end()
            self.background.jobs.put(None)

    def flush(self) -> None:
        """Put all that was written on the disk."""
        self.background.submit(self._flush)
        self.background.wait()

    def abandon(self) -> None:
        """Close it soon. Nothing is waited for, since this may be called at any moment, in any thread."""
        self.abandoned = True

    def close(self) -> None:
        """Put all that was written on the disk, and give the folder free."""
        try:
            self.background.close()
        finally:
            self._end()

    def _end(self) -> None:
        with self.ending:
            if self.closed:
                return
            self.closed = True
            try:
                if self.recorder is not None:
                    self.recorder.close()
            finally:
                _open_here.pop(self.folder, None)
                self.lock.close()


@atexit.register
def _close_all() -> None:
    with ExitStack() as stack:
        for keeper in list(_open_here.values()):
            stack.callback(keeper.close)


def _leave_to_the_parent() -> None:
    for keeper in _open_here.values():
        keeper.closed = True
    _open_here.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)
