"""Colours, markers and lines: one style for each arm, each part of the gradient and each matrix, on all pages."""

from collections.abc import Sequence
from typing import NamedTuple

from tied_lm.rows import PARTS

# By the name of a CSS variable: on a light page, and on a dark one. The arms' are Okabe and Ito's, which stay apart for
# colour-blind readers; the parts' are others, so that no part is taken for an arm.
COLORS = {
    "arm0": ("#0072b2", "#56a8f5"),
    "arm1": ("#d55e00", "#ff8a4c"),
    "arm2": ("#009e73", "#34d399"),
    "arm3": ("#cc79a7", "#e9a6cb"),
    "arm4": ("#e69f00", "#f5c04a"),
    "arm5": ("#56b4e9", "#a5dcff"),
    "arm6": ("#1a1a1a", "#f2f2f2"),
    "lookup": ("#7a28a8", "#c893f7"),
    "scoring": ("#4d7c0f", "#a3d93c"),
    "pull": ("#a16207", "#e3b341"),
    "push": ("#be185d", "#f77fb4"),
    "total": ("#64748b", "#9fb0c6"),
    "ink": ("#222222", "#e6e6e6"),
    "muted": ("#5c5c5c", "#a8a8a8"),
    "grid": ("#e4e4e4", "#3a3a3a"),
    "paper": ("#fffffe", "#161618"),
    "mark": ("#fff3bf", "#4a3f10"),
    "link": ("#0b57d0", "#8ab4f8"),
}
ARM_COLORS = [name for name in COLORS if name.startswith("arm")]
ARM_MARKERS = "os^DvPX"
PART_MARKERS = dict(zip(PARTS, "^sPXo", strict=True))
MATRICES = {"embedding": "-", "output": "--"}
OTHER_MATRIX = "-."
HYPOTHETICAL = ":"  # the line of what has no meaning any more, after a late untying


class Style(NamedTuple):
    """How a thing is drawn."""

    color: str  # the name of one of the colours
    marker: str
    line: str = "-"

    @property
    def light(self) -> str:
        """The colour on a light page."""
        return COLORS[self.color][0]


def arm_styles(arms: Sequence[str]) -> dict[str, Style]:
    """The style of each arm, by its place among all arms of the comparison, those without a result too."""
    count = len(ARM_COLORS)
    # Beyond seven arms the colours come again, with other markers.
    return {
        arm: Style(ARM_COLORS[k % count], ARM_MARKERS[(k + k // count) % len(ARM_MARKERS)])
        for k, arm in enumerate(arms)
    }


def part_style(part: str) -> Style:
    """The style of a part of the gradient."""
    return Style(part, PART_MARKERS[part])


def css() -> str:
    """The colours as variables, for light and dark screens; on paper they are the light ones."""
    light, dark = (";".join(f"--{name}:{pair[k]}" for name, pair in COLORS.items()) for k in (0, 1))
    return (
        f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )
