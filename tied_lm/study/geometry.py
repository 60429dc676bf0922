"""How the vocabulary matrices of a checkpoint lie in space, and how far they have come, as tables."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from tied_lm.bands import NAMES, bands_of
from tied_lm.data.sources import Stream
from tied_lm.model.geometry.arrays import by_band
from tied_lm.model.geometry.likeness import Comparison
from tied_lm.model.geometry.matrix import measure_matrix
from tied_lm.model.geometry.movement import common_drift, drifts, measure_drift
from tied_lm.model.geometry.predictions import Predictions, measure_predictions
from tied_lm.train.evaluation import hidden
from tied_lm.train.step import Trainer

Matrix = Float[np.ndarray | Array, "V D"]


def geometry_rows(
    matrices: Mapping[str, Matrix],
    frequencies: Float[np.ndarray, "V"] | None = None,
    starts: Mapping[str, Matrix] | None = None,
) -> list[list[str]]:
    """A table of matrices by name, one column each.

    Args:
        frequencies: of the rows, for what is told by band.
        starts: the same matrices before training.
    """
    columns = [_column(matrix, frequencies, None if starts is None else starts[n]) for n, matrix in matrices.items()]
    rows = [["", *matrices]]
    for words in columns[0]:
        rows.append([words, *(_figure(column[words]) for column in columns)])
    return rows


def _column(matrix: Matrix, frequencies: Float[np.ndarray, "V"] | None, start: Matrix | None) -> dict[str, float]:
    found = measure_matrix(matrix, frequencies)
    told = {
        "rows": float(matrix.shape[0]),
        "width": float(matrix.shape[1]),
        "largest singular value": float(found.singular_values[0]),
        "effective rank": found.effective_rank,
        "participation ratio": found.participation_ratio,
        "mean row / mean norm": found.mean_row,
        "isotropy": found.isotropy,
        "mean cosine of two rows": found.mean_cosine,
        **{f"  of band {band}": value for band, value in found.mean_cosine_by_band.items()},
    }
    if frequencies is not None:
        told["norm by log frequency, a nat"] = found.norm_slope
    if start is not None:
        cosine_V = measure_drift([start, matrix]).cosine_to_start
        told["cosine of a row to its start"] = float(np.nanmean(cosine_V)) if not np.isnan(cosine_V).all() else np.nan
        if frequencies is not None:
            bands_V = bands_of(frequencies)
            told |= {f"  in band {band}": x for band, x in by_band(cosine_V, bands_V).items()}
            common = common_drift(np.asarray(matrix) - np.asarray(start), bands_V).cosine_by_band
            told |= {f"cosine of a row's move with that of the rest of band {band}": x for band, x in common.items()}
    return told


def _figure(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 1 else f"{value:.4f}"


DRIFT = {  # the fields of Drift as the columns of a table
    "cosine_to_start": "cosine to the start",
    "displacement": "displacement",
    "cosine_to_previous": "cosine to the step before",
    "distance_to_previous": "way from there",
    "path": "path",
    "straightness": "displacement / path",
}


def drift_rows(matrices: Iterable[tuple[int, Matrix]]) -> list[list[str]]:
    """A table of how far the rows of a matrix have come at each step, and whether straight: means over the rows.

    Args:
        matrices: the same one at several steps, with the step, the first one first.
    """
    rows, steps = [["step", *DRIFT.values()]], list[int]()

    def one_by_one() -> Iterator[Matrix]:
        for step, matrix in matrices:
            steps.append(step)
            yield matrix

    for found in drifts(one_by_one()):
        columns = [getattr(found, field) for field in DRIFT]
        means = [values_V[~np.isnan(values_V)] for values_V in columns]
        rows.append([f"{steps[-1]:,}", *(_figure(float(v.mean()) if v.size else np.nan) for v in means)])
    return rows


def common_drift_rows(matrices: Iterable[tuple[int, Matrix]], bands: Int[np.ndarray, "V"]) -> list[list[str]]:
    """A table of whether the rows of each band have moved together since the step before: the mean cosine of a row's
    move with that of the rest of its band.

    Args:
        matrices: as in `drift_rows`.
        bands: of the rows.
    """
    rows = [["step", *(f"band {NAMES[band]}" for band in np.unique(bands))]]
    for (_, before), (step, now) in itertools.pairwise(matrices):
        found = common_drift(np.asarray(now) - np.asarray(before), bands).cosine_by_band
        rows.append([f"{step:,}", *map(_figure, found.values())])
    return rows


def predictions_of(trainer: Trainer, params: PyTree, stream: Stream, most: int | None = None) -> Predictions:
    """What a state predicts on the first held-out batch, or on its first `most` tokens."""
    batch = trainer.config.data.batch_size * trainer.config.data.length
    h_NxD, scoring_VxD, targets_N = jax.device_get(hidden(trainer, params, stream.heldout_ahead(batch)))
    wanted = slice(int(min(batch, stream.heldout_tokens, most or batch)))
    cap = trainer.model.logit_cap
    return measure_predictions(h_NxD[wanted], scoring_VxD, targets_N[wanted], stream.frequencies, soft_cap=cap)


def prediction_rows(found: Predictions) -> list[list[str]]:
    """A table of what is predicted."""
    told = {
        "largest logit, mean": found.largest_logit_mean,
        "largest logit, largest": found.largest_logit_max,
        "log-sum-exp of the logits, mean, nats": found.log_sum_exp_mean,
        "log-sum-exp of the logits, largest, nats": found.log_sum_exp_max,
        "entropy of the predictions, nats": found.entropy,
        "expected calibration error": found.calibration_error,
        "share of p - y in the column space": found.column_space_share,
        "  of a random direction": found.column_space_share_by_chance,
        **{f"mean log(p / f) in band {band}": value for band, value in found.log_ratio_by_band.items()},
    }
    return [[words, _figure(value)] for words, value in told.items()]


def likeness_rows(found: Comparison) -> list[list[str]]:
    """A table of how alike two matrices are, beside the same with the rows of the second permuted."""
    rows = [["", "alike", "rows permuted"]]
    for name, value in found.likeness._asdict().items():
        rows.append([name.replace("_", " "), _figure(value), _figure(getattr(found.permuted, name))])
    return rows
