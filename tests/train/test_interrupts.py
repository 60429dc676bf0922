"""An interrupt where no script handles it, as in a notebook: the exact step is saved."""

import signal
import threading

import pytest

from tests import tiny
from tied_lm.record.scalars import is_finished
from tied_lm.train import loop
from tied_lm.train.build import build_stream
from tied_lm.train.interrupts import stopped_by_interrupt
from tied_lm.train.loop import Interrupted, train_run

CONFIG = tiny.make_config()


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Train, and send real interrupts after so many updates."""
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)

    def call(stop, *interrupt_after):
        done, left = 0, list(interrupt_after)

        def progress(updates):
            nonlocal done
            done += updates
            while left and done >= left[0]:
                left.pop(0)
                signal.raise_signal(signal.SIGINT)

        train_run(tiny.trainer_of(CONFIG), CONFIG, build_stream(CONFIG), tmp_path / "run", stop, progress)

    yield call
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_saves_the_exact_step_and_the_run_goes_on(train, tmp_path):
    stop = threading.Event()  # the same one each time, as in a cell that is run again
    for updates in (7, 20):
        with pytest.raises(Interrupted, match=f"^stopped after {updates + 1} updates, all of them saved$"):
            train(stop, updates)
        assert not stop.is_set()
        assert int(tiny.saved_state(tmp_path / "run", CONFIG).step) == updates + 1
    train(stop)
    tiny.train(tmp_path / "whole", CONFIG)
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole", CONFIG)


def test_a_second_interrupt_ends_it_at_once_and_costs_no_bit(train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(threading.Event(), 20, 20)
    train(threading.Event())
    tiny.train(tmp_path / "whole", CONFIG)
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole", CONFIG)


def test_an_interrupt_after_the_last_update_is_not_lost(train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(threading.Event(), 39)
    assert is_finished(tmp_path / "run", 39)


def test_a_handler_of_the_caller_is_left_in_place():
    stop, received = threading.Event(), []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(1))
    try:
        with stopped_by_interrupt(stop):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [1]
    assert not stop.is_set()


def test_another_thread_takes_no_interrupts():
    def look():
        with stopped_by_interrupt(threading.Event()):
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
