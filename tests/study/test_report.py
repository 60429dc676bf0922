"""What the report draws."""

import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.study.report import Moves


def test_how_far_rows_move_is_of_those_that_moved_and_how_many_did_stands_beside_it(tmp_path):
    """By plain gradient descent a row of an untied lookup moves if and only if it is looked up."""
    config = tiny.make_config("model.tying=untied", "optimizer.name=sgd", "train.steps=9", "model.init_std=0.5")
    tiny.train(tmp_path / "run", config)
    run, bands = open_run(tmp_path / "run"), ["0", "3", "4"]
    found, rows = Moves.of(run, bands), run.rows
    looked_up = rows["input_count"].values > 0
    np.testing.assert_array_equal(found.steps, [0, 1, 2, 4, 8, 9])
    assert found.whole["embedding"][:-1, 1] == pytest.approx(looked_up[:-1].mean(axis=1))
    assert (found.whole["output"][:-1, 1] == 1).all()
    assert np.isnan(found.whole["embedding"][-1]).all()  # no update follows the last step
    ratio = rows["update_embedding"].values / rows["weight_embedding"].values
    for k, band in enumerate(bands):
        of_band = looked_up[-2] & (rows["band"].values == int(band))
        expected = np.median(ratio[-2, of_band]), of_band.sum() / (rows["band"].values == int(band)).sum()
        assert found.by_band["embedding"][k] == pytest.approx(expected, nan_ok=True)
