"""What is computed on eight devices, against one; run by `test_mesh.py` where there are that many."""

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests import lowering, tiny
from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.cli import compare, evaluate, scale
from tied_lm.config import Data, Mesh
from tied_lm.data.toy import ToyStream
from tied_lm.files import Damaged
from tied_lm.model import likelihoods, loss
from tied_lm.model.geometry.likeness import pair_spearman
from tied_lm.model.mesh import ONE_DEVICE, Layout
from tied_lm.model.schemes import SCHEMES
from tied_lm.study.plan import Arm
from tied_lm.train import digest, evaluation
from tied_lm.train.build import build_mesh, build_stream
from tied_lm.train.checkpoint import Checkpoints
from tied_lm.train.geometry import PAIRS
from tied_lm.train.loop import Interrupted, train_run
from tied_lm.train.step import Trainer, TrainState, Window

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(")


def layout_of(shape, vocab_size):
    axes = (jax.sharding.AxisType.Auto,) * 2
    return Layout(jax.make_mesh(shape, ("data", "vocab"), axis_types=axes), vocab_size)


def make(N, V, D, seed=0):
    rng = np.random.default_rng(seed)
    h, scoring = rng.standard_normal((N, D), np.float32), rng.standard_normal((V, D), np.float32)
    targets = np.minimum(rng.zipf(1.3, N) - 1, V - 1).astype(np.int32)
    weights = (rng.random(N) < 0.8).astype(np.float32)
    targets = np.where(weights > 0, targets, rng.choice([-1, V, 2**31 - 1], N)).astype(np.int32)
    return h, scoring, targets, weights / weights.sum()


def assert_near(found, true, what=""):
    assert_allclose(found, true, rtol=0, atol=1e-5 * max(np.abs(true).max(), 1e-30), err_msg=what)


# Every pair of mesh and options, and of options and number of rows.
CASES = [
    ((8, 1), 1023, 2, {}),
    ((4, 2), 1023, 3, {"soft_cap": 3.0, "z_loss": 0.05}),
    ((2, 4), 1023, 1, {"compute_dtype": jnp.bfloat16}),
    ((1, 8), 1023, 3, {"marks": True, "soft_cap": 3.0}),
    ((4, 2), 9, 0, {}),
    ((1, 8), 9, 0, {"soft_cap": 3.0, "z_loss": 0.05}),  # five devices have padding alone
    ((2, 4), 9, 2, {"marks": True}),
    ((2, 4), 50, 0, {"marks": True, "z_loss": 0.05}),
]


@pytest.mark.parametrize(("shape", "V", "blocks", "options"), CASES, ids=str)
def test_the_loss(shape, V, blocks, options, monkeypatch):
    for module in (loss, likelihoods):
        monkeypatch.setattr(module, "block_count", lambda *_: max(blocks, 1))
    monkeypatch.setattr(loss, "is_narrow", lambda *_: blocks == 0)
    h, scoring, targets, weights = make(256, V, 12)
    marks = (targets % 3 == 0).astype(np.float32) if options.pop("marks", False) else None
    layout = layout_of(shape, V)

    @partial(jax.jit, static_argnames="layout")
    def compute(scoring, h, targets, weights, marks, layout):
        return loss.vocabulary_loss(h, scoring, targets, weights, marks_N=marks, layout=layout, **options)

    one = compute(scoring, h, targets, weights, marks, layout=ONE_DEVICE)
    many = compute(layout.padded(scoring), h, targets, weights, marks, layout=layout)
    assert_array_equal(np.asarray(many.scoring)[V:], 0)
    assert_array_equal(np.asarray(many.expected)[V:], 0)
    for name, true in one._asdict().items():
        found = getattr(many, name)
        assert (true is None) == (found is None)
        if true is not None:
            found = found[:, :V] if name == "expected_parts" else found[:V] if found.shape[0] == layout.rows else found
            assert_near(found, true, name)
    # An id outside the vocabulary, that of a padded row too, makes its token NaN.
    lost = np.isnan(compute(layout.padded(scoring), h, targets, jnp.ones_like(weights), marks, layout=layout).nll)
    assert_array_equal(lost, (targets < 0) | (targets >= V))


@pytest.mark.parametrize(("shape", "V", "soft_cap"), [((4, 2), 1023, None), ((2, 4), 1023, 3.0), ((1, 8), 9, 3.0)])
def test_likelihood_and_law(shape, V, soft_cap, monkeypatch):
    monkeypatch.setattr(likelihoods, "block_count", lambda *_: 3)
    h, scoring, targets, _ = make(256, V, 12)
    law = ToyStream.build(Data(vocab_size=V, classes=7), 0)
    targets, contexts, layout = targets % V, targets[::-1] % V, layout_of(shape, V)

    @partial(jax.jit, static_argnames="layout")
    def compute(scoring, layout):
        options = {"soft_cap": soft_cap, "law": law, "contexts_N": contexts, "layout": layout}
        return likelihoods.likelihood(h, scoring, targets, **options)

    for found, true in zip(compute(layout.padded(scoring), layout), compute(scoring, ONE_DEVICE), strict=True):
        assert_near(found, true)


def collectives(text):
    """Elements and kind of each collective, and whether it is in a loop."""
    found, where = Counter(), ""
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
            where = "once" if header[1] else "in a loop"
        if match := COLLECTIVE.search(line):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found[where, match[2], dims] += 1
    return found


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_in_the_loop_devices_tell_each_other_no_more_than_a_number_for_each_token(shape, monkeypatch):
    N, V, D, blocks = 1536, 1023, 24, 3
    monkeypatch.setattr(loss, "block_count", lambda *_: blocks)
    data, vocab = shape
    layout = layout_of(shape, V)
    inputs = make(N, V, D)
    arguments = inputs[0], layout.padded(inputs[1]), *inputs[2:]
    step = jax.jit(lambda *a: loss.vocabulary_loss(*a, soft_cap=3.0, z_loss=0.1, layout=layout)[:4])
    found = collectives(step.lower(*arguments).compile().as_text())
    tokens, rows = N // data, layout.rows // vocab
    in_loop = {("in a loop", "all-reduce", f"{tokens // blocks}"): 2}  # the largest logit, the sum of exponentials
    of_targets = {("once", "all-reduce", f"{tokens}"): 1, ("once", "all-reduce", f"{tokens},{D}"): 1}
    tables = {("once", "all-reduce", f"{rows},{D}"): 2} if data > 1 else {}
    assert found == in_loop | of_targets | tables


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 2), (1, 8)])
def test_an_update_gathers_no_table_and_sums_three_once_and_as_many_for_a_record(shape):
    data, vocab = shape
    V, D, N = 1023, 24, 8 * 36
    fields = [f"data.vocab_size={V}", "data.batch_size=8", "data.length=36", f"model.features={D}"]
    config = tiny.make_config(*fields, f"mesh.data={data}", f"mesh.vocab={vocab}")
    trainer, stream = trainer_on(config), build_stream(config)
    inputs = trainer.init(np.uint32(0)), stream, np.int32(2), tiny.slots(trainer, [0]), True
    found = collectives(Trainer._advance.lower(trainer, trainer.values, *inputs).compile().as_text())
    records = f"{trainer.slots + 1},10,{trainer.model.layout.rows}"  # vectors of V for each slot, fetched at the end
    sizes = {key: np.prod([int(n) for n in key[2].split(",") if n]) for key in found if key[2] != records}
    table = 1024 // vocab * D
    # Nothing is gathered but numbers of rows.
    assert max(size for key, size in sizes.items() if key[1] != "all-reduce") <= 1024 < N // data * D
    assert max(sizes.values()) <= max(table if data > 1 else 0, 2 * N // data * D)
    # Of the lookup, and in the loss the two of `expected` and of `scoring`; in the record those of `Tables`.
    tables = f"{1024 // vocab},{D}"
    assert sum(n for key, n in found.items() if key[2] == tables) == (6 if data > 1 else 0)
    assert data == 1 or 4 * 3 * table == scale.record_bytes(V, D, data, vocab)


MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
KINDS = ["adamw", "sgd", "momentum", "muon", "coupled_adam"]
SHAPES = [("mlp",), ("transformer", "body.heads=2"), ("lstm",)]
# Those that the runs below have not, and in which rows are not simply one matrix.
NAMES = ["untied", "projection", "path_weights", "gated_rare_rows", "factorised", "spd_pair"]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_updates_evaluation_and_probe(index):
    """Schemes with each body, optimizer and mesh in turn, after three updates."""
    (body, *options), kind = SHAPES[index % 3], KINDS[index % 5]
    fields = [f"model.tying={NAMES[index]}", f"model.body={body}", f"optimizer.name={kind}", "scheme.factor_features=3"]
    # A small rate, since Adam makes of the rounding of a small gradient the sign of a step.
    small = ["data.vocab_size=21", "data.batch_size=8", "optimizer.learning_rate=0.001", *options]
    config, shape = tiny.make_config(*fields, *small), MESHES[index % 4]

    def results(config):
        trainer, stream = trainer_on(config), build_stream(config)
        state, records = trainer.advance(
            trainer.init(np.uint32(0)), stream, np.int32(3), tiny.slots(trainer, [1, 2]), True
        )
        evaluated = evaluation.evaluate(trainer, state.params, stream, 90)
        probed, scored = evaluation.probe(trainer, state.params, stream, 88)  # so many for each device of any mesh
        predicted = evaluation.predict(trainer, scored)
        return jax.device_get((trainer.to_host(state), records, evaluated, probed, predicted))

    mesh = Mesh(*shape, "sharded" if index > 3 else "replicated")
    one, many = results(config), results(dataclasses.replace(config, mesh=mesh))
    for (path, true), found in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True):
        what = jax.tree_util.keystr(path)
        assert found.shape == true.shape, what
        if "residual" in what:  # 0 but for rounding
            continue
        if "histograms" in what:
            assert np.abs(found - true).sum() <= 2, what  # of a norm at an edge of a bin
        elif np.issubdtype(true.dtype, np.integer):
            assert_array_equal(found, true, err_msg=what)
        else:
            assert_allclose(found, true, rtol=0, atol=1e-5 * np.abs(true).max(initial=0), err_msg=what)


