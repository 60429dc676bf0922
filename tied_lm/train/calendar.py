"""At which steps a run evaluates, records and checkpoints. Step k means after k updates."""

import bisect
import dataclasses

import numpy as np

from tied_lm.config import Config

PROBES = 12
MOST_VALUES = 2**24  # of a field of rows.zarr in one run, which is 64 MiB


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps in [0, steps], in order, without repetition; each list holds 0 and the last step, save `checkpoints`."""

    steps: int
    evaluations: list[int]
    scalars: list[int]
    rows: list[int]  # 0, 1, 2, 4, ... while below rows_every, then its multiples
    every_row: list[int]  # those of `rows` at which rows.zarr keeps every row
    probes: list[int]  # log-spaced
    checkpoints: list[int]  # without 0

    @classmethod
    def of(cls, config: Config) -> "Schedule":
        steps = config.train.steps

        def every(gap: int) -> list[int]:
            return sorted({*range(0, steps, gap), steps})

        doubling = {2**i for i in range(steps.bit_length()) if 2**i < min(config.log.rows_every, steps)}
        rows = sorted(doubling | set(every(config.log.rows_every)))
        spaced = np.round(np.geomspace(1, steps, PROBES - 1)).astype(int).tolist()
        return cls(
            steps=steps,
            evaluations=every(config.train.eval_every),
            scalars=every(config.log.scalars_every),
            rows=rows,
            every_row=_thinned(rows, config.log.rows_every, MOST_VALUES // config.data.vocab_size),
            probes=sorted({0, *spaced}),
            checkpoints=every(config.checkpoint.every)[1:],
        )

    def next_boundary(self, step: int) -> int:
        """The first later step at which the host has to look: a dispatch may end there and may not run past."""
        lists = (self.evaluations, self.scalars, self.probes, self.checkpoints)
        positions = ((steps, bisect.bisect_right(steps, step)) for steps in lists)
        return min(steps[i] for steps, i in positions if i < len(steps))

    @property
    def thinning(self) -> str:
        """What the start of a run says where fewer records than there are have every row."""
        if self.every_row == self.rows:
            return ""
        return f"; every row in {len(self.every_row):,} of {len(self.rows):,} records, as there are many rows"


def _thinned(rows: list[int], gap: int, most: int) -> list[int]:
    """Steps among those of the records, at most so many: the gap is doubled as often as that takes. The first and the
    last, and those before the first gap, always stay."""
    thin, first, last = rows, gap, rows[-1]
    while len(thin) > most and gap < last:
        gap *= 2
        thin = [step for step in rows if step < first or step % gap == 0 or step == last]
    return thin
