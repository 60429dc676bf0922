"""What the variables of a Dataset say of themselves: a long name and a unit."""

from tied_lm.rows import FIELDS, NORM

HYPOTHETICAL = "hypothetical/"
FRACTION = "1"
PLAIN = {  # long name and units of what needs no words about rows
    "loss/train": ("training loss, mean since the last record", "nats / token"),
    "loss/eval": ("held-out loss", "nats / token"),
    "loss/excess": ("held-out loss above the best possible one", "nats / token"),
    "loss/law": ("loss of the true law on the held-out tokens", "nats / token"),
    "loss/perplexity": ("perplexity, exp(held-out loss)", FRACTION),
    "loss/bits_per_byte": ("held-out loss by byte of text", "bits / byte"),
    "optimizer/clipped": ("share of the updates since the last record that were clipped", FRACTION),
    "split/residual": ("|sum of the rows of the scoring gradient| / |gradient|", FRACTION),
    "probe/tokens": ("N of the probe", "tokens"),
    "time/seconds": ("time since the process started the run", "s"),
    "time/ms_per_update": ("time of an update, mean since the last record", "ms"),
    "time/ms_of_evaluation": ("time of the evaluation", "ms"),
    "time/ms_of_probe": ("time of the probe", "ms"),
}
WORDS = {
    "lookup": "norm of the lookup's gradient",
    "scoring": "norm of the scoring's gradient",
    "pull": "norm of the pull",
    "push": "norm of the push",
    "total": "norm of lookup + scoring",
    "other": "norm of the gradient by other uses",
    "share": "lookup's share, |lookup|^2 / (|lookup|^2 + |scoring|^2)",
    "cosine": "cosine of lookup and scoring",
    "input_count": "times looked up",
    "target_count": "times the target",
    "update": "norm of the update from this step to the next",
    "weight": "norm of the weights",
    "loss": "held-out loss",
}
UNITS = {"update": "parameter", "weight": "parameter", "loss": "nats / token"}


def label(name: str) -> dict[str, str]:
    """`long_name` and `units` of a scalar's tag, or of `rows/<field>` and `probe/<field>`."""
    plain = name.removeprefix(HYPOTHETICAL)
    *groups, field = plain.split("/")
    words, units = PLAIN.get(plain, ("", ""))
    if not words:
        words = WORDS.get(field, f"norm of the part {field}")
        units = UNITS.get(field) or (FIELDS[field].kind if field in FIELDS else NORM).units
        words += _of_which(groups)
        if groups[:1] == ["rows_zero"]:
            words, units = f"share of the rows whose {field} is 0", FRACTION
        if field != "loss":
            words += ", over the probe" if groups[:1] == ["probe"] else ", of one batch"
    if name != plain:
        words = f"hypothetical, of two matrices of arbitrary scales: {words}"
    return {"long_name": words, "units": units}


def _of_which(groups: list[str]) -> str:
    """Which rows, or which parameter, the last groups of a tag speak of."""
    if groups in (["rows"], ["probe"]):
        return " of a row"
    if "band" in groups:
        return f" of band {groups[-1]}"
    if "token" in groups:
        return f" of the row {groups[-1]}"
    return f" of {groups[1]}" if groups[:1] == ["grad_norm"] and groups[1:] else " of all rows"
