"""Several processes that do one run together, each with devices of its own: all do the same, the first alone writes."""

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

T = TypeVar("T")

HEARTBEAT_SECONDS = 30  # a process of which the first has heard nothing for so long is taken for dead
MOST_SAID = 4096  # bytes
WAITING_SECONDS = 24 * 3600  # for the first process, which at the end writes pages and summaries alone


def several() -> bool:
    """Whether other processes take part."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether it is this process that writes and speaks."""
    return jax.process_index() == 0


def join(coordinator: str, processes: int, process: int) -> None:
    """Find the other processes, before anything touches a device.

    Args:
        coordinator: host and port of the first process.
        processes: how many there are.
        process: the number of this one, from 0 on. What is "", 0 and -1 comes from the scheduler, as JAX knows it.

    Raises:
        ValueError, RuntimeError: they cannot be found.
    """
    # The interrupts are ours, and are told to the others with each dispatch; JAX would keep them to itself.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator or None,
        processes or None,
        None if process < 0 else process,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=WAITING_SECONDS,
    )


def from_first(compute: Callable[[], T]) -> T:
    """What the first process computes, alone, and tells the others: something that JSON holds. All wait for it."""
    if not several():
        return compute()
    told = json.dumps(compute()).encode() if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(told))))
    data = np.zeros(-(-size // 1024) * 1024, np.uint8)  # few sizes, each of which is compiled
    data[: len(told)] = np.frombuffer(told, np.uint8)
    found: T = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8)[:size]))
    return found


def is_same_in_all(digest: bytes) -> bool:
    """Whether all processes have the same one."""
    if not several():
        return True
    digests = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest, np.uint8)))
    return bool((digests == digests[0]).all())


def what_any_says(text: str) -> str:
    """What the first of the processes that have something to say says; "" where none has. All wait for all."""
    if not several():
        return text
    data = np.zeros(MOST_SAID, np.uint8)
    said = text.encode()[:MOST_SAID]
    data[: len(said)] = np.frombuffer(said, np.uint8)
    texts = np.asarray(multihost_utils.process_allgather(data), np.uint8)
    return next((bytes(one).rstrip(b"\0").decode(errors="replace") for one in texts if one.any()), "")


@jax.jit
def _decide(votes_DxF: Int[Array, "D F"]) -> Int[Array, "2"]:
    """Any wish to stop counts; of the lengths of a dispatch that of the first process."""
    return jax.numpy.stack([votes_DxF[:, 0].max(), votes_DxF[0, 1]])


class Agreement:
    """What all processes of a run do alike, though each has its own clock, and a signal reaches one alone.

    Each says what it wants with each dispatch, and knows what all do once it has waited for the dispatch. One process
    alone agrees with itself at once.
    """

    def __init__(self) -> None:
        self.decided = False, 1  # whether to stop, and how many updates a dispatch has
        self.sharding: NamedSharding | None = None
        if several():
            mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(AxisType.Auto,))
            self.sharding = NamedSharding(mesh, PartitionSpec("device"))

    def is_to_stop(self, stop: threading.Event) -> bool:
        return stop.is_set() if self.sharding is None else self.decided[0]

    def length(self, updates: int) -> int:
        """Of a dispatch, where this process would have it so long."""
        return updates if self.sharding is None else self.decided[1]

    def ask(self, stop: threading.Event, updates: int) -> Array | None:
        """Say whether to stop, and how many updates a dispatch should have; nothing is waited for."""
        if self.sharding is None:
            return None
        shape, own = (jax.device_count(), 2), np.array([[stop.is_set(), updates]], np.int32)
        return _decide(jax.make_array_from_callback(shape, self.sharding, lambda _: own))

    def hear(self, decision: Any) -> None:
        """Take what was decided, on the host."""
        if decision is not None:
            self.decided = bool(decision[0]), int(decision[1])
