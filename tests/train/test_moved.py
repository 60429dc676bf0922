"""The folder of a run that is moved, while it trains and afterwards."""

import gc
import threading

import pytest

from tests import tiny
from tied_lm.train import loop
from tied_lm.train.build import build_stream
from tied_lm.train.loop import Interrupted

CONFIG = tiny.make_config()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("whole") / "run"
    tiny.train(place, CONFIG)
    return place


def test_it_goes_on_where_it_was_moved_to(whole, tmp_path):
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "here", CONFIG, stop_after=13)
    (tmp_path / "here").rename(tmp_path / "there")
    tiny.train(tmp_path / "there", CONFIG)
    tiny.assert_same_run(tmp_path / "there", whole, CONFIG)
    (tmp_path / "there").rename(tmp_path / "here")
    tiny.train(tmp_path / "here", CONFIG)
    tiny.assert_same_run(tmp_path / "here", whole, CONFIG)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "updates", [pytest.param(4, marks=pytest.mark.slow), 9, pytest.param(19, marks=pytest.mark.slow), 38]
)
def test_moved_while_it_trains_it_ends_in_a_line_and_goes_on_there(whole, tmp_path, monkeypatch, capfd, updates):
    """At 9, 19 and 38 a checkpoint may be under way."""
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)
    here, there, done = tmp_path / "here", tmp_path / "there", 0

    def progress(more):
        nonlocal done
        done += more
        if done > updates and not there.exists():
            here.rename(there)

    trainer, stream = tiny.trainer_of(CONFIG), build_stream(CONFIG)
    with pytest.raises(OSError, match=rf"^[^\n]*{here}/[^\n]*$"):
        loop.train_run(trainer, CONFIG, stream, here, threading.Event(), progress)
    gc.collect()  # files that could not be closed
    assert "Traceback" not in capfd.readouterr().err
    tiny.train(there, CONFIG)
    tiny.assert_same_run(there, whole, CONFIG)
