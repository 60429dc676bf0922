"""Folders that were made before the config had defaults: read, evaluated and continued by the code of today.

They lie in tests/folders: a comparison, a run on text, a sweep, and late unties before and after their step. Each was
stopped midway, with the newest checkpoint alone. That of the late untie before its step held one matrix where there
are two by now, and is refused by name.
"""

import re
import tarfile
import threading
from pathlib import Path

import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.cli import compare, evaluate, sweep, train
from tied_lm.files import Damaged
from tied_lm.record.scalars import is_finished, read_metrics

ROOT = Path(__file__).parent.parent
FIELDS = [
    *("data.vocab_size=8", "data.classes=2", "data.batch_size=2", "data.length=4", "data.eval_tokens=24"),
    *("model.features=2", "train.steps=6", "optimizer.warmup_steps=1", "train.eval_every=3", "compare.seeds=1"),
    *("log.probe_tokens=24", "log.scalars_every=3", "log.rows_every=8", "checkpoint.every=2", "checkpoint.keep=1"),
]
TEXT = ["data.source=text", "data.vocab_size=128", "data.paths=tests/folders/letters.txt"]
LATE = ["model.tying=late_untie", "scheme.untie_step=3"]
# What to type to go on, where the newest checkpoint is, its step, and the name that the folder would have had.
FOLDERS = {
    "toy": (compare, [], "toy/untied/seed0", 4, "toy-472601f5"),
    "text": (train, TEXT, "text", 4, "toy-fed78c84"),
    "sweep": (sweep, [], "sweep/000-reversibility=0/tied/seed0", 4, "sweep-toy-000d7019"),
    "late_tied": (train, LATE, "late_tied", 2, "toy-822b1e7e"),
    "late_untied": (train, LATE, "late_untied", 5, "toy-822b1e7e"),
}


def flags(name):
    _, own, *_ = FOLDERS[name]
    grid = ["--grid=data.reversibility=0,1"] if name == "sweep" else []
    return [f"--config.{field}" for field in (*FIELDS, *own)] + grid


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the path of the text begins
    with tarfile.open(ROOT / "tests" / "folders" / "before_defaults.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("name", FOLDERS)
def test_an_old_run_is_read_and_evaluated(name, folders, capsys):
    *_, run, step, _ = FOLDERS[name]
    opened = open_run(folders / run)
    assert opened.config.train.steps == 6
    assert opened.rows.step.values.tolist() == [0, 1, 2, 4][: opened.rows.sizes["step"]]
    loss = opened.scalars("loss/eval")
    evaluation = [str(folders / run), "--samples=1", "--length=3"]
    if name == "late_tied":
        with pytest.raises(Damaged, match=r"kept one matrix up to scheme\.untie_step"):
            evaluate.main(evaluation, threading.Event())
        return
    evaluate.main(evaluation, threading.Event())
    out = capsys.readouterr().out
    assert f"after {step} updates: {opened.config.model.tying}, body none" in out
    found = float(re.search(r"loss, nats a token +(\d+\.\d+)", out)[1])
    assert found == pytest.approx(loss[max(loss)], abs=0.1)  # of another step, close by


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_an_old_folder_is_continued(name, folders):
    script, _, run, step, _ = FOLDERS[name]
    point = ["--index=0"] if name == "sweep" else []
    before = [line for line in read_metrics(folders / run) if line["step"] < step]
    assert before
    assert not is_finished(folders / run, 6)
    command = [f"--workdir={folders / name}", *flags(name), *point]
    if name == "late_tied":
        with pytest.raises(Damaged, match=r"kept one matrix up to scheme\.untie_step"):
            script.main(command, threading.Event())
        return
    script.main(command, threading.Event())
    assert is_finished(folders / run, 6)
    assert read_metrics(folders / run)[: len(before)] == before
    # As one that was never stopped, and knows nothing of the old code.
    script.main([f"--workdir={folders / 'new'}", *flags(name), *point], threading.Event())
    new = folders / "new" / Path(run).relative_to(name)
    for ours, theirs in zip(tiny.metrics(new), tiny.metrics(folders / run), strict=True):
        if ours["step"] < step:  # old code did not follow single tokens in the probe, nor tell geometry or predictions
            later = ("probe/token/", "geometry/", "predictions/")
            ours = {tag: value for tag, value in ours.items() if not any(name in tag for name in later)}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_default_name_of_a_folder_is_that_of_old(name, folders, monkeypatch):
    def stop(place, _):
        raise Stopped(place.name)

    script, *_, expected = FOLDERS[name]
    monkeypatch.setattr("tied_lm.train.resources.check_disk", stop)
    with pytest.raises(Stopped, match=f"^{expected}$"):
        script.main(flags(name), threading.Event())


class Stopped(Exception):
    """Before anything is written."""
