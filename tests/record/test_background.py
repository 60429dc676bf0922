"""Work in another thread: its order, its bound, and its errors."""

import threading
import time

import pytest

from tied_lm.record.background import Background


def test_jobs_are_done_in_order():
    done, background = [], Background(2)
    for i in range(50):
        background.submit(done.append, i)
    background.wait()
    assert done == list(range(50))
    background.close()


def test_close_does_what_is_left():
    done, background = [], Background(8)
    background.submit(time.sleep, 0.05)
    background.submit(done.append, 1)
    background.close()
    assert done == [1]
    assert not background.thread.is_alive()


def test_what_waits_is_bounded():
    gate, background = threading.Event(), Background(2)
    submitted = []

    def submit_many():
        for i in range(6):
            background.submit(gate.wait)
            submitted.append(i)

    submitter = threading.Thread(target=submit_many)
    submitter.start()
    time.sleep(0.1)
    assert len(submitted) == 3  # one at work, two waiting
    gate.set()
    submitter.join()
    background.close()


def test_an_error_is_raised_by_the_next_call_and_stops_later_jobs():
    done, background = [], Background(4)
    background.submit(int, "no number")
    background.jobs.join()
    with pytest.raises(ValueError, match="no number"):
        background.submit(done.append, 1)
    with pytest.raises(ValueError, match="no number"):
        background.wait()
    with pytest.raises(ValueError, match="no number"):
        background.close()
    assert done == []
