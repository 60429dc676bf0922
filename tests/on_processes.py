"""What two processes with two devices each train together, and what one process with four does; see `test_processes`.

Called with a folder, and in each of the two with the address of the first and its own number; once more, it goes on
with what the kill of one left.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from tests import tiny
from tied_lm.cli import command, compare
from tied_lm.study import picture
from tied_lm.study.plan import Arm
from tied_lm.train import checkpoint, loop
from tied_lm.train.build import build_mesh, build_stream

# Of 21 rows each device has 11, one of them padding.
FIELDS = [*tiny.FIELDS, "data.vocab_size=21", "data.batch_size=4", "optimizer.learning_rate=0.01"]
MESH = ["mesh.data=2", "mesh.vocab=2"]


def train(place, config, stop=None, then=lambda: None, each=lambda: None, at=10):
    done = 0

    def progress(updates):
        nonlocal done
        before, done = done, done + updates
        each()
        if before < at <= done:
            then()

    stream = build_stream(config)
    trainer = Arm.of(config, stream, build_mesh(config)).trainer
    loop.train_run(trainer, config, stream, place, stop or threading.Event(), progress)


def configs(folder):
    text = tiny.write_letters(folder, "data.heldout_fraction=0.5", "data.order=contiguous", *MESH)
    return tiny.make_config(*FIELDS, *MESH), text


def alone(folder):
    toy, text = configs(folder)
    train(folder / "alone" / "toy", toy)
    train(folder / "alone" / "text", text)


def together(folder, coordinator, process, stop):
    others = [*MESH, "mesh.distributed=true", f"mesh.coordinator={coordinator}", "mesh.processes=2"]
    # The programs of the second arm are those of the first, which saves their compilation.
    arms = ["compare.arms.untied=optimizer.learning_rate=0.02", "compare.seeds=1"]
    fields = [*FIELDS, *others, f"mesh.process={process}", *arms]
    picture.svg = lambda _: "<svg></svg>"  # drawing takes long
    compare.main([f"--workdir={folder / 'compared'}", *(f"--config.{field}" for field in fields)], stop)

    toy, text = configs(folder / process)
    is_second = process == "1"
    if (folder / "killed").exists():
        train(folder / "killed", toy)
        if is_second:  # it alone sees damage
            manager = checkpoint._manager
            checkpoint._manager = lambda place, *more, **options: manager(place.with_name("cut"), *more, **options)
        train(folder / "damaged", toy)
    train(folder / "text", text, each=lambda: time.sleep(0.05 * is_second))
    train(folder / "begun by one", toy)
    loop.DISPATCH_SECONDS = 0.0  # one update in each
    try:
        train(folder / "stopped", toy, stop, lambda: is_second and os.kill(os.getpid(), signal.SIGTERM))
        raise AssertionError("it was not stopped")
    except loop.Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
    train(folder / "stopped", toy)
    train(folder / "killed", toy, None, lambda: is_second and os.kill(os.getpid(), signal.SIGKILL), at=20)


if __name__ == "__main__":
    where, *found = sys.argv[1:]
    if found:
        command.run(lambda arguments, stop: together(Path(where), *found, stop))
    else:
        alone(Path(where))
