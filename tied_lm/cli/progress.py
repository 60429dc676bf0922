"""A progress bar over all updates of all runs, with the time that is left."""

import time
from collections.abc import Callable

from tqdm.auto import tqdm  # which is a bar of the notebook, in one

from tied_lm.cli import terminal
from tied_lm.cli.command import tell

LINE_SECONDS = 30.0  # between lines in a log


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Progress:
    """The time left is that of the updates, at the pace seen so far, and that of each run's start.

    The start of an arm's first run compiles its programs, so it is counted apart from the pace of the updates.
    """

    def __init__(self, runs: list[tuple[str, int]]):
        """
        Args:
            runs: arm and number of updates of each run, in their order.
        """
        self.left = list(runs)
        self.compiled: dict[str, float] = {}  # arm -> seconds of the start of its first run
        self.start = 0.0  # seconds of the newest start of another run
        self.seconds, self.updates = 0.0, 0
        self.begun = self.told = time.perf_counter()
        self.count = len(runs)
        self.in_place = terminal.shows_progress()
        self.bar = tqdm(
            total=sum(updates for _, updates in runs),
            disable=not self.in_place,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} updates{postfix}",
            leave=False,
        )

    def start_run(self, arm: str, seed: int) -> Callable[[int], None]:
        """The function to call with each number of updates done; its first call tells what earlier processes did."""
        self.bar.set_description_str(f"{arm} seed {seed}")
        while self.left[0][0] != arm:  # left out, since another run of its arm diverged or its comparison failed
            self.bar.update(self.left.pop(0)[1])
        _, total = self.left.pop(0)
        done, calls, last = 0, 0, time.perf_counter()

        def report(updates: int) -> None:
            nonlocal done, calls, last
            now = time.perf_counter()
            done, calls = done + updates, calls + 1
            if calls == 2:
                if arm in self.compiled:
                    self.start = now - last
                else:
                    self.compiled[arm] = now - last
            elif calls > 2:
                self.seconds, self.updates = self.seconds + now - last, self.updates + updates
            if calls > 1:
                last = now
            self.bar.update(updates)
            self.bar.set_postfix_str(self._left(total - done))
            if not self.in_place and (done == total or now - self.told > LINE_SECONDS):
                self.told = now
                finished = self.count - len(self.left)
                left = f"in {clock(now - self.begun)}" if done == total and not self.left else self._left(total - done)
                stands = f"run {finished} of {self.count} done" if done == total else f"{done:,} of {total:,} updates"
                tell(f"{arm} seed {seed}: {stands}, {left}")

        return report

    def _left(self, updates: int) -> str:
        if not self.updates:
            return "compiling"
        coming = updates + sum(n for _, n in self.left)
        new = {arm for arm, _ in self.left} - self.compiled.keys()
        starts = len(new) * max(self.compiled.values()) + (len(self.left) - len(new)) * self.start
        return f"about {clock(coming * self.seconds / self.updates + starts)} left"

    def close(self) -> None:
        self.bar.close()
