"""What TensorBoard shows of a run: scalars, histograms of row norms, and text."""

import contextlib
import math
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
from jaxtyping import Int

from tied_lm.files import Damaged, replace
from tied_lm.record.cards import Card, card_of, histogram_card
from tied_lm.record.events import Event, EventsWriter, Summary, described, summary
from tied_lm.record.histogram import EDGES
from tied_lm.record.writer import Writer


def _masked(data: bytes) -> int:
    """The checksum of a record's parts, as TFRecord masks it."""
    crc = crc32c.crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def cut_events(path: Path, first_step: int) -> set[str]:
    """Rewrite an event file without the events from `first_step` on, and without a torn end; the tags that are left.

    So no step stands in a run twice, whichever way TensorBoard reads it.
    """
    tags: set[str] = set()
    data = path.read_bytes()
    kept, position = bytearray(), 0
    while position + 12 <= len(data):
        # A record is its length (8 bytes), the length's checksum (4), the event, and the event's checksum (4).
        (size,) = struct.unpack_from("<Q", data, position)
        end = position + 16 + size
        checks = [(position, position + 8)] + [(position + 12, end - 4)] * (end <= len(data))
        if any(struct.unpack_from("<I", data, stop) != (_masked(data[start:stop]),) for start, stop in checks):
            raise Damaged(f"{path} is damaged (a checksum differs); remove it to continue without its curves")
        if end > len(data):
            break
        event = Event.FromString(data[position + 12 : end - 4])
        if not event.HasField("summary") or event.step < first_step:
            kept += data[position:end]
            tags.update(value.tag for value in event.summary.value)
        position = end
    replace(path, bytes(kept))
    return tags


class Board(Writer):
    """Writes the events of one run. Events are written when they are added; `flush` hands them to the disk."""

    def __init__(self, folder: Path, first_step: int, label: str = ""):
        """Open it, and cut off everything from `first_step` on.

        Args:
            label: part of the name of the event file, in a folder where others write events that are not to be cut.
        """
        self.told: set[str] = set()  # tags whose cards say already what they are
        for path in folder.glob(f"events.out.tfevents.*{label}.????????"):
            if first_step:
                self.told |= cut_events(path, first_step)
            else:
                path.unlink()
        # tensorboardX's own writer has a queue that a flush does not empty; its file writer has none. The suffix
        # keeps two writers that open within one second from sharing a file.
        self.folder, self.label = folder, label
        self.strings: Mapping[str, str] = {}
        self.cards: dict[str, Card] = {}  # of the tags that were written
        self.writer = EventsWriter(str(folder / "events"), filename_suffix=f"{label}.{uuid.uuid4().hex[:8]}")

    def _add(self, step: int, *summaries: Any) -> None:
        merged = summary.Summary(value=[value for s in summaries for value in s.value])
        self.writer.write_event(Event(summary=merged, step=step, wall_time=time.time()))

    def name_tokens(self, strings: Mapping[str, str]) -> None:
        self.strings = strings

    def _value(self, card: Card, plugin: str, **value: Any) -> Any:
        """A value on its card, which says what it is the first time."""
        if card.tag in self.told or not card.about:
            return Summary.Value(tag=card.tag, **value)
        self.told.add(card.tag)
        return described(card.tag, plugin, card.about, **value)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values by tag, whatever is in the tags; NaN stands for what is undefined, which is not shown."""
        shown = {tag: value for tag, value in values.items() if not math.isnan(value)}
        for tag in shown.keys() - self.cards.keys():
            self.cards[tag] = card_of(tag, self.strings)
        self._add(
            step, Summary(value=[self._value(self.cards[tag], "scalars", simple_value=shown[tag]) for tag in shown])
        )

    def histogram(self, step: int, tag: str, counts: Int[np.ndarray, "bins"]) -> None:
        """Histogram of log10 of the row norms, on fixed edges; nothing where all are 0."""
        filled = np.flatnonzero(counts)
        if not filled.size:
            return
        centres = (EDGES[1:] + EDGES[:-1]) / 2
        low, high = EDGES[filled[0]], EDGES[filled[-1] + 1]
        totals = (low, high, counts.sum(), np.sum(counts * centres), np.sum(counts * centres**2))
        (value,) = summary.histogram_raw(tag, *map(float, totals), EDGES[1:].tolist(), counts.tolist()).value
        self._add(step, Summary(value=[self._value(histogram_card(tag), "histograms", histo=value.histo)]))

    def text(self, tag: str, markdown: str) -> None:
        self._add(0, summary.text(tag, markdown))

    def charts(self, layout: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        lines = {
            category: {
                title: ["Multiline", [card_of(tag, self.strings).tag for tag in tags]] for title, tags in charts.items()
            }
            for category, charts in layout.items()
        }
        self._add(0, summary.custom_scalars(lines))

    def files(self) -> list[Path]:
        """The event files, which only grow."""
        return sorted(self.folder.glob(f"events.out.tfevents.*{self.label}.????????"))

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        try:
            self.writer.close()
        except OSError:
            # What could not be flushed is still in its buffer, and it has left the file open.
            with contextlib.suppress(OSError):
                self.writer._py_recordio_writer.close()
            raise
