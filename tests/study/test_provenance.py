"""Where numbers come from, without saying whose machine it was."""

import json

import pytest

from tied_lm.files import read_json
from tied_lm.study import provenance


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("--workdir=/home/ada/runs/one", "--workdir=…/one"),
        ("--config.data.paths=/srv/a.txt,/srv/b/c.txt", "--config.data.paths=…/a.txt,…/c.txt"),
        ("--config=configs/toy.py:variant", "--config=configs/toy.py:variant"),
        ("--workdir=runs/one", "--workdir=runs/one"),
        ("--workdir=../../ada/one", "--workdir=…/one"),
        ("~/corpus/*.txt", "…/*.txt"),
        ("--config.optimizer.learning_rate=0.003", "--config.optimizer.learning_rate=0.003"),
        ("share = |a|^2 / (|a|^2 + |b|^2); adam / sgd and/or", "share = |a|^2 / (|a|^2 + |b|^2); adam / sgd and/or"),
        (
            "a loss is no longer finite in /home/ada/run/wild/seed0; a lower",
            "a loss is no longer finite in …/seed0; a lower",
        ),
        ("model.tying=tied model.features=64", "model.tying=tied model.features=64"),
    ],
)
def test_a_path_is_cut_to_what_need_not_be_hidden(typed, shown):
    assert provenance.without_places(typed) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["tied-lm compare", "--workdir=/a/b"], "tied-lm compare --workdir=…/b"),
        (["/home/ada/tied_lm/experiments/compare.py"], "python -m experiments.compare"),
        (["/opt/venv/bin/pytest", "-q"], "pytest -q"),
        (["tied-lm compare", "--x=a=1 b=2"], "tied-lm compare '--x=a=1 b=2'"),
    ],
)
def test_the_command_is_as_it_was_typed(arguments, shown):
    assert provenance.command(arguments) == shown


def test_sessions_add_up_whether_or_not_they_end_well(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tied-lm compare", f"--workdir={tmp_path}"])
    with provenance.recorded(tmp_path):
        assert provenance.read_provenance(tmp_path)[0]["seconds"] is None
        ((label, _), (_, when), _) = provenance.told(provenance.read_provenance(tmp_path))
        assert label == "Made by"
        assert "not ended yet" in when
    with pytest.raises(KeyboardInterrupt), provenance.recorded(tmp_path):
        raise KeyboardInterrupt
    sessions = provenance.read_provenance(tmp_path)
    assert [one["seconds"] >= 0 for one in sessions] == [True, True]
    assert "in 2 sessions" in provenance.told(sessions)[1][1]
    text = json.dumps(read_json(tmp_path / provenance.PROVENANCE, "")["sessions"])
    assert str(tmp_path.parent) not in text
    assert sessions[0]["libraries"]["jax"] in text


def test_an_older_folder_says_that_it_is_not_known(tmp_path):
    ((label, said),) = provenance.told(provenance.read_provenance(tmp_path))
    assert (label, said.split(":")[0]) == ("Provenance:", "not known")
