"""Matrices that a run keeps, if asked: what the state was, whole again after a stop, noticed when damaged."""

import re
import shutil
import threading

import numpy as np
import pytest

from tests import tiny
from tied_lm import geometry, open_run
from tied_lm.bands import bands_of
from tied_lm.cli import geometry as command
from tied_lm.files import Damaged
from tied_lm.study.plan import Arm
from tied_lm.train.build import build_stream

pytestmark = pytest.mark.slow
CONFIG = tiny.make_config("model.tying=untied", "log.matrices=True")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("kept") / "run"
    with pytest.raises(Exception, match="stopped after"):
        tiny.train(place, CONFIG, stop_after=20)
    tiny.train(place, CONFIG)
    return place


def test_they_are_those_of_the_state_at_the_steps_of_the_probe(kept):
    states = tiny.trajectory(CONFIG)
    for name in ("embedding", "output"):
        found = dict(open_run(kept).matrices(name))
        assert list(found) == tiny.PROBE_STEPS
        for step, matrix in found.items():
            np.testing.assert_array_equal(matrix, states[step].params[name])


def test_the_way_of_the_rows_is_told(kept, capsys):
    command.main([str(kept)], threading.Event())
    told = capsys.readouterr().out
    tables = [list(dict(open_run(kept).matrices(name)).values()) for name in ("embedding", "output")]
    bands = bands_of(build_stream(CONFIG).frequencies)
    common = [geometry.common_drift(table[-1] - table[0], bands).cosine_by_band["4"] for table in tables]
    (row,) = re.findall(r"move with that of the rest of band 4 +(\S+) +(\S+)", told)
    np.testing.assert_allclose([float(value) for value in row], common, atol=6e-5)
    told, _, moves = told.partition("The way of output")[2].partition("Cosine of a row's move")
    drift = geometry.measure_drift(matrix for _, matrix in open_run(kept).matrices("output"))
    step, *figures = told.splitlines()[-1].split()
    assert step == "39"
    expected = [drift.cosine_to_start, drift.displacement, drift.cosine_to_previous, drift.distance_to_previous]
    expected += [drift.path, drift.straightness]
    np.testing.assert_allclose([float(figure) for figure in figures], [v.mean() for v in expected], atol=6e-5)
    assert (drift.path >= drift.displacement - 1e-9).all()
    head, *lines = moves.splitlines()[1:]
    assert head.split() == ["step", *(word for band in np.unique(bands) for word in ("band", str(band)))]
    assert [int(line.split()[0]) for line in lines] == tiny.PROBE_STEPS[1:]
    for line, before, now in zip(lines, tables[1][:-1], tables[1][1:], strict=True):
        common = geometry.common_drift(now - before, bands).cosine_by_band
        np.testing.assert_allclose([float(cell) for cell in line.split()[1:]], list(common.values()), atol=6e-5)


def test_damage_is_noticed_and_none_are_kept_by_default(kept, tmp_path):
    place = shutil.copytree(kept, tmp_path / "run")
    path = sorted((place / "matrices").glob("output-*.npy"))[3]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Damaged, match=r"matrices/output-.*is damaged"):
        list(open_run(place).matrices("output"))
    assert len(list(open_run(place).matrices("embedding"))) == len(tiny.PROBE_STEPS)
    path.unlink()
    with pytest.raises(Damaged, match=r"matrices/output-.*is damaged"):
        list(open_run(place).matrices("output"))
    with pytest.raises(FileNotFoundError, match=r"log\.matrices keeps them"):
        list(open_run(place).matrices("other"))
    plain = tiny.make_config("model.tying=untied")
    small, large = (Arm.of(config, build_stream(config)).disk_bytes() for config in (plain, CONFIG))
    held = sum(file.stat().st_size for file in (kept / "matrices").iterdir())
    assert held <= large - small < 60 * held  # mostly the smallest size of a file
