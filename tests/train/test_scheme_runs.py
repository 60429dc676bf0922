"""Whole runs of every tying scheme, and the step at which one matrix becomes two."""

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.data.toy import ToyStream
from tied_lm.model.embedding import account_of
from tied_lm.model.schemes import SCHEMES
from tied_lm.study.plan import Arm
from tied_lm.train import evaluation
from tied_lm.train.build import build_stream
from tied_lm.train.loop import Interrupted
from tied_lm.train.step import Trainer

# The other schemes' runs take no other way than these.
QUICK = {"tied", "untied", "centred", "factorised", "gated_rare_rows", "late_untie", "soft_cap", "spd_pair"}

UNTIE = 17
OPTIONS = {
    "late_untie": (f"scheme.untie_step={UNTIE}",),
    "low_rank": ("scheme.rank=2",),
    "factorised": ("scheme.factor_features=3",),
    "gated_rare_rows": ("scheme.gate_from_rare=0.5",),
    "path_weights": ("scheme.lookup_weight=5",),
    # At 4 of 64 features the logits would be 16 times larger.
    "width_scaled": ("scheme.base_features=8",),
}


def config_of(name):
    # A body, since what the lookup alone asks of one matrix for both uses need not lower the loss without one.
    return tiny.make_config(f"model.tying={name}", "model.body=mlp", *OPTIONS.get(name, ()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SCHEMES]
)
def test_a_run_learns_and_a_stop_changes_no_bit(tmp_path, name):
    config = config_of(name)
    tiny.train(tmp_path / "whole", config)
    run = open_run(tmp_path / "whole")
    losses = run.scalars("loss/eval")
    assert losses[39] < losses[0] - 0.01
    assert ("split/residual" in run.tags()) == (name not in ("soft_cap", "gated_rare_rows"))
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "stopped", config, 15)
    tiny.train(tmp_path / "stopped", config)
    tiny.assert_same_run(tmp_path / "whole", tmp_path / "stopped", config)


def test_the_other_parameters_have_a_norm_for_each_path(tmp_path):
    config = config_of("low_rank")
    tiny.train(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    for name in ("low_rank_rows", "low_rank_columns"):
        assert set(run.scalars(f"grad_norm/{name}/lookup").values()) == {0.0}
    scoring = run.scalars("grad_norm/low_rank_rows/scoring")
    assert list(scoring) == tiny.ROW_STEPS
    assert min(scoring.values()) > 0
    assert set(run.scalars("grad_norm/low_rank_columns/scoring").values()) > {0.0}  # at first the other factor is 0
    assert {"update_embedding", "update_low_rank_rows"} <= set(map(str, run.rows))


def test_the_parts_of_the_push_are_kept(tmp_path):
    config = config_of("gated_rare_rows")
    tiny.train(tmp_path / "run", config)
    run = open_run(tmp_path / "run")
    for rows in (run.rows, run.probe):
        rare = rows["band"].values >= 4
        parts = [rows[f"push_from_{kind}"].values for kind in ("frequent", "rare")]
        assert 0 < rare.sum() < rare.size
        assert all((part >= 0).all() and part.any() for part in parts)
        # The gates: 0.1 and 0.5 for rare rows. The norm of the sum lies within the triangle of its parts.
        assert (rows["push"].values <= sum(parts) * (1 + 1e-5) + 1e-7).all()
        assert parts[0][:, rare].mean() < 0.5 * parts[0][:, ~rare].mean()
    assert run.scalars("band/4/push_from_frequent")
    assert run.scalars("probe/band/4/push_from_rare")


@pytest.fixture(scope="module")
def untied_late(tmp_path_factory):
    place = tmp_path_factory.mktemp("late") / "run"
    tiny.train(place, config_of("late_untie"))
    return place


def states_of(config, steps):
    """The states at some steps, by single dispatches."""
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    state, found = trainer.init(np.uint32(config.seed)), {}
    for step in range(max(steps) + 1):
        if step in steps:
            found[step] = jax.device_get(state)
        state, _ = trainer.advance(state, stream, np.int32(1), tiny.slots(trainer, []), step == 0)
    return found


def test_late_untie_is_tied_then_untied():
    late = states_of(config_of("late_untie"), [UNTIE - 1, UNTIE, UNTIE + 1])
    tied = states_of(config_of("tied"), [UNTIE - 1, UNTIE, UNTIE + 1])
    # Up to the step, both matrices are the one of plain tying, with its moments.
    for step in (UNTIE - 1, UNTIE):
        trees = [[states[step].params, *moments(states[step])] for states in (tied, late)]
        for one, two in zip(*trees, strict=True):
            tiny.assert_same_bits(two, one | {"output": one["embedding"]})
        tiny.assert_same_bits(late[step].window, tied[step].window)
    assert [int(leaf) for leaf in jax.tree.leaves(late[UNTIE].opt_state) if leaf.ndim == 0] == [UNTIE, UNTIE]
    after = late[UNTIE + 1].params
    assert np.abs(after["embedding"] - after["output"]).max() > 1e-4
    # One update later each matrix has had its own gradient: the moments add up to those of the one that stayed.
    first = [moments(states[UNTIE + 1])[0] for states in (late, tied)]
    old = moments(tied[UNTIE])[0]["embedding"]
    both = first[0]["embedding"] + first[0]["output"] - 0.9 * old
    np.testing.assert_allclose(both, first[1]["embedding"], rtol=1e-4, atol=1e-7)


def moments(state):
    """The trees of Adam's first and second moments."""
    return [
        leaf
        for leaf in jax.tree.leaves(state.opt_state, is_leaf=lambda leaf: isinstance(leaf, dict))
        if isinstance(leaf, dict)
    ]


@pytest.mark.parametrize("updates", [UNTIE - 2, UNTIE - 1, UNTIE, UNTIE + 1])
def test_going_on_from_either_side_of_the_untying(untied_late, tmp_path, monkeypatch, updates):
    monkeypatch.setattr("tied_lm.train.loop.DISPATCH_SECONDS", 0.0)
    config = config_of("late_untie")
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "run", config, updates)
    monkeypatch.undo()
    tiny.train(tmp_path / "run", config)
    tiny.assert_same_run(untied_late, tmp_path / "run", config)


