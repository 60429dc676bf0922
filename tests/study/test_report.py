"""What the report says and draws."""

import itertools
import re
import shutil
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.cli import report as command
from tied_lm.study.movefigure import Moves
from tied_lm.study.palette import ARM_MARKERS, COLORS, arm_styles
from tied_lm.study.picture import joined
from tied_lm.study.report import write_report
from tied_lm.study.rowfigure import binned
from tied_lm.study.subject import ALL, Subject

FOLDERS = Path(__file__).parents[1] / "folders" / "before_defaults.tar.xz"


def page(place):
    return (place / "report.html").read_text(encoding="utf-8")


def pictures(text):
    """SVG of each picture by its alternative text."""
    return dict(re.findall(r'<svg role="img" aria-label="([^"]+)"(.*?</svg>)', text, re.S))


def colors_by_arm(text):
    """Names of the colours in which each arm is drawn, marks included, anywhere on a page."""
    rules = dict(re.findall(r"\.(m[0-9a-f]{8})\{([^}]*)\}", text))
    found = {}
    for arm, drawn in re.findall(r'<g data-arm="([^"]+)">(.*?)</g>\s*(?=<g|</g)', text, re.S):
        drawn += "".join(rules[name] for name in re.findall(r'class="(m[0-9a-f]{8})"', drawn))
        found.setdefault(arm, set()).update(re.findall(r"var\(--(\w+)", drawn))
    return found


def test_an_arm_has_one_colour_in_all_pictures(comparison):
    text = page(comparison)
    assert colors_by_arm(text) == {"tied": {"arm0"}, "untied": {"arm1"}, "late": {"arm2"}}
    drawn = pictures(text)
    assert len(drawn) == text.count('<svg role="img"') == 3 + 5 + 2 + 2 * 6 + 3 * 4 + 4
    # Nothing is drawn in a colour that does not follow the page's.
    assert not re.findall(r"(?:fill|stroke): ?#", "".join(drawn.values()))
    # The key has the same colours.
    for arm, name in {"tied": "arm0", "untied": "arm1", "late": "arm2"}.items():
        assert set(re.findall(r'var\(--(\w+)\)"[^<]*/>(?:</svg>)' + arm + "</li>", text)) == {name}
    assert not {COLORS[style.color] for style in arm_styles("abc").values()} & {COLORS["lookup"], COLORS["pull"]}


def test_how_the_matrices_lie_is_a_table_of_means_over_seeds(comparison):
    (found,) = re.findall(r"<h2>How the matrices lie</h2>(.*?)</section>", page(comparison), re.S)
    head, *rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", found, re.S)]
    assert [row[0] for row in rows] == [
        "tied",
        "untied, embedding",
        "untied, output",
        "late, embedding",
        "late, output",
    ]
    runs = [open_run(comparison / "untied" / f"seed{seed}") for seed in range(2)]
    for name, row in (("embedding", rows[1]), ("output", rows[2])):
        last = [run.last() for run in runs]
        for title, tag in (("effective rank", "effective_rank"), ("norm by log frequency", "norm_slope")):
            mean = np.mean([line[f"geometry/{name}/{tag}"] for line in last])
            assert float(row[head.index(title)].split()[0]) == pytest.approx(mean, abs=6e-4)
    mean = np.tanh(np.mean([np.arctanh(run.last()["geometry/likeness/spearman"]) for run in runs]))
    assert f"Input and output of untied: rank correlation of the cosines of pairs of rows {mean:.3f} [" in found
    mean = np.mean([run.last()["predictions/calibration_error"] for run in runs])
    assert f"Of what untied predicts: the expected calibration error {mean:.3f} [" in found


def test_more_arms_than_colours_differ_in_their_markers():
    styles = arm_styles([str(k) for k in range(40)])
    assert len({(style.color, style.marker) for style in styles.values()}) == 40
    assert {style.marker for style in styles.values()} == set(ARM_MARKERS)


