"""tensorboardX without torch, which it would load, for seconds, wherever it is installed."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

hidden = "torch" not in sys.modules
if hidden:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
try:
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
finally:
    if hidden:
        del sys.modules["torch"]

__all__ = ["Event", "EventsWriter", "Summary", "SummaryMetadata", "described", "summary", "write_events"]


def write_events(folder: Path, name: str, events: Iterable[tuple[int, Any]]) -> None:
    """Write a file of summaries by step, in place of what stands in the folder under the same name."""
    for path in folder.glob(f"events.out.tfevents.*.{name}"):
        path.unlink()
    writer = EventsWriter(str(folder / "events"), filename_suffix=f".{name}")
    for step, values in events:
        writer.write_event(Event(summary=values, step=step, wall_time=time.time()))
    writer.close()


def described(tag: str, plugin: str, about: str, **value: Any) -> Any:
    """A value whose card says what it is."""
    metadata = SummaryMetadata(summary_description=about, plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    return Summary.Value(tag=tag, metadata=metadata, **value)
