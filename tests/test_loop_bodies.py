"""Runs of models that draw dropout masks or carry a state: no stop changes them."""

import pytest

from tests import tiny
from tied_lm.loop import Interrupted


@pytest.mark.parametrize("fields", tiny.SEQUENCE_ARMS.values(), ids=tiny.SEQUENCE_ARMS)
def test_going_on_with_masks_and_states(tmp_path, fields):
    config = tiny.make_config(*fields)
    tiny.train(tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "run", config, stop_after=13)
    tiny.train(tmp_path / "run", config)
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole", config)
