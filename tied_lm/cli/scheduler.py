"""A sweep as jobs of SLURM: a script to read, change and run."""

import shlex
from collections.abc import Sequence

NOTICE = 120  # seconds before the end of its time in which a job saves what it has


def sbatch_script(command: Sequence[str], points: Sequence[int]) -> str:
    """A shell script that submits an array of jobs, one for each point, and after them all one for the table.

    What is given to the script goes to `sbatch` each time: time, memory, GPUs. The last job is the whole sweep: what
    failed is tried once more, and the table is made.

    Args:
        command: the sweep.
        points: indices of those to do; if there are none, the table alone is left.
    """
    line = shlex.join(command)
    head = f"#!/bin/sh\n#SBATCH --job-name=tied-lm\n#SBATCH --signal=B:TERM@{NOTICE}\nexec {line}"
    if not points:
        return f"#!/bin/sh\nset -eu\nsbatch \"$@\" <<'JOB'\n{head}\nJOB"
    array = ",".join(map(str, points))
    return (
        f"#!/bin/sh\nset -eu\n"
        f"points=$(sbatch --parsable --array={array} \"$@\" <<'JOB'\n"
        f'{head} --index="$SLURM_ARRAY_TASK_ID"\nJOB\n)\n'
        f'sbatch --dependency=afterany:"${{points%%;*}}" "$@" <<\'JOB\'\n{head}\nJOB'
    )
