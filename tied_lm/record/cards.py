"""The cards of TensorBoard: what a scalar or histogram is called there, and what the card says of it.

TensorBoard sorts groups by name, so the names are such that what matters comes first: loss, probe, rows, single tokens,
single batches, time, and last what has no meaning.
"""

import dataclasses
from collections.abc import Mapping

HYPOTHETICAL = "hypothetical/"
BATCH = ("grad_norm", "split", "band", "rows_zero", "rows_nonfinite", "optimizer")  # groups of what a single batch says

MEANINGS = {
    "lookup": "L2 norm of the gradient that comes from looking up, nats / parameter",
    "scoring": "L2 norm of the gradient that comes from scoring, nats / parameter",
    "pull": "L2 norm of the part of the scoring gradient that pulls a row to where it is the target, nats / parameter",
    "push": "L2 norm of the part of the scoring gradient that pushes a row from where it is not, nats / parameter",
    "total": "L2 norm of lookup + scoring, nats / parameter",
    "other": "L2 norm of the gradient by any other use, nats / parameter",
    "share": "the lookup's share, |lookup|^2 / (|lookup|^2 + |scoring|^2), 0 to 1",
    "cosine": "cosine of the lookup's and the scoring's gradient, -1 to 1; below 0 they pull against each other",
    "residual": "length of the sum of the scoring gradient's rows over that of the gradient, which is rounding; 1",
    "rows_nonfinite": "rows with a statistic that is not finite, of a single batch",
    "loss": "held-out loss on the tokens of the band, nats a token",
    "clipped": "share of the updates since the last record whose gradient was clipped, 0 to 1",
    "loss/train": "training loss, mean since the last record, nats a token",
    "loss/eval": "held-out loss, nats a token",
    "loss/excess": "how far the held-out loss lies above the best possible one (a divergence), nats a token",
    "loss/law": "loss of the true law on the same held-out tokens, nats a token",
    "loss/perplexity": "exp(held-out loss), tokens",
    "loss/bits_per_byte": "held-out loss in bits a byte of text",
    "probe/tokens": "held-out tokens over which the probe sums the gradient",
    "time/seconds": "since the start of the process, seconds",
    "time/ms_per_update": "mean of the updates since the last record, without what else was done, milliseconds",
    "time/ms_of_evaluation": "of the evaluation, milliseconds",
    "time/ms_of_probe": "of the probe, milliseconds",
}
GEOMETRY = {  # of whole matrices; metrics.jsonl has more
    "effective_rank": "exp of the entropy of the singular values (Roy and Vetterli 2007), 1 to D",
    "mean_row": "norm of the mean row over the mean norm of the rows, 0 to 1",
    "mean_cosine": "mean cosine of two different rows, -1 to 1; far above 0 they lie in a cone",
    "norm_slope": "slope of the norm of a row against the log of its frequency, parameter / nat",
    "cosine_to_start": "mean cosine of a row with itself at step 0, -1 to 1",
    "spearman": "rank correlation of the cosines of pairs of rows in the one and the other, -1 to 1; 5,000 pairs",
    "cka": "linear centred kernel alignment of the two (Kornblith et al. 2019), 0 to 1",
}
PREDICTIONS = {  # of the first 2,048 held-out tokens; metrics.jsonl has more
    "calibration_error": "expected calibration error (Guo et al. 2017) on held-out tokens, 15 bins, 0 to 1",
    "column_space_share": "share of |p - y|^2 inside the column space of the matrix that scores, which is all that "
    "reaches the body and the lookup, 0 to 1; rank / V for a random direction",
}
ROWS_ZERO = "share of the rows whose part is exactly 0, 0 to 1"
LOG10 = "log10 of {} of each row; rows at 0 are left out (rows_zero has their share)"
MEANINGLESS = (
    "Hypothetical: lookup and scoring are gradients of two matrices of arbitrary scales, so it has no meaning. "
)


@dataclasses.dataclass(frozen=True)
class Card:
    """One card."""

    tag: str  # in TensorBoard
    about: str  # unit and meaning; "" for what is not this project's


def _over(parts: list[str], strings: Mapping[str, str]) -> str:
    """Which rows a tag speaks of."""
    if "band" in parts[:-1]:
        band = parts[parts.index("band") + 1]
        return "rows that the training data lack" if band == "unseen" else f"rows of band {band} (0: most frequent)"
    if parts[0] == "grad_norm" and len(parts) == 3:
        return f"the parameter {parts[1]}"
    if "token" in parts[:-1]:
        name = parts[parts.index("token") + 1]
        return f"the row of token {strings.get(name, '')} ({name.replace('_', ', id ')})"
    return "all rows"


def _about(tag: str, strings: Mapping[str, str]) -> str:
    parts = tag.split("/")
    if tag in MEANINGS:
        return MEANINGS[tag]
    group, field = parts[0], parts[-1]
    if group == "geometry" and field in GEOMETRY:
        where = "embedding and output" if parts[1] == "likeness" else f"the matrix {parts[1]}"
        return f"{GEOMETRY[field]}; of {where}"
    if group == "predictions" and field in PREDICTIONS:
        return PREDICTIONS[field]
    if len(parts) == 1 or group not in (*BATCH, "probe", "token"):
        return ""
    if group == "rows_zero":
        return f"{field}: {ROWS_ZERO}; of a single batch"
    if field == "loss":
        return f"{MEANINGS[field]} ({_over(parts, strings)})"
    where = "over the probe of held-out tokens" if group == "probe" else "of a single batch, so mostly sampling noise"
    if field == "clipped":
        return MEANINGS[field]
    return f"{MEANINGS.get(field, f'norm of the part {field}, nats / parameter')}; {_over(parts, strings)}; {where}"


def is_headline(tag: str) -> bool:
    """Whether a scalar of the geometry or of predictions has a card: not one of a band, but of those that say most."""
    parts = tag.split("/")
    if parts[0] == "predictions":
        return len(parts) == 2 and parts[1] in PREDICTIONS
    return len(parts) == 3 and parts[2] in GEOMETRY


def card_of(tag: str, strings: Mapping[str, str]) -> Card:
    """The card of a scalar.

    Args:
        tag: in metrics.jsonl.
        strings: tokens that are followed, as they are shown, by the name of the curve.
    """
    plain = tag.removeprefix(HYPOTHETICAL)
    about = _about(plain, strings)
    if about:
        about = f"{about[0].upper()}{about[1:]}. In Python: `open_run(...).scalars('{tag}')`"
    if plain != tag:
        return Card(f"untied_{tag}", MEANINGLESS + about)
    group, *rest = tag.split("/")
    if group == "band" and rest[-1] == "loss":
        return Card(f"loss/of_band/{rest[0]}", about)
    if group == "geometry":
        return Card(f"rows_{tag}", about)
    if group == "predictions":
        return Card(f"probe_{tag}", about)
    followed = tag.removeprefix("probe/").split("/")
    if followed[0] == "token" and len(followed) == 3:
        _, name, field = followed
        string = strings.get(name, "").replace("/", "∕")  # noqa: RUF001 - a slash would begin a group
        return Card(f"rows_followed/{name} {string}".rstrip() + f"/{field}", about)
    return Card(f"single_batch/{tag}" if group in BATCH else tag, about)


def histogram_card(tag: str) -> Card:
    """The card of a histogram of row norms."""
    plain = tag.removeprefix(HYPOTHETICAL)
    about = LOG10.format(MEANINGS.get(plain.rpartition("/")[2], "the norm, nats / parameter")) + "; of a single batch"
    return Card(tag, about) if plain == tag else Card(f"untied_{tag}", MEANINGLESS + about)