def test_what_a_late_untie_leaves_behind(untied_late):
    run = open_run(untied_late)
    before = [step for step in tiny.ROW_STEPS if step < UNTIE]
    after = [step for step in tiny.ROW_STEPS if step >= UNTIE]
    assert list(run.scalars("split/share")) == before
    assert list(run.scalars("hypothetical/split/share")) == after
    rows = run.rows
    for field in ("update", "weight"):
        embedding, output = rows[f"{field}_embedding"], rows[f"{field}_output"]
        np.testing.assert_array_equal(embedding.sel(step=before), output.sel(step=before))
        assert (embedding.sel(step=after[:-1]) != output.sel(step=after[:-1])).any()  # no update follows the last
        assert output.attrs["description"].endswith(f"; before step {UNTIE} of the one matrix, `embedding`")
    assert rows["total"].attrs["hypothetical"].startswith(f"from step {UNTIE} on, ")


def test_a_late_untie_is_compiled_once(tmp_path):
    config = config_of("late_untie")
    trainer = tiny.new_trainer(config)
    before = Trainer._advance._cache_size()
    for seed in (0, 1):
        seeded = tiny.make_config(f"seed={seed}", "model.tying=late_untie", "model.body=mlp", *OPTIONS["late_untie"])
        tiny.train(tmp_path / f"run{seed}", seeded, trainer=trainer)
    assert Trainer._advance._cache_size() <= before + 1  # other tests may have had the same


def test_the_account_of_a_late_untie_is_of_two_matrices():
    config = config_of("late_untie")
    arm = Arm.of(config, ToyStream.build(config.data, 0))
    assert account_of(arm.trainer.model, arm.trainer.optimizer)["vocabulary"] == 2 * 20 * 4
    assert arm.trainer.model.untied_from == UNTIE
    assert arm.disk_bytes() > Arm.of(config_of("tied"), arm.stream).disk_bytes()


@pytest.mark.parametrize("optimizer", ["muon", "coupled_adam", "momentum"])
def test_the_state_of_any_optimizer_is_copied(optimizer):
    fields = ("model.tying=late_untie", "model.body=mlp", f"optimizer.name={optimizer}", *OPTIONS["late_untie"])
    trainer = tiny.new_trainer(tiny.make_config(*fields))
    state = trainer.init(np.uint32(0))
    # Every leaf has values of its own.
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, [np.full(leaf.shape, i, leaf.dtype) for i, leaf in enumerate(leaves)])
    tied, untied = (trainer.model.share((state.params, state.opt_state), step) for step in (UNTIE - 1, UNTIE))
    tiny.assert_same_bits(untied, (state.params, state.opt_state))
    assert jax.tree.structure(tied) == jax.tree.structure(untied)
    of_embedding, of_output, others = {}, {}, []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tied):
        name = jax.tree_util.keystr(path)
        if "['output']" in name:
            of_output[name.replace("output", "embedding")] = np.asarray(leaf)
        elif "['embedding']" in name:
            of_embedding[name] = np.asarray(leaf)
        else:
            others.append(float(np.ravel(leaf)[0]))
    # Rows of `embedding` that no longer score have a second moment each, and start with the one that was all of theirs.
    of_output = {name: np.broadcast_to(leaf, of_embedding[name].shape) for name, leaf in of_output.items()}
    tiny.assert_same_bits(of_embedding, of_output)
    assert len(others) == len(set(others))
    assert len(of_output) == {"muon": 3, "coupled_adam": 3, "momentum": 2}[optimizer]


@pytest.mark.parametrize("name", ["soft_cap", "factorised", "low_rank"])
def test_evaluation_scores_as_the_model_does(name):
    config = tiny.make_config(f"model.tying={name}", "scheme.soft_cap=1.5", "scheme.factor_features=3")
    trainer, stream = tiny.new_trainer(config), build_stream(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), trainer.init(np.uint32(0)).params
    )
    found = evaluation.evaluate(trainer, params, stream, 10)  # one batch
    batch = stream.heldout(0)
    logits = np.asarray(trainer.model.apply({"params": params}, batch.inputs), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nll = -np.take_along_axis(log_p, np.asarray(batch.targets)[..., None], axis=-1)
    assert float(np.sum(found.nll)) == pytest.approx(nll.sum(), rel=1e-5)
