"""How the vocabulary matrices lie in space at the steps of the probe, and what they predict: scalars of what the device
hands out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from tied_lm.bands import NAMES
from tied_lm.model.embedding import Params
from tied_lm.model.geometry.arrays import axes_of_gram, by_band, whitening
from tied_lm.model.geometry.likeness import cka, pair_spearman
from tied_lm.model.geometry.matrix import mean_cosine, measure_matrix, norm_slope
from tied_lm.model.geometry.movement import common_drift
from tied_lm.model.geometry.predictions import predictions_of
from tied_lm.model.mesh import ONE_DEVICE, Layout
from tied_lm.record.slots import Geometry, drift_field
from tied_lm.rows import row_cosine, row_norm
from tied_lm.train.evaluation import Predicted

MOST_ROWS, MOST_OF_BAND = 8192, 2048  # that are measured; of more a sample, the same at every step and in every run
PAIRS = 5000
ROUNDING = 1e-3  # of singular values that come from products in float32, as a part of the largest
ALL = "all"


@functools.partial(jax.jit, static_argnames="layout")
def _look(layout: Layout, params: Params, starts: Params, measured_M: Int[Array, "M"]) -> Geometry:
    drift: dict[str, Array] = {}
    for name, start_PxD in starts.items():
        rows_PxD = params[name]
        drift[drift_field("cosine_to_start", name, starts)] = layout.cut(row_cosine(rows_PxD, start_PxD))
        drift[drift_field("distance_to_start", name, starts)] = layout.cut(row_norm(rows_PxD - start_PxD))
    found = Geometry(drift, {name: params[name][measured_M] for name in starts})
    return layout.place(found, jax.tree.map(lambda _: PartitionSpec(), found))


@functools.partial(jax.jit, static_argnames="layout")
def whole(layout: Layout, tables: Params) -> Params:
    """Copies of matrices without their padding, as every device has them."""
    found = {name: jnp.copy(layout.cut(table_PxD)) for name, table_PxD in tables.items()}
    return layout.place(found, jax.tree.map(lambda _: PartitionSpec(), found))


class Measure:
    """Measures the matrices of one run.

    What is told of a whole matrix is over all rows, or of more than 8,192 over so many, drawn at random; what is told
    of a band is over its rows, or 2,048 of them. Drift is exact.

    Args:
        starts: the vocabulary's matrices at step 0, by name, as they lie on the devices.
    """

    def __init__(
        self,
        starts: Params,
        frequencies: Float[np.ndarray, "V"],
        bands: Int[np.ndarray, "V"],
        layout: Layout = ONE_DEVICE,
    ):
        # Copied, since a state is given away to be overwritten.
        self.starts, self.layout = {name: jnp.copy(start_PxD) for name, start_PxD in starts.items()}, layout
        self.frequencies, self.bands = frequencies, bands
        rng = np.random.default_rng(0)

        def sample(rows_R: Int[np.ndarray, "R"], most: int) -> Int[np.ndarray, "S"]:
            return rows_R if rows_R.size <= most else np.sort(rng.permutation(rows_R)[:most])

        chosen = {ALL: sample(np.arange(bands.size), MOST_ROWS)}
        chosen |= {NAMES[b]: sample(np.flatnonzero(bands == b), MOST_OF_BAND) for b in np.unique(bands)}
        self.measured = functools.reduce(np.union1d, chosen.values())
        self.of = {name: np.searchsorted(self.measured, rows_R) for name, rows_R in chosen.items()}
        self.start_rows: dict[str, np.ndarray] = jax.device_get(self.look(self.starts).rows)

    def look(self, params: Params) -> Geometry:
        """Have the device make what the scalars need, without waiting for it."""
        return _look(self.layout, {name: params[name] for name in self.starts}, self.starts, self.measured)

    def predictions(self, predicted: Predicted) -> dict[str, float]:
        """Scalars of what is predicted, as those of `scalars`."""
        axes = axes_of_gram(np.array(predicted.gram, np.float64))
        told = predictions_of(predicted.seen, self.frequencies, whitening(*axes, ROUNDING))._asdict()
        bands = {f"band/{band}/log_ratio": value for band, value in told.pop("log_ratio_by_band").items()}
        return {f"predictions/{tag}": float(np.float32(value)) for tag, value in (told | bands).items()}

    def scalars(self, seen: Geometry) -> dict[str, float]:
        """Scalars by tag; NaN where one is undefined.

        They are rounded to float32, so that a run which goes on in another process, where sums in float64 may come out
        otherwise in their last bits, writes the same.
        """
        found: dict[str, float] = {}
        for name, rows_MxD in seen.rows.items():
            told = self._of_matrix(np.asarray(rows_MxD), self.start_rows[name])
            found |= {f"geometry/{name}/{tag}": value for tag, value in told.items()}
            cosine_V = np.asarray(seen.drift[drift_field("cosine_to_start", name, self.starts)], np.float64)
            cosine_V = np.where(cosine_V == 0, np.nan, cosine_V)  # of rows that are 0
            defined = cosine_V[~np.isnan(cosine_V)]
            distance_V = np.asarray(seen.drift[drift_field("distance_to_start", name, self.starts)], np.float64)
            found[f"geometry/{name}/cosine_to_start"] = float(defined.mean()) if defined.size else np.nan
            found[f"geometry/{name}/distance_to_start"] = float(distance_V.mean())
            for band, value in by_band(cosine_V, self.bands).items():
                found[f"geometry/{name}/band/{band}/cosine_to_start"] = value
        if len(seen.rows) == 2:
            first, second = (np.asarray(rows_MxD)[self.of[ALL]] for rows_MxD in seen.rows.values())
            found["geometry/likeness/spearman"] = pair_spearman(first, second, PAIRS)
            found["geometry/likeness/cka"] = cka(first, second)
        return {tag: float(np.float32(value)) for tag, value in found.items()}

    def _of_matrix(self, rows_MxD: Float[np.ndarray, "M D"], starts_MxD: Float[np.ndarray, "M D"]) -> dict[str, float]:
        whole_RxD = rows_MxD[self.of[ALL]]
        told = measure_matrix(whole_RxD)
        found = {
            "effective_rank": told.effective_rank,
            "participation_ratio": told.participation_ratio,
            "mean_row": told.mean_row,
            "mean_cosine": told.mean_cosine,
            "isotropy": told.isotropy,
            "norm_slope": norm_slope(whole_RxD, self.frequencies[self.measured[self.of[ALL]]]),
        }
        for band, rows_R in self.of.items():
            if band != ALL:
                found[f"band/{band}/mean_cosine"] = mean_cosine(rows_MxD[rows_R])
                move_RxD, one_band_R = rows_MxD[rows_R] - starts_MxD[rows_R], np.zeros(rows_R.size, int)
                (found[f"band/{band}/common_drift"],) = common_drift(move_RxD, one_band_R).cosine_by_band.values()
        return found
