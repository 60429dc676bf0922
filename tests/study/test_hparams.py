"""The table of runs in TensorBoard, where arms read different options; no run is trained for it."""

from tests import tiny
from tests.study.test_board import groups_of
from tied_lm.study.hparams import Session, write_sessions

ARMS = {
    "tied": (),
    "low_rank": ("model.tying=low_rank", "scheme.rank=2"),
    "cap": ("model.tying=soft_cap", "scheme.soft_cap=20", "scheme.untie_step=7"),
    "wide": ("model.body=mlp", "body.width=8"),
}


def test_an_option_is_shown_for_the_arms_that_read_it_alone(tmp_path):
    sessions = []
    for name, overrides in ARMS.items():
        (tmp_path / name).mkdir()
        sessions.append(Session(tmp_path / name, name, tiny.make_config(*overrides), 7))
    write_sessions([tmp_path], sessions)
    experiment, groups = groups_of(tmp_path)
    options = {"scheme.rank": "low_rank", "scheme.soft_cap": "cap", "body.width": "wide"}
    assert {info.name for info in experiment.hparam_infos} == {"arm", "model.tying", "model.body", *options}
    assert {group.name for group in groups} == set(ARMS)
    for group in groups:
        shown = {name for name, value in group.hparams.items() if value.WhichOneof("kind") is not None}
        expected = {option for option, arm in options.items() if arm == group.name}
        assert shown == {"arm", "model.tying", "model.body", *expected}
    (rank,) = [group.hparams["scheme.rank"].number_value for group in groups if group.name == "low_rank"]
    assert rank == 2
