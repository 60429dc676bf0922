"""How vocabulary matrices lie in space, how they move, how alike two are, and what that means for predictions.

Everything here takes NumPy or JAX arrays and computes in float64 on the host, but for what is N x V, which is taken in
blocks of tokens on the device. What has no value (a cosine with a row of 0, a band of one row) is NaN.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "matrix": "MatrixGeometry effective_rank isotropy mean_cosine measure_matrix norm_slope participation_ratio",
        "movement": "CommonDrift Drift common_drift drifts measure_drift",
        "likeness": "Comparison Likeness cka compare_matrices pair_spearman",
        "predictions": "Predictions measure_predictions",
        "shares": "Shares measure_shares",
    },
)
