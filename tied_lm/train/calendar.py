"""At which steps a run evaluates, records and checkpoints. Step k means after k updates."""

import bisect
import dataclasses

import numpy as np

from tied_lm.config import Config

PROBES = 12


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps in [0, steps], in order, without repetition; each list holds 0 and the last step, save `checkpoints`."""

    steps: int
    evaluations: list[int]
    scalars: list[int]
    rows: list[int]  # 0, 1, 2, 4, ... while below rows_every, then its multiples
    probes: list[int]  # log-spaced
    checkpoints: list[int]  # without 0

    @classmethod
    def of(cls, config: Config) -> "Schedule":
        steps = config.train.steps

        def every(gap: int) -> list[int]:
            return sorted({*range(0, steps, gap), steps})

        doubling = {2**i for i in range(steps.bit_length()) if 2**i < min(config.log.rows_every, steps)}
        spaced = np.round(np.geomspace(1, steps, PROBES - 1)).astype(int).tolist()
        return cls(
            steps=steps,
            evaluations=every(config.train.eval_every),
            scalars=every(config.log.scalars_every),
            rows=sorted(doubling | set(every(config.log.rows_every))),
            probes=sorted({0, *spaced}),
            checkpoints=every(config.checkpoint.every)[1:],
        )

    def next_boundary(self, step: int) -> int:
        """The first later step at which the host has to look: a dispatch may end there and may not run past."""
        lists = (self.evaluations, self.scalars, self.probes, self.checkpoints)
        positions = ((steps, bisect.bisect_right(steps, step)) for steps in lists)
        return min(steps[i] for steps, i in positions if i < len(steps))