def cut(state, kept):
    """The values of a state without padding."""
    return jax.tree.map(lambda leaf, true: np.asarray(leaf)[tuple(map(slice, true.shape))], state, kept)


def state_on(layout, step, values):
    """A state of rows and of a body, and the shapes that it keeps."""
    values = jax.tree.map(jnp.array, values)
    params = {"embedding": layout.padded(values["embedding"]), "body": {"kernel": values["kernel"]}}
    opt_state = optax.adam(0.1).init(params)[0]._replace(mu=params)
    window = Window(jnp.float32(step / 3), jnp.int32(1), jnp.int32(step))
    state = TrainState(jnp.int32(step), params, opt_state, window, jnp.uint32(step), {})
    specs = layout.specs(state, ("embedding",), body_in_parts=layout.mesh is not None and layout.mesh.shape["data"] > 2)
    return layout.place(state, specs), layout.kept(state, specs)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"embedding": rng.standard_normal((1023, 6), np.float32), "kernel": rng.standard_normal((3, 16), np.float32)}


def test_checkpoints_are_the_same_whatever_the_mesh(arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "BLOCK", 100)  # some of its blocks lie on two devices
    layouts = [ONE_DEVICE, *(layout_of(shape, 1023) for shape in [(4, 2), (1, 8), (2, 1), (8, 1)])]
    made = [state_on(layout, 3, arrays) for layout in layouts]
    said = [digest.digests(*one) for one in made]
    assert said == said[:1] * len(said)
    for i, (state, kept) in enumerate(made):
        with contextlib.closing(Checkpoints(tmp_path / str(i), 2)) as checkpoints:
            checkpoints.save(state, {"train": {}}, 1.0, kept)
            jax.tree.map(lambda leaf: leaf.delete(), state)
            checkpoints.wait()
            for layout in layouts:
                like, like_kept = state_on(layout, 0, {name: 0 * value for name, value in arrays.items()})
                restored = checkpoints.restore(like, kept=like_kept)
                assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, like)
                true = jax.device_get(state_on(ONE_DEVICE, 3, arrays)[0])
                tiny.assert_same_bits(cut(restored, like_kept), true)
                assert not np.asarray(restored.params["embedding"])[1023:].any()


