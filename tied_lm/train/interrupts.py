"""Interrupts (Ctrl-C, the stop button of a notebook) as a request to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """Let the first interrupt set `stop`, where it would have raised `KeyboardInterrupt` at any point of the code.

    A second one raises it. If all that was to be done is done before the stop was looked at, the first raises it then.
    In other threads than the main one, and where somebody handles interrupts already, nothing is changed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        stop.set()
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            stop.clear()  # the caller's own, which shall not stop the next run
    if interrupted:
        raise KeyboardInterrupt
