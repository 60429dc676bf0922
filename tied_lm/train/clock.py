"""How long the device took for the parts of a run, without waiting for it more often than the run itself does."""

import time

import jax
from jaxtyping import PyTree


class Clock:
    """Seconds by program. The device runs one after the other, and the host waits for them in that order.

    A program begins when it is called, or when the one before it has ended, whichever is later, and ends when the host
    has waited for it. The first call of each compiles it, so it is not timed. Times by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.started = self.free = time.perf_counter()
        self.compiled: set[object] = set()
        self.updates = 0  # timed since the last look
        self.seconds = 0.0  # that these took

    def wait(self, program: object, called: float, results: PyTree) -> float | None:
        """Wait for the results of a program that was called at a time; its seconds, or None at its first call."""
        jax.block_until_ready(results)
        begun, self.free = max(called, self.free), time.perf_counter()
        first = program not in self.compiled
        self.compiled.add(program)
        return None if first else self.free - begun

    def count(self, updates: int, seconds: float | None) -> None:
        """Enter updates that took some seconds, if that is known."""
        if updates and seconds is not None:
            self.updates += updates
            self.seconds += seconds

    def per_update(self) -> float | None:
        """Mean seconds of the updates since the last look; None if there were none that were timed."""
        updates, seconds = self.updates, self.seconds
        self.updates, self.seconds = 0, 0.0
        return seconds / updates if updates else None
