"""Work that another thread does, in order."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs jobs in the order in which they come. At most `limit` wait, so what they hold is bounded.

    An error in a job is raised by the next call from the thread that submits, and no later job runs.
    """

    def __init__(self, limit: int):
        self.jobs: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.Queue(limit)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                if self.error is None:
                    job[0](*job[1])
            except BaseException as error:
                self.error = error
            finally:
                self.jobs.task_done()
        self.jobs.task_done()

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
