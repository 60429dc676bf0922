"""What TensorBoard shows of all runs of a comparison or a sweep together."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

from tied_lm.model.embedding import count_parameters
from tied_lm.record.reader import Run
from tied_lm.study.hparams import Session, write_sessions
from tied_lm.study.meanruns import write_mean_runs
from tied_lm.study.page import link
from tied_lm.study.plan import Plan
from tied_lm.study.summary import Summary

ADDRESS = "http://localhost:6006/"
# An arm's runs and their mean in one colour, at all points of a sweep: what stands before the seed, if there is one.
COLORS = r"regex:([^/]*)(?:/seed\d+)?$"


def sessions_of(plan: Plan, runs: Mapping[str, Sequence[Run]], point: str = "") -> list[Session]:
    """The runs of a comparison, or of a point of a sweep."""
    sizes = {name: count_parameters(plan.arms[name].trainer.model)["total"] for name in runs}
    return [
        Session(run.folder, name, run.config, sizes[name], point) for name, of_arm in runs.items() for run in of_arm
    ]


def write_board(place: Path, plan: Plan, summary: Summary, runs: Mapping[str, Sequence[Run]]) -> None:
    """Write what TensorBoard shows of a finished comparison beside its runs.

    Args:
        runs: of each arm that did not diverge.
    """
    if not runs or not all("tensorboard" in arm.config.log.writers for arm in plan.arms.values()):
        return
    from tied_lm.study.heatmap import write_heatmaps  # here, since pictures take long to load
    from tied_lm.study.projector import write_projectors

    write_mean_runs(place, summary, runs)
    write_heatmaps(place, runs, {name: summary.arms[name].tied for name in runs})
    write_projectors(place, plan.arms, runs)
    write_sessions([place], sessions_of(plan, runs))


def deep_link(summary: Summary, of_sweep: bool = False) -> str:
    """The address at which TensorBoard shows loss, share and cosine of all arms at once, in a colour for each arm.

    Args:
        summary: of the comparison, or of a point of the sweep: then the means of all points are shown.
    """
    pinned = ["loss/eval", "loss/excess"] if summary.entropy is not None else ["loss/eval"]
    if any(arm.tied for arm in summary.arms.values()):
        pinned += ["probe/split/share", "probe/split/cosine"]
    state = {
        "smoothing": "0",
        "runColorGroup": COLORS,
        "tagFilter": "^(loss/(eval|excess)|probe/(split|band/.*)/(share|cosine)|rows_map/(share|cosine))$",
        "pinnedCards": json.dumps([{"plugin": "scalars", "tag": tag} for tag in pinned], separators=(",", ":")),
    }
    if of_sweep:
        state["runFilter"] = "/mean/"
    return f"{ADDRESS}?{urlencode(state, quote_via=quote)}#timeseries"


def board_line(address: str) -> str:
    """How to see what is on a page in TensorBoard."""
    there = link(address, "loss, share and cosine of all arms")
    return f"<p class=line><b>TensorBoard:</b> <code>tensorboard --logdir .</code> in this folder, then {there}.</p>"