def test_damage_of_a_checkpoint_of_a_mesh_is_named(arrays, tmp_path):
    layouts = [layout_of((4, 2), 1023), layout_of((1, 8), 1023)]
    (state, kept), *_ = made = [state_on(layout, 3, arrays) for layout in layouts]
    with contextlib.closing(Checkpoints(tmp_path / "whole", 2)) as checkpoints:
        checkpoints.save(state, {"train": {}}, None, kept)
    names = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    named = set()
    for change, (like, like_kept) in zip((lambda data: data[: len(data) // 2], flipped), made, strict=True):
        for name in names:
            place, said = Path(tempfile.mkdtemp(dir=tmp_path)) / "checkpoints", None
            shutil.copytree(tmp_path / "whole", place)
            (place / name).write_bytes(change((place / name).read_bytes()))
            with contextlib.closing(Checkpoints(place, 2, read_only=True)) as checkpoints:
                try:
                    restored = checkpoints.restore(like, step=3, kept=like_kept)
                except Damaged as error:
                    said = str(error)
            if said is None:
                tiny.assert_same_bits(cut(restored, like_kept), cut(state, kept))
            else:
                assert str(place / "3") in said
                named.add(str(name))
    of_values = {str(name) for name in names if name.parts[:3] == ("3", "state", "d")}
    assert named >= of_values | {"3/state/manifest.ocdbt", "3/about/metadata"}


def flipped(data):
    """Bytes with one bit of them changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def trainer_on(config):
    """The trainer of a config on its mesh."""
    return Arm.of(config, build_stream(config), build_mesh(config)).trainer


SPEARMAN = "geometry/likeness/spearman"
RUNS = [
    ((4, 2), "model.tying=late_untie", "model.body=transformer", "body.heads=2", "scheme.untie_step=9"),
    ((1, 8), "model.tying=gated_rare_rows", "optimizer.name=coupled_adam"),
    ((4, 2), "model.tying=centred"),
    ((2, 4), "model.tying=low_rank", "model.body=mlp", "optimizer.name=muon", "optimizer.weight_decay=0.1"),
    ((8, 1), "model.tying=soft_cap", "model.body=lstm", "optimizer.clip_norm=0.1", "loss.z=0.01"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "fields"), [(shape, fields) for shape, *fields in RUNS], ids=str)
def test_a_run(shape, fields, tmp_path, make_config, monkeypatch):
    """Losses and rows are those of one device, and a run goes on where another mesh stopped."""
    small = ("data.vocab_size=21", "data.classes=4", "model.features=4", "data.length=8", "train.steps=24")
    more = ("data.eval_tokens=512", "log.probe_tokens=256", "train.eval_every=8", "optimizer.warmup_steps=2")
    more += ("log.matrices=True",)
    one = make_config(*small, *more, *fields, "optimizer.learning_rate=0.01")
    many = dataclasses.replace(one, mesh=Mesh(*shape, "replicated" if one.model.body == "none" else "sharded"))

    def train(config, name, after=None):
        stop, done = threading.Event(), []

        def progress(updates):
            done.append(updates)
            if after is not None and sum(done) >= after:
                stop.set()

        arm = Arm.of(config, build_stream(config), build_mesh(config))
        train_run(arm.trainer, config, arm.stream, tmp_path / name, stop, progress)
        return open_run(tmp_path / name)

    monkeypatch.setattr("tied_lm.train.loop.DISPATCH_SECONDS", 0.0)
    with pytest.raises(Interrupted):
        train(many, "moved", 10)
    monkeypatch.undo()
    true, found, moved = train(one, "one"), train(many, "many"), train(one, "moved")
    for run in (found, moved):
        for tag in ("loss/eval", "loss/train", "loss/excess"):
            assert list(run.scalars(tag)) == list(true.scalars(tag))
            assert_near(*(np.array(list(one.scalars(tag).values())) for one in (run, true)), tag)
        for name, values in true.rows.items():
            last = np.nanmax(np.abs(values)) or 1
            assert_allclose(run.rows[name], values, rtol=0, atol=2e-4 * last, err_msg=name)
        for name in ("input_count", "target_count"):
            assert_array_equal(run.rows[name], true.rows[name])
        for name in (name for name in true.probe if "_to_start" in name):
            assert_allclose(run.probe[name], true.probe[name], rtol=0, atol=1e-3, err_msg=name)
        names = {tag.split("/")[1] for tag in true.tags() if tag.endswith("/effective_rank")}
        kept = {name: list(run.matrices(name)) for name in names}
        for name in names:
            for (step, matrix), (at, expected) in zip(kept[name], true.matrices(name), strict=True):
                assert_allclose(matrix, expected, rtol=0, atol=1e-4, err_msg=f"{name} {at}")
                assert step == at
        for tag in (tag for tag in true.tags() if tag.startswith(("geometry/", "predictions/"))):
            told = run.scalars(tag)
            if tag == SPEARMAN:  # ranks jump where two cosines are nearly equal: this is held to the run's own matrices
                for (step, first), (_, second) in zip(*kept.values(), strict=True):
                    assert_array_equal(told[step], np.float32(pair_spearman(first, second, PAIRS)), f"{tag} {step}")
            else:
                assert_allclose(list(told.values()), list(true.scalars(tag).values()), atol=2e-3, err_msg=tag)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [*zip(tiny.SEQUENCE_ARMS, [(4, 2), (8, 1)], strict=True)])
def test_text_dropout_and_a_carried_state(name, shape, tmp_path):
    one = tiny.sequences(tmp_path, name, "optimizer.learning_rate=0.001")
    many = dataclasses.replace(one, mesh=Mesh(*shape, "sharded"))
    for config, folder in ((one, "one"), (many, "many")):
        tiny.train(tmp_path / folder, config, trainer=trainer_on(config))
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "again", many, 20, trainer=trainer_on(many))
    tiny.train(tmp_path / "again", many, trainer=trainer_on(many))
    tiny.assert_same_run(tmp_path / "many", tmp_path / "again", many)  # to the bit, on the same mesh
    true, found = (open_run(tmp_path / folder).scalars("loss/eval") for folder in ("one", "many"))
    assert_allclose(list(found.values()), list(true.values()), atol=1e-5)


@pytest.mark.slow
def test_a_comparison_says_the_same_and_its_folder_is_like_any_other(tmp_path, capsys):
    fields = [*tiny.FIELDS, "data.batch_size=8", "compare.seeds=2", "train.steps=12", "optimizer.learning_rate=0.01"]

    def call(main, *arguments):
        main(list(map(str, arguments)), threading.Event())
        return capsys.readouterr()

    def said(place, *mesh):
        out, err = call(compare.main, f"--workdir={tmp_path / place}", *(f"--config.{x}" for x in (*fields, *mesh)))
        return re.sub(r"[\d.]+ ms an update, [^ ]+ \w+ of memory", "", out.partition("\nPictures")[0]), err

    expected, _ = said("one")
    found, _ = said("many", "mesh.data=2", "mesh.vocab=4")
    assert found == expected
    assert "is complete; nothing was changed" in said("many")[1]
    assert json.loads((tmp_path / "many" / "config.json").read_text())["mesh"]["data"] == 2
    one, many = (
        call(evaluate.main, tmp_path / name / "tied" / "seed0").out.split("\n", 1)[1] for name in ("one", "many")
    )
    assert many == one


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["mesh.data=9"], "mesh.data = 9 .*the number of devices there are, 8"),
        (["mesh.data=5"], "mesh.data = 5 .*what divides data.batch_size = 2$"),
        (["mesh.vocab=8", "mesh.body=sharded"], "mesh.body = 'sharded' .*unless mesh.data has several devices"),
        (["mesh.body=sharded"], "mesh.body = 'sharded' .*unless mesh.data has several devices"),
        (
            ["mesh.data=2", "mesh.body=sharded", "model.body=mlp", "model.features=3", "body.width=5"],
            "mesh.body = 'sharded' .*unless a width of the body is a multiple of mesh.data = 2$",
        ),
    ],
)
def test_a_mesh_that_cannot_be(fields, said):
    with pytest.raises(ConfigError, match=said):
        trainer_on(tiny.make_config(*fields))


def test_each_device_has_a_part_of_the_body_and_of_its_moments():
    fields = "model.body=mlp body.width=12 optimizer.name=adam mesh.data=2 mesh.vocab=4 mesh.body=sharded"
    state = trainer_on(tiny.make_config(*fields.split())).init(np.uint32(0))
    found = {
        jax.tree_util.keystr(path): (leaf.shape, leaf.addressable_shards[0].data.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
        if "body" in jax.tree_util.keystr(path) and leaf.ndim
    }
    parts = {"up": {"kernel": ((4, 12), (4, 6)), "bias": ((12,), (6,))}}
    parts["down"] = {"kernel": ((12, 4), (6, 4)), "bias": ((4,), (2,))}
    assert len(found) == 12
    for path, shapes in found.items():
        layer, kind = re.findall(r"\['(\w+)'\]", path)[-2:]
        assert shapes == parts[layer][kind]


@pytest.mark.parametrize(
    ("tying", "body", "shape", "platform"),
    [
        pytest.param(
            *(tying, lowering.BODIES[i % 4], MESHES[(i + i // 4) % 4], ("cuda", "tpu")[i // 8]),
            marks=[pytest.mark.slow] if i else [],
        )
        for i, tying in enumerate(SCHEMES)
    ],
)
def test_programs_are_made_for_other_devices(tying, body, shape, platform, monkeypatch):
    """Every scheme, and every pair of body, mesh and platform."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    fields = f"data.vocab_size=21 mesh.data={shape[0]} mesh.vocab={shape[1]} model.tying={tying} model.body={body}"
    config = tiny.make_config(*lowering.SMALL, *fields.split())
    trainer, stream = trainer_on(config), build_stream(config)
    for text in lowering.lowered(trainer, stream, platform):
        lowering.has_nothing_of_a_cpu(text, tying)
        assert "num_partitions = 8" in text
        assert "all_reduce" in text or shape[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "V"), [((4, 2), 50257), ((1, 8), 12569)])
def test_an_update_takes_what_the_scale_says(shape, V):
    D, length = 64, 128
    sizes = [f"data.vocab_size={V}", "data.batch_size=8", f"data.length={length}", f"model.features={D}"]
    config = tiny.make_config(*sizes, f"mesh.data={shape[0]}", f"mesh.vocab={shape[1]}")
    trainer, stream = trainer_on(config), build_stream(config)
    inputs = trainer.init(np.uint32(0)), stream, np.int32(1), tiny.slots(trainer, []), True
    compiled = Trainer._advance.lower(trainer, trainer.values, *inputs).compile()
    of_records = "jit(_advance)/while/body/cond/branch"  # the loss has branches of its own, by the kind of device
    text = "\n".join(line for line in compiled.as_text().splitlines() if of_records not in line)
    found = sum(
        4 * n * np.prod([int(size) for size in dims.split(",") if size])
        for (where, _, dims), n in collectives(text).items()
        if where == "in a loop"
    )
    assert found == pytest.approx(scale.collective_bytes(V, D, 8 * length, *shape), rel=0.1)
    peak = trainer.peak_bytes(stream.ahead(0, 1))
    assert scale.device_bytes(V, D, 8 * length, *shape) == pytest.approx(peak, rel=0.2)
