"""tensorboardX without torch, which it would load, for seconds, wherever it is installed."""

import sys

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

__all__ = ["Event", "EventsWriter", "Summary", "SummaryMetadata", "summary"]
