"""Saving and restoring the state."""

import dataclasses
import json
import logging
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.files import Damaged
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.train.step import TrainState, Window

CONFIG = {"train": {"steps": 9}}


def make_state(step, vocab_size=50, dtype=jnp.float32):
    params = {"embedding": jax.random.normal(jax.random.key(step), (vocab_size, 4), dtype)}
    window = Window(jnp.float32(step / 3), jnp.int32(1), jnp.int32(step))
    return TrainState(jnp.int32(step), params, optax.adam(0.1).init(params), window, jnp.uint32(step), {})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def opened(folder):
    """Opens the checkpoints of the folder, and closes them in the end."""
    managers = []

    def open_checkpoints(keep=2):
        managers.append(Checkpoints(folder, keep))
        return managers[-1]

    yield open_checkpoints
    for checkpoints in managers:
        checkpoints.close()


def save(folder, losses, keep=2):
    """Save steps 1, 2, ... with these held-out losses, and tell which steps are left."""
    checkpoints = Checkpoints(folder, keep)
    for step, loss in enumerate(losses, 1):
        checkpoints.save(make_state(step), CONFIG, loss)
        checkpoints.manager.wait_until_finished()
        assert (folder / str(step)).exists()  # the newest is never deleted
    checkpoints.close()
    return sorted(int(path.name) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("losses", "keep", "left"),
    [
        ([3.0, 1.0, 2.0, 2.5, 2.6, 2.7], 2, [2, 5, 6]),
        ([3.0, 1.0, 2.0, 2.5, 2.6, 2.7], 1, [2, 6]),
        ([6.0, 5.0, 4.0, 3.0], 2, [3, 4]),
        ([1.0, 2.0, 3.0, 4.0], 1, [1, 4]),
        ([1.0, None, None, None], 2, [1, 3, 4]),
        ([None, None, 1.0, None, None], 1, [3, 5]),
        ([None, None, None], 2, [2, 3]),
        ([None, None, None], 1, [3]),
    ],
)
def test_the_newest_and_the_best_are_kept(folder, losses, keep, left):
    assert save(folder, losses, keep) == left


def test_the_newest_and_the_best_are_kept_by_another_process(folder):
    save(folder, [3.0, 1.0, 2.0])
    checkpoints = Checkpoints(folder, 2)
    for step in (4, 5):
        checkpoints.save(make_state(step), CONFIG, 2.0 + step)
    checkpoints.close()
    assert sorted(int(path.name) for path in folder.iterdir()) == [2, 4, 5]


def test_the_newest_is_restored_bit_for_bit(folder, opened):
    save(folder, [1.0, 2.0, 3.0])
    restored = opened().restore(make_state(0))
    tiny.assert_same_bits(restored, make_state(3))
    # Else every program would be compiled once more after a resume.
    assert not any(leaf.committed for leaf in jax.tree.leaves(restored))


def test_nothing_to_restore(opened):
    assert opened().restore(make_state(0)) is None


def test_the_config_lies_beside_the_state(folder):
    save(folder, [1.0])
    about = json.loads((folder / "1" / "about" / "metadata").read_text())
    assert about["config"] == CONFIG


def test_the_state_may_be_given_away_while_it_is_saved(opened):
    checkpoints = opened()
    state = make_state(1, vocab_size=50_000)
    copy = jax.device_get(state)
    checkpoints.save(state, CONFIG, None)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    checkpoints.manager.wait_until_finished()
    tiny.assert_same_bits(checkpoints.restore(make_state(0, vocab_size=50_000)), copy)


