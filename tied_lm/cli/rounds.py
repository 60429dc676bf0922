"""Times measured in rounds, so that noise meets all that is compared alike."""

import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

Run = Callable[[], object]


def interleave(runs: dict[str, Run], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each run in each round. All runs of a round follow each other, so that noise meets them alike."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in tqdm(range(rounds), leave=False, disable=None):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in times.items()}


def ratio(times: dict[str, np.ndarray], a: str, b: str) -> float:
    """The median over rounds of a / b."""
    return float(np.median(times[a] / times[b]))
