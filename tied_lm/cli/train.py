"""Train one model, once."""

import threading
from pathlib import Path

from tied_lm.cli import terminal
from tied_lm.cli.command import check_same, parse, save_when_stopped, set_up_jax, tell, tensorboard_command
from tied_lm.tokenstring import printable


def main(arguments: list[str], stop: threading.Event) -> None:
    command = parse("Train one model, as one run of a comparison.", arguments)

    from tied_lm import open_run
    from tied_lm.cli.progress import Progress
    from tied_lm.config import build_run, digest, folder
    from tied_lm.data.documents import told
    from tied_lm.data.sources import with_vocabulary
    from tied_lm.files import write_json
    from tied_lm.model.embedding import count_parameters
    from tied_lm.record.reader import check_logs
    from tied_lm.record.scalars import is_finished
    from tied_lm.study.estimate import clock, needs
    from tied_lm.study.plan import Arm
    from tied_lm.study.provenance import recorded
    from tied_lm.study.table import table
    from tied_lm.train.build import build_mesh, build_stream
    from tied_lm.train.calendar import Schedule
    from tied_lm.train.loop import run_values, train_run
    from tied_lm.train.processes import from_first, is_first
    from tied_lm.train.resources import check_disk, check_memory, shown

    set_up_jax(command)
    config = build_run(with_vocabulary(command.values))
    check_memory(config)
    arm = Arm.of(config, build_stream(config), build_mesh(config))
    if arm.stream.about:
        tell(told(arm.stream.about))
    values = run_values(config, arm.stream)
    place = command.workdir or Path("runs") / f"{command.name}-{digest(values)}"
    check_same(values)

    def check() -> bool:
        """Whether the folder, if it is this run's, is complete."""
        folder.check(place, values)
        check_logs(place)
        return is_finished(place, config.train.steps)

    is_complete = from_first(check)
    if command.flags.dry_run:
        rows, seconds = needs({config.model.tying: arm}, 1)
        print(table(rows, terminal.width(), head=terminal.bold))
        print(f"1 run in {printable(str(place))}, about {clock(seconds)}; nothing was written")
        return
    save_when_stopped(stop)
    if is_complete:
        tell(f"{place} is complete; nothing was changed.")
    elif not is_first():
        train_run(arm.trainer, config, arm.stream, place, stop, lambda updates: None)
    else:
        size = arm.disk_bytes()
        check_disk(place, size)
        tell(f"1 run in {place}, at most {shown(size)} there{Schedule.of(config).thinning}")
        with folder.locked(place):
            write_json(place / folder.CONFIG, values)  # first, since it makes the folder this run's
            progress = Progress([(config.model.tying, config.train.steps)])
            try:
                report = progress.start_run(config.model.tying, config.seed)
                with recorded(place):
                    train_run(arm.trainer, config, arm.stream, place, stop, report)
            finally:
                progress.close()
    if not is_first():
        return
    parameters = count_parameters(arm.trainer.model)["total"]
    print(f"{config.model.tying}, {parameters:,} parameters, after {config.train.steps:,} updates:")
    print(table(open_run(place).table(), terminal.width(), head=terminal.bold))
    print(f"TensorBoard: {tensorboard_command(place)}")