@pytest.mark.parametrize("step", [2, 3])
def test_a_save_that_orbax_would_skip_is_an_error(folder, opened, step):
    save(folder, [1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match=f"the checkpoint of step {step} was not saved"):
        opened().save(make_state(step), CONFIG, None)


def test_saves_are_silent(folder):
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logger = logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        save(folder, [1.0, None])
        assert not heard
        logger.warning("something of another library")
        assert len(heard) == 1
    finally:
        logger.removeHandler(handler)


def refused(checkpoints, like, *words):
    """Restoring fails with one line that holds these words."""
    with pytest.raises(Damaged) as raised:
        checkpoints.restore(like)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_late_untie_that_was_still_one_matrix_is_refused_by_name(folder, opened):
    checkpoints = Checkpoints(folder, 2)
    checkpoints.save(make_state(1), {"model": {"tying": "late_untie"}}, None)
    checkpoints.close()
    path = folder / "1" / "about" / "metadata"
    about = json.loads(path.read_text())
    for phase in (1, 0):  # as older versions said of their checkpoints
        path.write_text(json.dumps(about | {"phase": phase}))
        if phase:
            tiny.assert_same_bits(opened().restore(make_state(0)), make_state(1))
    refused(opened(), make_state(0), "is of a version that kept one matrix up to scheme.untie_step")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def value_files(step: Path) -> list[Path]:
    """The files that the values of the state lie in."""
    return sorted((step / "state" / "d").iterdir())


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_value_file_is_noticed(folder, opened, damage):
    save(folder, [1.0, 2.0])
    for path in value_files(folder / "2"):
        damage(path)
    checkpoints = opened()
    refused(checkpoints, make_state(0), str(folder / "2"), "remove that folder to continue from step 1")
    shutil.rmtree(folder / "2")
    tiny.assert_same_bits(opened().restore(make_state(0)), make_state(1))


def test_other_values_are_noticed_where_orbax_reads_them(folder, opened):
    save(folder, [1.0, 2.0])
    shutil.rmtree(folder / "2" / "state")
    shutil.copytree(folder / "1" / "state", folder / "2" / "state")
    refused(opened(), make_state(0), str(folder / "2"), "its values are not those that were saved")


@pytest.mark.parametrize("name", ["state/_METADATA", "state/manifest.ocdbt", "about/metadata"])
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_damaged_metadata_are_noticed(folder, opened, damage, name):
    save(folder, [1.0])
    damage(folder / "1" / name)
    refused(opened(), make_state(0), str(folder / "1"), "remove the run's folder to start again")


def test_an_about_without_digest_is_noticed(folder, opened):
    save(folder, [1.0])
    (folder / "1" / "about" / "metadata").write_text("{}")
    refused(opened(), make_state(0), str(folder / "1"))


def test_an_empty_folder_of_a_step_is_noticed(folder, opened):
    save(folder, [1.0, 2.0])
    (folder / "5").mkdir()
    refused(opened(), make_state(0), str(folder / "5"), "continue from step 2")


def test_unreadable_metrics_are_noticed(folder):
    save(folder, [1.0, 2.0])
    truncate(folder / "2" / "metrics" / "metrics")
    with pytest.raises(Damaged, match=rf"^a checkpoint in {folder} has unreadable metrics [^\n]*$"):
        Checkpoints(folder, 2)


@pytest.mark.parametrize(
    "like", [make_state(0, vocab_size=51), make_state(0, vocab_size=49), make_state(0, dtype=jnp.bfloat16)]
)
def test_other_shapes_and_types_are_refused(folder, opened, like):
    save(folder, [1.0])
    refused(opened(), like, str(folder / "1"))


def test_another_structure_is_refused(folder, opened):
    save(folder, [1.0])
    like = make_state(0)
    more = {**like.params, "output": like.params["embedding"]}
    refused(opened(), dataclasses.replace(like, params=more), str(folder / "1"))


def test_what_a_killed_save_leaves_is_no_checkpoint(folder, opened):
    save(folder, [1.0, 2.0])
    left = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", left)
    checkpoints = opened()
    assert checkpoints.manager.latest_step() == 2
    tiny.assert_same_bits(checkpoints.restore(make_state(0)), make_state(2))
    deadline = time.monotonic() + 60  # Orbax removes it in a thread of its own
    while left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_of_a_save_comes_out(folder, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left on device")

    checkpoints = Checkpoints(folder, 2)
    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "_finalize", fail)
        checkpoints.save(make_state(1), CONFIG, None)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.close()
    checkpoints.close()


def test_a_checkpoint_is_found_by_step_last_and_best(folder):
    save(folder, [3.0, 1.0, 2.0, None])
    checkpoints = Checkpoints(folder, 2, read_only=True)
    assert [checkpoints.find(which) for which in ("2", "3", "last", "best")] == [2, 3, 4, 2]
    with pytest.raises(ConfigError, match=r"^step = '1' is not possible; allowed: 2 \| 3 \| 4 \| last \| best$"):
        checkpoints.find("1")
    tiny.assert_same_bits(checkpoints.restore(make_state(0), step=3), make_state(3))
    checkpoints.close()


def test_an_older_checkpoint_that_is_damaged_is_named(folder):
    save(folder, [3.0, 1.0, 2.0])
    for path in (folder / "2" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    checkpoints = Checkpoints(folder, 2, read_only=True)
    with pytest.raises(Damaged, match=f"the checkpoint {folder / '2'} is damaged"):
        checkpoints.restore(make_state(0), step=2)
    tiny.assert_same_bits(checkpoints.restore(make_state(0), step=3), make_state(3))
    checkpoints.close()


def test_to_read_changes_nothing(folder, caplog):
    save(folder, [3.0, 1.0])
    (folder / "3.orbax-checkpoint-tmp").mkdir()  # another process may be saving there
    before = sorted(folder.rglob("*"))
    checkpoints = Checkpoints(folder, 1, read_only=True)
    checkpoints.restore(make_state(0), step=checkpoints.find("last"))
    checkpoints.close()
    assert sorted(folder.rglob("*")) == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_without_checkpoints_has_none_to_find(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", 1, read_only=True)
    with pytest.raises(ConfigError, match="a run with checkpoints; there is none in"):
        checkpoints.find("best")
    checkpoints.close()
    assert not (tmp_path / "none").exists()
