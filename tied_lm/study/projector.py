"""The matrices of the last step for TensorBoard's projector, with what is known of each row."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from tied_lm.bands import NAMES
from tied_lm.config.folder import CONFIG
from tied_lm.files import Damaged, read_json
from tied_lm.record.reader import Run
from tied_lm.rows import PARTS
from tied_lm.study.meanruns import MEAN
from tied_lm.study.plan import Arm
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.train.processes import several

MOST_ROWS = 10_000  # the most frequent ones


def _labels(strings: Sequence[str]) -> list[str]:
    """Tokens as the labels of points. The projector takes the first column that is not all numbers for these."""
    return [f"#{text}" for text in strings] if all(text.isdecimal() for text in strings) else list(strings)


def _numbers(values: Float[np.ndarray, "R"]) -> list[str]:
    """Numbers as text; nothing for what is undefined, or the projector would not take the others for numbers."""
    return ["" if np.isnan(value) else f"{value:.4g}" for value in values]


def _metadata(run: Run, rows: np.ndarray, tied: bool) -> str:
    """A table with a line for each row: the token, and the probe of the last step."""
    with run.probe as probe:
        last = probe.isel(step=-1, token=rows)
        columns: dict[str, Sequence[str]] = {
            "token": _labels([str(text) for text in last["token_string"].values]),
            "id": [str(row) for row in rows],
            "frequency": _numbers(last["frequency"].values),
            "band": [NAMES[band] for band in last["band"].values],
        }
        norms = {part: last[part].values.astype(np.float64) for part in PARTS if tied or part != "total"}
        if tied:
            lookup, scoring = norms["lookup"] ** 2, norms["scoring"] ** 2
            with np.errstate(invalid="ignore"):
                columns["share"] = _numbers(lookup / (lookup + scoring))
            columns["cosine"] = _numbers(last["cosine"].values)
        columns |= {part: _numbers(values) for part, values in norms.items()}
    lines = zip(*columns.values(), strict=True)
    return "\n".join("\t".join(line) for line in [tuple(columns), *lines]) + "\n"


def write_projector(place: Path, name: str, arm: Arm, run: Run) -> None:
    """Write the vocabulary's matrices of a run after its last step into `mean/<arm>`; none if they cannot be had."""
    config, folder = run.config, place / MEAN / name
    checkpoints = Checkpoints(run.folder / "checkpoints", config.checkpoint.keep, read_only=True)
    try:
        # Here one process reads alone, whatever others trained with it.
        trainer = Arm.of(config, arm.stream).trainer if several() else arm.trainer
        fresh = trainer.init(np.uint32(config.seed))
        values = read_json(run.folder / CONFIG, "restore it")
        state = checkpoints.restore(fresh, config=values, kept=trainer.kept(fresh))
    except Damaged:
        state = None
    finally:
        checkpoints.close()
    if state is None or int(state.step) != config.train.steps:
        return
    with run.probe as probe:
        frequencies = probe["frequency"].values
    rows = np.argsort(-frequencies, kind="stable")[:MOST_ROWS]
    (folder / "rows.tsv").write_text(_metadata(run, rows, arm.trainer.model.untied_from is None), encoding="utf-8")
    entries = []
    for parameter in arm.trainer.model.vocabulary:
        matrix = np.asarray(state.params[parameter], np.float32)[rows]
        lines = ("\t".join(f"{value:.6g}" for value in row) for row in matrix.tolist())
        (folder / f"{parameter}.tsv").write_text("\n".join(lines) + "\n", encoding="ascii")
        which = "all" if rows.size == frequencies.size else f"the {rows.size:,} most frequent of {frequencies.size:,}"
        title = f"{name}, {parameter} ({which} rows, seed {config.seed}, step {config.train.steps})"
        fields = {"tensor_name": title, "tensor_path": f"{parameter}.tsv", "metadata_path": "rows.tsv"}
        entries.append("embeddings {\n" + "".join(f'  {key}: "{text}"\n' for key, text in fields.items()) + "}\n")
    (folder / "projector_config.pbtxt").write_text("".join(entries), encoding="utf-8")


def write_projectors(place: Path, arms: Mapping[str, Arm], runs: Mapping[str, Sequence[Run]]) -> None:
    """Write those of the first seed of each arm."""
    for name, of_arm in runs.items():
        write_projector(place, name, arms[name], of_arm[0])
