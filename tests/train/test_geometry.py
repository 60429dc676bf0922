"""The geometry that a run records: against NumPy on the matrices of the same steps, by hand where rows are sampled."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests import tiny
from tied_lm import geometry, open_run
from tied_lm.bands import bands_of
from tied_lm.train.build import build_stream
from tied_lm.train.geometry import Measure

CONFIG = tiny.make_config("model.tying=untied")


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def mean_of_pairs(rows):
    return (unit(rows) @ unit(rows).T)[np.triu_indices(len(rows), 1)].mean()


@pytest.mark.slow
def test_a_run_tells_how_its_matrices_lie_and_how_far_their_rows_have_come(tmp_path):
    tiny.train(tmp_path / "run", CONFIG)
    run, states, frequencies = open_run(tmp_path / "run"), tiny.trajectory(CONFIG), build_stream(CONFIG).frequencies
    lines = {line["step"]: line for line in run.lines()}
    assert {step for step, line in lines.items() if any(t.startswith("geometry/") for t in line)} == {*tiny.PROBE_STEPS}
    with run.probe as probe:
        for step in (0, 9, 39):
            now = {name: np.asarray(states[step].params[name], np.float64) for name in ("embedding", "output")}
            for name, rows in now.items():
                start, tags = np.asarray(states[0].params[name], np.float64), f"geometry/{name}/"
                found = geometry.measure_matrix(rows, frequencies)
                for field in ("effective_rank", "participation_ratio", "mean_row", "isotropy", "norm_slope"):
                    assert lines[step][tags + field] == pytest.approx(getattr(found, field), rel=1e-3), field
                assert lines[step][tags + "mean_cosine"] == pytest.approx(mean_of_pairs(rows), abs=1e-4)
                last = rows[bands_of(frequencies) == 4]
                assert lines[step][tags + "band/4/mean_cosine"] == pytest.approx(mean_of_pairs(last), abs=1e-4)
                common = geometry.common_drift(rows - start, bands_of(frequencies)).cosine_by_band["4"]
                told = lines[step][tags + "band/4/common_drift"]
                assert told == pytest.approx(common, abs=1e-4, nan_ok=step == 0)
                cosine, distance = np.sum(unit(rows) * unit(start), axis=1), np.linalg.norm(rows - start, axis=1)
                at = probe.sel(step=step)
                np.testing.assert_allclose(at[f"cosine_to_start_{name}"], cosine, atol=1e-4)
                np.testing.assert_allclose(at[f"distance_to_start_{name}"], distance, rtol=1e-3, atol=1e-6)
                assert lines[step][tags + "cosine_to_start"] == pytest.approx(cosine.mean(), abs=1e-4)
                assert lines[step][tags + "distance_to_start"] == pytest.approx(distance.mean(), rel=1e-3, abs=1e-6)
            pairs = [(unit(rows) @ unit(rows).T)[np.triu_indices(20, 1)] for rows in now.values()]
            assert lines[step]["geometry/likeness/spearman"] == pytest.approx(spearmanr(*pairs).statistic, abs=1e-3)
            alike = geometry.compare_matrices(*now.values()).likeness
            assert lines[step]["geometry/likeness/cka"] == pytest.approx(alike.cka, abs=1e-4)


def test_of_many_rows_a_sample_is_measured_and_bands_have_their_own():
    rows, rng = 20_000, np.random.default_rng(0)
    frequencies = 1 / np.arange(1, rows + 1)
    bands = bands_of(frequencies / frequencies.sum())
    table = rng.standard_normal((rows, 4)).astype(np.float32) + np.where(bands == 4, 2, 0)[:, None]
    measure = Measure({"embedding": table}, frequencies, bands)
    assert measure.of["all"].size == 8192
    assert measure.of["4"].size == 2048
    found = measure.scalars(measure.look({"embedding": table}))
    assert found["geometry/embedding/band/1/mean_cosine"] == pytest.approx(mean_of_pairs(table[bands == 1]), abs=1e-5)
    exact = geometry.measure_matrix(table, frequencies)
    assert found["geometry/embedding/mean_cosine"] == pytest.approx(exact.mean_cosine, abs=0.02)
    assert found["geometry/embedding/effective_rank"] == pytest.approx(exact.effective_rank, rel=0.02)
    assert found["geometry/embedding/band/4/mean_cosine"] == pytest.approx(exact.mean_cosine_by_band["4"], abs=0.02)
    assert found["geometry/embedding/cosine_to_start"] == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        ("model.tying=untied", "model.body=transformer", "body.heads=2"),
        ("model.tying=soft_cap", "scheme.soft_cap=2", "data.batch_size=16"),  # the tokens are fewer than one batch
        ("model.tying=factorised", "scheme.factor_features=3", "model.block_tokens=4"),
    ],
)
def test_a_run_tells_what_is_predicted(fields, tmp_path):
    config = tiny.make_config("log.probe_tokens=19", *fields)
    tiny.train(tmp_path / "run", config)
    run, stream, trainer = open_run(tmp_path / "run"), build_stream(config), tiny.trainer_of(config)
    states, size = tiny.trajectory(config), config.data.batch_size * config.data.length
    for step in (0, 9, 39):
        found = {"h": [], "targets": []}
        for index in range(-(-19 // size)):
            batch = stream.heldout(index)
            variables = {"params": states[step].params}
            (h, scoring), _ = trainer.model.apply(variables, batch.inputs, method="hidden", mutable=["carry"])
            found["h"].extend(np.asarray(h, np.float32).reshape(size, -1))
            found["targets"].extend(np.asarray(batch.targets).ravel())
        h, targets = np.array(found["h"][:19]), np.array(found["targets"][:19])
        cap = trainer.model.logit_cap
        expected = geometry.measure_predictions(h, scoring, targets, stream.frequencies, soft_cap=cap)._asdict()
        bands = expected.pop("log_ratio_by_band")
        expected |= {f"band/{band}/log_ratio": value for band, value in bands.items()}
        told = {tag: run.scalars(f"predictions/{tag}")[step] for tag in expected}
        assert told == pytest.approx(expected, rel=2e-4, abs=2e-5)
    assert {*run.scalars("predictions/entropy")} == {*tiny.PROBE_STEPS}