def test_a_late_untying_is_dotted_from_its_step_on(comparison):
    for key in ("share", "cosine"):
        ((_, drawn),) = [(a, d) for a, d in pictures(page(comparison)).items() if f"{key} in all rows" in a]
        dashed = {
            arm: "stroke-dasharray" in lines for arm, lines in re.findall(r'data-arm="(\w+)">(.*?)</g>', drawn, re.S)
        }
        by_arm = re.findall(r'data-arm="(\w+)">\s*<path d="([^"]*)"[^>]*style="([^"]*)"', drawn)
        dotted = [arm for arm, _, style in by_arm if "dasharray" in style]
        assert dashed
        assert dotted == ["late"]
        # Both of its lines meet at step 9, since a probe falls there: the first ends where the other begins.
        first, second = [path.split() for arm, path, _ in by_arm if arm == "late" and path.startswith("M")][:2]
        assert first[-2:] == second[1:3]
    assert "late at step 9" in page(comparison)


def test_the_split_is_that_of_the_scalars(comparison):
    subject = Subject.of(comparison)
    for arm in ("tied", "late"):
        for run, probed in zip(subject.arms[arm].runs, subject.arms[arm].probed, strict=True):
            for band in (ALL, *subject.bands):
                for key in ("share", "cosine"):
                    tag = f"probe/{'split' if band == ALL else f'band/{band}'}/{key}"
                    written = run.scalars(tag)
                    kept = [k for k, step in enumerate(probed.steps) if int(step) in written]
                    expected = list(written.values())[: len(kept)]
                    np.testing.assert_allclose(probed.split[key][band][kept], expected, rtol=1e-6, equal_nan=True)
    assert subject.arms["tied"].probed[0].followed[-1] == 7


def test_it_says_what_was_trained_and_where_it_comes_from(comparison):
    text = page(comparison)
    words = " ".join(re.sub("<[^>]*>", " ", text).split())
    for part in ("toy stream (law 0: 4 classes", "V = 20", "D = 4", "no body", "2 x 5 = 10 tokens", "39 updates"):
        assert part in words
    assert "adam, constant rate 0.05; seeds 0, 1." in words
    assert "Made by tied_lm" in words
    assert "JAX devices: 1 x cpu" in words
    assert (comparison / "provenance.json").exists()
    assert str(comparison.parent) not in text
    marked = re.findall(r"<tr class=marked><th scope=row>([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>", text)
    assert ("data.vocab_size", "20", "256") in marked
    assert ("compare.arms.late", "model.tying=late_untie scheme.untie_step=9", "-") in marked
    assert "data.zipf_exponent" not in {field for field, *_ in marked}
    assert f"{len(marked)} not the default" in words
    assert words.index("less untied") < words.index("held-out loss")


def test_a_comparison_that_is_not_finished_has_a_page_without_a_verdict(comparison, tmp_path):
    place = tmp_path / "running"
    shutil.copytree(comparison, place)
    (place / "summary.json").unlink()
    shutil.rmtree(place / "late" / "seed1")
    for log in ("probe.zarr", "heldout.zarr"):
        shutil.rmtree(place / "untied" / "seed1" / log)
    (place / "untied" / "seed1" / "manifest.json").unlink()  # which would vouch for them
    (place / "rows.html").unlink(missing_ok=True)
    before = {path for path in place.rglob("*") if path.is_file()}
    write_report(place)
    text = page(place)
    assert "No verdict: 5 of 5 runs here are finished, and 1 not begun." in text
    assert "<th scope=row>tied, seed 1</th><td>39</td><td>39</td>" in text
    assert colors_by_arm(text) == {"tied": {"arm0"}, "untied": {"arm1"}, "late": {"arm2"}}
    assert {path for path in place.rglob("*") if path.is_file()} - before == {place / "rows.html"}
    for log in place.glob("*/seed*/probe.zarr"):
        shutil.rmtree(log)
        (log.parent / "manifest.json").unlink(missing_ok=True)
    write_report(place)  # of runs that have just begun
    assert len(pictures(page(place))) == 3
    for run in place.glob("*/seed*"):
        shutil.rmtree(run)
    write_report(place)
    assert "0 of 0 runs here are finished, and 6 not begun" in page(place)


