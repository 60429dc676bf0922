"""Measure how vocabulary matrices lie in space: those of a run, or of a file that another program wrote."""

import argparse
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tied_lm.checks import ConfigError, choose
from tied_lm.cli.command import Parser, check_path, set_up_jax
from tied_lm.tokenstring import printable

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    Tables = dict[str, Float[np.ndarray, "V D"]]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        description="Measure how vocabulary matrices lie in space, and how alike two are.",
        epilog="A path is a .npy or .safetensors file with a (V, D) matrix of floats, or the folder of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a matrix, or the folder of a run")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="another, of the same rows: how alike?")
    parser.add_argument("--key", metavar="NAME", help="of the matrix, where there are several")
    parser.add_argument("--step", default="last", metavar="STEP", help="of a run: a number, last or best")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what is measured: .npy or .safetensors")
    flags = parser.parse_args(arguments)
    for name in ("path", "other", "save"):
        check_path(name, getattr(flags, name) or Path())
    return flags


def _of_run(place: Path, which: str) -> "tuple[Tables, Float[np.ndarray, 'V'], Tables]":
    """Matrices of a checkpoint, the frequencies of their rows, and the matrices at step 0."""
    import jax
    import numpy as np

    from tied_lm import open_run
    from tied_lm.config.folder import CONFIG
    from tied_lm.files import read_json
    from tied_lm.study.plan import Arm
    from tied_lm.train.build import build_stream
    from tied_lm.train.checkpoint import Checkpoints

    try:
        config = open_run(place).config
    except FileNotFoundError as error:
        raise ConfigError("path", str(place), f"a file, or the folder of a run ({error})") from None
    stream = build_stream(config)
    trainer = Arm.of(config, stream).trainer
    checkpoints = Checkpoints(place / "checkpoints", config.checkpoint.keep, read_only=True)
    fresh = trainer.init(np.uint32(config.seed))
    step = checkpoints.find(which)
    state = checkpoints.restore(fresh, step=step, config=read_json(place / CONFIG, "restore it"))
    assert state is not None  # there is one of this step
    found = [
        {name: np.asarray(jax.device_get(one.params[name])) for name in trainer.model.vocabulary}
        for one in (state, fresh)
    ]
    return found[0], stream.frequencies, found[1]


def _tell_way(place: Path, names: list[str], frequencies: "Float[np.ndarray, 'V']") -> None:
    """How the rows of matrices that a run has kept have come where they are."""
    from tied_lm import open_run
    from tied_lm.bands import bands_of
    from tied_lm.study.geometry import common_drift_rows, drift_rows
    from tied_lm.study.table import table

    for name in names:
        print(f"\nThe way of {name}, mean over its rows:\n{table(drift_rows(open_run(place).matrices(name)))}")
        common = table(common_drift_rows(open_run(place).matrices(name), bands_of(frequencies)))
        print(f"Cosine of a row's move since the step before with that of the rest of its band, mean:\n{common}")


def main(arguments: list[str], stop: threading.Event) -> None:
    flags = _parse(arguments)

    from tied_lm.cli.matrices import read_matrix, write_matrix
    from tied_lm.model.geometry.likeness import compare_matrices
    from tied_lm.record.matrices import MATRICES
    from tied_lm.study.geometry import geometry_rows, likeness_rows
    from tied_lm.study.table import table

    set_up_jax()
    tables: list[Tables] = []
    for path in (flags.path, flags.other):
        if path is None:
            continue
        frequencies = starts = None
        if path.is_dir():
            found, frequencies, starts = _of_run(path, flags.step)
            if flags.key is not None:
                found = {flags.key: choose(found, "key", flags.key)}
        else:
            found = {flags.key or "matrix": read_matrix(path, flags.key)}
        tables.append(found)
        try:
            rows = geometry_rows(found, frequencies, starts)
        except ValueError as error:
            raise ConfigError("path", str(path), f"a matrix that can be measured ({error})") from None
        print(f"{printable(str(path))}\n{table(rows)}")
        if frequencies is not None and (path / MATRICES).exists():
            _tell_way(path, list(found), frequencies)
    if flags.save is not None:
        write_matrix(flags.save, tables[0])
    if len(tables) == 2:
        for name, first in tables[0].items():
            for other, second in tables[1].items():
                try:
                    alike = compare_matrices(first, second)
                except ValueError as error:
                    raise ConfigError("other", str(flags.other), f"a matrix of the same tokens ({error})") from None
                sampled = f"{alike.pairs:,} pairs, {alike.judged:,} rows for cosines, {alike.queries:,} for neighbours"
                print(f"\n{name} and {other}; {sampled}:\n{table(likeness_rows(alike))}")
