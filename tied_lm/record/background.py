"""Work that another thread does, in order."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs jobs in the order in which they come. At most `limit` wait, so what they hold is bounded.

    An error in a job is raised by the next call from the thread that submits, and no later job runs.

    Args:
        idle: done whenever no job has come for `seconds`.
    """

    def __init__(self, limit: int, idle: Callable[[], None] | None = None, seconds: float | None = None):
        self.jobs: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(limit)
        self.idle, self.seconds = idle, seconds
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=self.seconds)
            except queue.Empty:
                self._do(self.idle)
                continue
            if job is not None:
                self._do(*job)
            self.jobs.task_done()
            if job is None:
                return

    def _do(self, job: Callable[..., None] | None, arguments: tuple[Any, ...] = ()) -> None:
        try:
            if job is not None and self.error is None:
                job(*arguments)
        except BaseException as error:
            self.error = error

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def submit(self, job: Callable[..., None], *arguments: Any) -> None:
        """Leave a job to the thread; waits while `limit` are waiting."""
        self._raise()
        self.jobs.put((job, arguments))

    def wait(self) -> None:
        """Wait until every job is done."""
        self.jobs.join()
        self._raise()

    def close(self) -> None:
        """Do what is left, and end the thread."""
        self.jobs.put(None)
        self.thread.join()
        self._raise()
