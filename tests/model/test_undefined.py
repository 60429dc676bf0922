"""What is undefined in a comparison: 0 / 0 is a number nowhere."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests import tiny
from tests.test_commands import SMALL
from tied_lm import open_run
from tied_lm.cli import compare
from tied_lm.files import write_json
from tied_lm.intervals import summarize, with_interval
from tied_lm.study.movefigure import moves

# No lookup reaches the matrix, so that its share is 0, and it has no cosine with anything.
ARMS = ["--config.compare.arms.deaf=model.tying=scoring_only"]


@pytest.mark.slow
def test_an_arm_without_a_lookup(tmp_path, capsys):
    compare.main([f"--workdir={tmp_path / 'run'}", *SMALL, *ARMS], threading.Event())
    told = capsys.readouterr().out
    for path in (tmp_path / "run").rglob("*.json*"):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line, parse_constant=pytest.fail)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    arms = summary["arms"]
    assert arms["deaf"]["split"]["cosine"] is None
    assert arms["deaf"]["split"]["share"]["per_seed"] == [0, 0]
    assert arms["tied"]["split"]["cosine"]["ci95"]
    assert {band["cosine"] is None for band in arms["deaf"]["bands"].values()} == {True}
    _, of_deaf = told.split("rows of deaf")
    table = [line.split() for line in of_deaf.split("\n\n")[0].splitlines()[4:]]
    assert len(table) == len(arms["deaf"]["bands"]) + 1
    assert {row[-1] for row in table} == {"-"}
    run = open_run(tmp_path / "run" / "deaf" / "seed0")
    assert np.isnan(run.last()["probe/split/cosine"])
    assert run.last()["probe/split/share"] == 0
    assert "nan" not in told.lower()
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_without_any_gradient(tmp_path):
    """Then share, cosine and the residual of the sum rule are 0 / 0, in every place."""
    config = tiny.make_config("model.tying=path_weights", "scheme.lookup_weight=0", "scheme.scoring_weight=0")
    tiny.train(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    tags = ["split/residual", "split/share", "probe/split/cosine", "band/2/share", "probe/band/4/cosine"]
    for tag in tags:
        assert np.isnan(list(run.scalars(tag).values())).all(), tag
    assert not {tag for tag, _ in tiny.board_values(tmp_path / "run")} & set(tags)
    for name in ("rows.zarr", "probe.zarr"):
        assert np.isnan(tiny.dataset(tmp_path / "run" / name)["cosine"]).all()
    assert set(run.scalars("grad_norm/total").values()) == {0}


def test_the_mean_is_of_the_seeds_in_which_there_is_a_value():
    assert summarize([1.0, np.nan, 3.0]) == replace(summarize([1.0, 3.0]), per_seed=(1.0, None, 3.0))
    assert summarize([1.0, np.nan]).ci95 is None
    assert with_interval(None) == "-"


def test_a_row_of_zero_has_no_relative_update():
    assert moves(np.array([1.0, 2.0, 9.0]), np.array([1.0, 1.0, 0.0])) == (1.5, 1.0)
    assert moves(np.ones(3), np.zeros(3)) == pytest.approx((np.nan, 1.0), nan_ok=True)


def test_rows_that_did_not_move_and_steps_without_an_update_have_no_part_in_the_median():
    assert moves(np.array([0.0, 0.0, 0.0, 0.2, 0.4]), np.ones(5)) == pytest.approx((0.3, 0.4))
    assert moves(np.zeros(5), np.ones(5)) == pytest.approx((np.nan, 0.0), nan_ok=True)
    assert moves(np.full(5, np.nan), np.ones(5)) == pytest.approx((np.nan, np.nan), nan_ok=True)


def test_no_file_says_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not (tmp_path / "a.json").exists()