def test_a_run_has_a_page(comparison, tmp_path, capsys):
    place = tmp_path / "run"
    shutil.copytree(comparison / "tied" / "seed0", place)
    command.main([str(place)], threading.Event())
    assert capsys.readouterr().out == f"Pictures: {place / 'report.html'}\n"
    assert "One run: there is nothing to compare it with." in page(place)
    assert len(pictures(page(place))) == 2 + 3 + 2 + 2 * 6 + 4 + 4


def test_what_is_no_folder_of_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"DIR = .* the folder of a comparison, a sweep or a run"):
        command.main([str(tmp_path)], threading.Event())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_folders_of_before_have_pages(tmp_path, capsys):
    with tarfile.open(FOLDERS) as archive:
        archive.extractall(tmp_path, filter="data")
    for name in ("toy", "sweep", "text"):
        command.main([str(tmp_path / name)], threading.Event())
    assert "Provenance:</b> not known" in page(tmp_path / "toy")
    said = (tmp_path / "sweep" / "sweep.html").read_text(encoding="utf-8")
    assert "Not finished: 0 of 2 points are" in said
    (point,) = re.findall(r'href="(000-[^"]*/report.html)"', said)
    assert (tmp_path / "sweep" / point).exists()
    capsys.readouterr()


def test_rows_in_bins_of_their_rank():
    values = np.random.default_rng(0).normal(size=5000)
    values[::7] = np.nan
    found = binned(values, (0.25, 0.5), bins=12)
    edges = np.exp(np.linspace(0, np.log(5001), 13))
    rank = np.arange(1, 5001)
    assert found.rows.sum() == np.isfinite(values).sum()
    number = -1
    for low, high in itertools.pairwise(edges):
        of = values[(rank >= low * (1 - 1e-12)) & (rank < high * (1 - 1e-12))]
        if np.isfinite(of).any():
            number += 1
            np.testing.assert_allclose(found.quantiles[number], np.nanquantile(of, (0.25, 0.5)))
    assert number == found.rank.size - 1


def test_runs_of_unequal_length_are_joined_at_their_steps():
    steps, values = joined([([0, 2, 4], np.array([1.0, 2.0, 3.0])), ([0, 4, 8], np.array([4.0, 5.0, 6.0]))])
    np.testing.assert_array_equal(steps, [0, 2, 4, 8])
    np.testing.assert_array_equal(values, [[1, 2, 3, np.nan], [4, np.nan, 5, 6]])


def test_how_far_rows_move_is_of_those_that_moved_and_how_many_did_stands_beside_it(tmp_path):
    """By plain gradient descent a row of an untied lookup moves if and only if it is looked up."""
    config = tiny.make_config("model.tying=untied", "optimizer.name=sgd", "train.steps=9", "model.init_std=0.5")
    tiny.train(tmp_path / "run", config)
    run, bands = open_run(tmp_path / "run"), ["0", "3", "4"]
    found, rows = Moves.of(run, bands), run.rows
    looked_up = rows["input_count"].values > 0
    np.testing.assert_array_equal(found.steps, [0, 1, 2, 4, 8, 9])
    assert found.whole["embedding"][:-1, 1] == pytest.approx(looked_up[:-1].mean(axis=1))
    assert (found.whole["output"][:-1, 1] == 1).all()
    assert np.isnan(found.whole["embedding"][-1]).all()  # no update follows the last step
    ratio = rows["update_embedding"].values / rows["weight_embedding"].values
    for k, band in enumerate(bands):
        of_band = looked_up[-2] & (rows["band"].values == int(band))
        expected = np.median(ratio[-2, of_band]), of_band.sum() / (rows["band"].values == int(band)).sum()
        assert found.by_band["embedding"][k] == pytest.approx(expected, nan_ok=True)
