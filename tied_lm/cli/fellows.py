"""The end of another process of a run: told in one line, whatever JAX's runtime writes of it past Python."""

import ctypes
import os
import re
import signal
import sys
import threading

from tied_lm.tokenstring import printable

MISSING = "the other processes of this run were not found within five minutes"  # which is JAX's own limit
GONE = "another process of this run has ended; the same command continues"
BEGINS = re.compile(rb"[EF]\d{4} .*(coordination_service|distributed/client\.h|client\.h:)")
FATAL = b"distributed service detected fatal errors"
CHATTER = re.compile(rb"\[Gloo\]|connected peer ranks")  # its connections; lines of two threads may be mixed

_ending = threading.Lock()
_why = MISSING  # JAX would end the process


def is_told(error: Exception) -> bool:
    """Whether an error says that another process is gone."""
    return type(error).__name__ == "JaxRuntimeError" and re.search(r"gloo|nccl|peer", str(error), re.I) is not None


def end() -> None:
    """End this process, since another one has. The line is said once, by whoever finds out first."""
    _ending.acquire()
    print(printable(f"error: {_why}"), file=sys.stderr, flush=True)
    os._exit(1)


def all_are_here() -> None:
    """Once they have found each other, JAX ends a process for another reason."""
    global _why
    _why = GONE


def listen() -> None:
    """From now on what is written past Python goes through a filter: when JAX ends the process since another one has
    ended, that becomes one line and exit status 1."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        old.flush()
        own = os.fdopen(os.dup(old.fileno()), "w", encoding=old.encoding, errors=old.errors, buffering=1)
        setattr(sys, name, own)
    read, write = os.pipe()
    for descriptor in (1, 2):
        os.dup2(write, descriptor)
    os.close(write)
    threading.Thread(target=_pass_on, args=(read,), daemon=True).start()
    # JAX aborts once it has said why: sleep(SIGABRT) leaves the filter 6 seconds to read it. Any other abort goes on.
    libc = ctypes.CDLL(None)
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


def _pass_on(read: int) -> None:
    held = False
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            if FATAL in line:
                end()
            held = held or BEGINS.match(line) is not None
            if not held and not CHATTER.search(line):
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
