"""The programs of one arm: updates, records, evaluation, probe."""

from functools import partial

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm import loss_and_gradients, row_stats, split_gradients
from tied_lm.checks import ConfigError
from tied_lm.model.embedding import account_of
from tied_lm.rows import PARTS, RowStats
from tied_lm.train import evaluation, loop
from tied_lm.train.build import build_model, build_stream

ARMS = {
    "tied": (),
    "untied": ("model.tying=untied",),
    "tied, body, clipped and decayed": (
        "model.body=mlp",
        "optimizer.name=adamw",
        "optimizer.weight_decay=0.1",
        "optimizer.vocab_weight_decay=0.2",
        "optimizer.clip_norm=0.3",
    ),
}


@pytest.fixture(scope="module", params=ARMS.values(), ids=ARMS)
def arm(request):
    return tiny.make_config(*request.param)


def advance(config, lengths, record_at=()):
    """The state after dispatches of the given lengths, and what they recorded by step."""
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    state, step, records = trainer.init(np.uint32(config.seed)), 0, {}
    for length in lengths:
        due = [s for s in record_at if step <= s < step + length]
        slots = tiny.slots(trainer, due)
        state, found = trainer.advance(state, stream, np.int32(length), slots, step == 0)
        records |= {s: found.read(i, trainer.model) for i, s in enumerate(due)}
        step += length
    return state, records


# Compiled whole, which is much faster than one operation after the other.
_training_batch = jax.jit(lambda stream, step: stream.batch(step))
_heldout_batch = jax.jit(lambda stream, index: stream.heldout(index))
_row_stats = jax.jit(row_stats, static_argnums=0)
_split_gradients = jax.jit(split_gradients, static_argnums=0)
_loss_and_gradients = jax.jit(partial(loss_and_gradients, rows=False), static_argnums=0)


def batch_of(config, step):
    return _training_batch(build_stream(config), np.int32(step))


def heldout_tokens(config, n):
    """The first n held-out inputs and targets."""
    stream, size = build_stream(config), config.data.batch_size * config.data.length
    batches = [_heldout_batch(stream, np.int32(i)) for i in range(-(-n // size))]
    return (np.concatenate([np.ravel(b[field]) for b in batches])[:n] for field in (0, 1))


def leaves_by_path(tree):
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def log_softmax(logits):
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("length", [7, 13, 39])
def test_the_cut_into_dispatches_changes_no_bit(arm, length):
    expected, one_by_one = advance(arm, [1] * 39, (0, 3, 12, 38))
    lengths = [length] * (39 // length) + [39 % length] * (39 % length > 0)
    state, records = advance(arm, lengths, (0, 3, 12, 38))
    tiny.assert_same_bits(state, expected)
    tiny.assert_same_bits(records, one_by_one)


HYPERPARAMETERS = {
    "cosine, clipped": ("optimizer.schedule=cosine", "optimizer.warmup_steps=7", "optimizer.clip_norm=0.3"),
    "constant, decayed, the vocabulary with its own rate": (
        "optimizer.name=adamw",
        "optimizer.warmup_steps=0",
        "optimizer.weight_decay=0.1",
        "optimizer.vocab_weight_decay=0.23",
        "optimizer.vocab_learning_rate=0.013",
    ),
}


@pytest.mark.slow  # compiled as users do; in a hurry the last bits may differ
@pytest.mark.parametrize("fields", HYPERPARAMETERS.values(), ids=HYPERPARAMETERS)
def test_hyperparameters_as_arguments_give_the_bits_of_constants(fields, monkeypatch):
    config = tiny.make_config("model.body=mlp", "optimizer.learning_rate=0.0371", *fields)
    found, _ = advance(config, [39])
    constant = tiny.new_trainer(config)
    constant.programs = (*constant.programs, "constants")
    monkeypatch.setattr(constant, "_optimizer", lambda values: constant.optimizer)
    none = tiny.slots(constant, [])
    expected, _ = constant.advance(constant.init(np.uint32(0)), build_stream(config), np.int32(39), none, True)
    tiny.assert_same_bits(found, expected)


def test_recording_changes_no_bit(arm):
    plain, _ = advance(arm, [13, 13, 13])
    recorded, records = advance(arm, [13, 13, 13], range(39))
    assert len(records) == 39
    tiny.assert_same_bits(recorded, plain)


def test_every_update_is_counted(arm):
    state, _ = advance(arm, [13, 26])
    counts = [int(leaf) for path, leaf in leaves_by_path(state.opt_state) if path.endswith("count")]
    assert int(state.step) == int(state.window.updates) == 39
    assert counts
    assert set(counts) == {39}


def test_a_record_holds_the_batch_and_the_update_of_its_step(arm):
    model, states = build_model(arm), tiny.trajectory(arm)
    _, records = advance(arm, [13, 13, 13], (0, 1, 14, 38))
    for step, record in records.items():
        params, after = states[step].params, states[step + 1].params
        batch = batch_of(arm, step)
        expected = _row_stats(model, params, batch.inputs, batch.targets)
        largest = max(float(np.max(getattr(expected, part))) for part in PARTS)
        for name in RowStats._fields:
            tolerance = {"input_count": 0, "target_count": 0, "cosine": 1e-4}.get(name, 2e-6 * largest)
            np.testing.assert_allclose(getattr(record.stats, name), getattr(expected, name), rtol=0, atol=tolerance)
        for name in model.vocabulary:
            change = np.asarray(after[name], np.float64) - np.asarray(params[name], np.float64)
            norms = np.linalg.norm(change, axis=-1)
            assert norms.max() > 1e-3
            # The parameters themselves are rounded, so a small change of them is too.
            rounding = 2e-7 * np.sqrt(arm.model.features) * np.abs(after[name]).max()
            np.testing.assert_allclose(record.updates[name], norms, rtol=1e-5, atol=rounding)
            np.testing.assert_allclose(record.weights[name], np.linalg.norm(params[name], axis=-1), rtol=1e-6)
        assert 0 <= float(record.residual) < 1e-5


def test_the_window_sums_losses_and_clipped_updates():
    config = tiny.make_config(*ARMS["tied, body, clipped and decayed"])
    model, states, limit = build_model(config), tiny.trajectory(config), config.optimizer.clip_norm
    losses, norms = [], []
    for step in range(20):
        batch = batch_of(config, step)
        loss, gradients, _ = _loss_and_gradients(model, states[step].params, batch.inputs, batch.targets)
        losses.append(float(loss))
        norms.append(np.sqrt(sum(np.sum(np.square(leaf)) for _, leaf in leaves_by_path(gradients))))
    clipped = sum(norm > limit for norm in norms)
    assert 0 < clipped < 20
    window = advance(config, [1, 6, 13])[0].window
    assert (int(window.updates), int(window.clipped)) == (20, clipped)
    assert float(window.loss) == pytest.approx(sum(losses), rel=1e-6)


def test_a_new_window_starts_afresh():
    config = tiny.make_config()
    trainer, stream = tiny.trainer_of(config), build_stream(config)
    state, _ = advance(config, [5])
    sum_of_five = float(state.window.loss)
    kept, _ = trainer.advance(state, stream, np.int32(2), tiny.slots(trainer, []), False)
    assert int(kept.window.updates) == 7
    assert float(kept.window.loss) > sum_of_five
    state, _ = advance(config, [5])
    fresh, _ = trainer.advance(state, stream, np.int32(2), tiny.slots(trainer, []), True)
    assert int(fresh.window.updates) == 2
    assert float(fresh.window.loss) < sum_of_five


def test_both_arms_see_the_same_batches_and_start_from_the_same_embedding():
    configs = [tiny.make_config("seed=3", *ARMS[name]) for name in ("tied", "untied")]
    (tied, seen), (untied, also_seen) = (advance(config, [13], range(13)) for config in configs)
    assert int(tied.step) == int(untied.step)
    for step in range(13):
        batch = batch_of(configs[0], step)
        for field, ids in (("input_count", batch.inputs), ("target_count", batch.targets)):
            expected = np.bincount(np.ravel(ids), minlength=20)
            np.testing.assert_array_equal(getattr(seen[step].stats, field), expected)
            np.testing.assert_array_equal(getattr(also_seen[step].stats, field), expected)
    starts = [tiny.trainer_of(config).init(np.uint32(3)).params["embedding"] for config in configs]
    tiny.assert_same_bits(*starts)


def test_the_start_depends_on_the_seed():
    trainer = tiny.trainer_of(tiny.make_config())
    a, again, b = (np.asarray(trainer.init(np.uint32(seed)).params["embedding"]) for seed in (0, 0, 1))
    assert np.array_equal(a, again)
    assert not np.isclose(a, b).any()
    assert 0.01 < a.std() < 0.03


def test_one_program_serves_all_lengths_and_seeds():
    config = tiny.make_config()
    trainer = tiny.trainer_of(config)
    advance(config, [1])
    programs = (type(trainer)._advance, type(trainer).init)
    before = [program._cache_size() for program in programs]
    for seed in (0, 1, 2**32 - 1):
        state = trainer.init(np.uint32(seed))
        stream = build_stream(config).with_seed(seed)
        for length, steps, new in ((1, [0], True), (2, [], False), (7, [3, 9], True), (29, list(range(10, 26)), False)):
            state, _ = trainer.advance(state, stream, np.int32(length), tiny.slots(trainer, steps), new)
        assert int(state.step) == 39
    assert [program._cache_size() for program in programs] == before


def test_nothing_is_compiled_after_the_first_run(tmp_path, monkeypatch):
    compiled = []

    def listen(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    losses = set()

    def stop_and_go_on(seed, seconds, rate, decay, clip):
        monkeypatch.setattr(loop, "DISPATCH_SECONDS", seconds)
        fields = {"seed": seed, "data.seed": seed, "optimizer.name": "adamw", "optimizer.clip_norm": clip}
        fields |= {f"optimizer.{name}": decay for name in ("weight_decay", "vocab_weight_decay")}
        fields |= {"optimizer.learning_rate": rate, "optimizer.vocab_learning_rate": rate / 2}
        config = tiny.make_config(*(f"{name}={value}" for name, value in fields.items()))
        trainer, place = tiny.new_trainer(config), tmp_path / f"run{seed}"
        with pytest.raises(loop.Interrupted):
            tiny.train(place, config, stop_after=13, trainer=trainer)
        tiny.train(place, config, trainer=trainer)
        losses.add(tiny.metrics(place)[-1]["loss/eval"])

    stop_and_go_on(1, 0.25, 0.05, 0.1, 1.0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        stop_and_go_on(2, 0.0, 0.05, 0.1, 0.3)
        stop_and_go_on(3, 1e-3, 0.01, 0.1, 0.3)
        stop_and_go_on(4, 1e-2, 0.01, 0.2, 0.3)
        assert not compiled
        assert len(losses) == 4
        jax.jit(lambda x: x + 1)(1.0)
        assert compiled  # the listener hears
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(("name", "tokens"), [("tied", 7), *((name, 17) for name in ARMS)])
def test_the_probe_is_the_split_of_all_its_tokens_at_once(name, tokens):
    arm = tiny.make_config(*ARMS[name])
    params = tiny.trajectory(arm)[20].params
    probe, _ = evaluation.probe(tiny.trainer_of(arm), params, build_stream(arm), tokens)
    inputs, targets = heldout_tokens(arm, tokens)
    split = _split_gradients(build_model(arm), params, inputs, targets)
    assert int(probe.tokens) == tokens
    largest = max(float(np.abs(getattr(split, part)).max()) for part in PARTS)
    for part in PARTS:
        norms = np.linalg.norm(getattr(split, part), axis=-1)
        np.testing.assert_allclose(getattr(probe.stats, part), norms, rtol=0, atol=1e-5 * largest)
    lookup, scoring = (np.asarray(table, np.float64) for table in (split.lookup, split.scoring))
    product = np.linalg.norm(lookup, axis=-1) * np.linalg.norm(scoring, axis=-1)
    dot = np.sum(lookup * scoring, axis=-1)
    np.testing.assert_allclose(probe.stats.cosine * product, dot, rtol=0, atol=1e-5 * product.max())
    np.testing.assert_array_equal(probe.stats.target_count, np.bincount(targets, minlength=20))
    # Every token of a batch is looked up, those without a target that counts included.
    assert np.all(np.asarray(probe.stats.input_count) >= np.bincount(inputs, minlength=20))
    assert int(probe.stats.input_count.sum()) == -(-tokens // 10) * 10


def law(config):
    """log p(next | last) of the toy stream, written down from its definition."""
    data = config.data
    ids = np.arange(data.vocab_size)
    classes, zipf = ids % data.classes, (ids // data.classes + 1.0) ** -data.zipf_exponent
    within = zipf / np.bincount(classes, zipf)[classes]
    shift = (1 - data.reversibility) * data.classes / 4
    angle = 2 * np.pi * (np.arange(data.classes)[None, :] - np.arange(data.classes)[:, None] - shift) / data.classes
    transition = np.exp(3 * np.cos(angle))
    transition /= transition.sum(axis=1, keepdims=True)
    return np.log(transition[classes[:, None], classes[None, :]] * within)


@pytest.mark.parametrize(("tying", "tokens"), [("tied", 23), ("untied", 23), ("tied", 4)])
def test_evaluation_is_that_of_its_tokens(tying, tokens):
    config = tiny.make_config(f"model.tying={tying}")
    trainer, params = tiny.trainer_of(config), tiny.trajectory(config)[20].params
    directed = tiny.make_config(f"model.tying={tying}", "data.reversibility=0.3")
    result = evaluation.evaluate(trainer, params, build_stream(directed), tokens)
    inputs, targets = heldout_tokens(directed, tokens)
    scoring = np.asarray(params["embedding" if tying == "tied" else "output"], np.float64)
    logits = np.asarray(params["embedding"], np.float64)[inputs] @ scoring.T
    nll = -log_softmax(logits)[np.arange(tokens), targets]
    bands = np.asarray(trainer.bands)[targets]
    np.testing.assert_array_equal(np.sum(result.tokens, axis=0), np.bincount(bands, minlength=5))
    np.testing.assert_allclose(np.sum(result.nll, axis=0), np.bincount(bands, nll, minlength=5), rtol=1e-5)
    log_law = law(directed)
    assert float(np.sum(result.law)) == pytest.approx(-np.sum(log_law[inputs, targets]), rel=1e-5)
    # The divergence in each context is exact, not that of the tokens that happened to follow.
    excess = np.sum(np.exp(log_law[inputs]) * (log_law[inputs] - log_softmax(logits)))
    assert float(np.sum(result.excess)) == pytest.approx(excess, rel=1e-4)


def test_scarce_text_is_evaluated_as_far_as_it_goes(tmp_path):
    config = tiny.write_letters(tmp_path)
    stream, trainer = build_stream(config), tiny.trainer_of(config)
    heldout = np.frombuffer(tiny.LETTERS[-21:], np.uint8)
    assert stream.heldout_tokens == 20  # four windows, half a batch
    params = trainer.init(np.uint32(0)).params
    heldout_windows = stream.heldout_ahead(30)
    result = evaluation.evaluate(trainer, params, heldout_windows, 20)
    assert result.excess is None
    assert result.law is None
    table = np.asarray(params["embedding"], np.float64)
    logp = log_softmax(table[heldout[:-1]] @ table.T)
    assert int(np.sum(result.tokens)) == 20
    assert float(np.sum(result.nll)) == pytest.approx(-np.sum(logp[np.arange(20), heldout[1:]]), rel=1e-5)
    probe, _ = evaluation.probe(trainer, params, heldout_windows, 20)
    assert int(probe.tokens) == 20
    np.testing.assert_array_equal(probe.stats.target_count, np.bincount(heldout[1:], minlength=100))


def test_the_account_counts_what_is_allocated(arm):
    trainer = tiny.trainer_of(arm)
    state, account = trainer.init(np.uint32(0)), account_of(trainer.model, trainer.optimizer)
    assert account["parameter_bytes"] == sum(leaf.nbytes for _, leaf in leaves_by_path(state.params))
    assert account["optimizer_bytes"] == sum(leaf.nbytes for _, leaf in leaves_by_path(state.opt_state))
    assert account["total"] * 4 == account["parameter_bytes"]


@pytest.mark.parametrize(
    ("build", "field"), [(build_model, "model.tying"), (build_model, "model.body"), (build_stream, "data.source")]
)
def test_an_unknown_name_is_refused(build, field):
    config = tiny.make_config(f"{field}=other")
    with pytest.raises(ConfigError, match=rf"^{field} = 'other' is not possible; allowed: [^\n]*$"):
        build(config)


@pytest.mark.parametrize("fields", [("data.vocab_size=22",), ("data.vocab_size=21", "data.zipf_exponent=0.5")])
@pytest.mark.parametrize("tying", ["untied", "soft_cap"])
def test_excess_is_the_divergence_from_the_law_in_each_context(tying, fields):
    # 4 classes of 22 or 21 tokens are of unequal size, so that contexts differ in entropy.
    config = tiny.make_config(f"model.tying={tying}", "scheme.soft_cap=2", "data.reversibility=0.4", *fields)
    trainer, rng = tiny.new_trainer(config), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 1, x.shape).astype(np.float32), trainer.init(np.uint32(0)).params)
    result = evaluation.evaluate(trainer, params, build_stream(config), 200)
    inputs, _ = heldout_tokens(config, 200)
    tables = {name: np.asarray(x, np.float64) for name, x in params.items()}
    logits = tables["embedding"][inputs] @ tables.get("output", tables["embedding"]).T
    if tying == "soft_cap":
        logits = 2 * np.tanh(logits / 2)
    log_law = law(config)[inputs]
    divergence = np.sum(np.exp(log_law) * (log_law - log_softmax(logits)), axis=1)
    np.testing.assert_allclose(np.asarray(result.excess), divergence.reshape(-1, 5).sum(axis=1), rtol=1e-5)
    assert float(np.min(result.excess)) > 0


def test_a_centred_matrix_is_centred_by_each_update_and_no_gradient_is_changed():
    plain = tiny.make_config("optimizer.name=sgd")
    config = tiny.make_config("optimizer.name=sgd", "model.tying=centred")
    (state, records), (other, other_records) = advance(config, [1], [0]), advance(plain, [1], [0])
    expected = np.asarray(other.params["embedding"], np.float64)
    expected -= expected.mean(axis=0)
    np.testing.assert_allclose(np.asarray(state.params["embedding"]), expected, atol=1e-7)
    np.testing.assert_array_equal(records[0].stats.scoring, other_records[0].stats.scoring)
    start = np.asarray(tiny.trainer_of(config).init(np.uint32(0)).params["embedding"], np.float64)
    moved = np.linalg.norm(expected - start, axis=1)
    np.testing.assert_allclose(records[0].updates["embedding"], moved, rtol=1e-4)


def test_a_z_loss_is_trained_and_neither_recorded_nor_evaluated():
    plain, z = tiny.make_config("optimizer.name=sgd"), 0.3
    config = tiny.make_config("optimizer.name=sgd", f"loss.z={z}", "model.tying=untied")
    trainer = tiny.trainer_of(config)
    before = trainer.init(np.uint32(0)).params
    table, output = (np.asarray(before[name], np.float64) * 60 for name in ("embedding", "output"))
    params = {"embedding": np.float32(table), "output": np.float32(output)}
    state = trainer.init(np.uint32(0)).replace(params=params)
    batch = batch_of(config, 0)
    inputs, targets = (np.asarray(ids).ravel() for ids in (batch.inputs, batch.targets))
    state, records = trainer.advance(state, build_stream(config), np.int32(1), tiny.slots(trainer, [0]), True)
    h = table[inputs]
    logits = h @ output.T
    log_sum = np.log(np.exp(logits).sum(axis=1))
    asked = np.exp(logits - log_sum[:, None]) * (1 + 2 * z * log_sum[:, None])
    asked[np.arange(targets.size), targets] -= 1
    gradient = asked.T @ h / targets.size
    rate = config.optimizer.learning_rate / (config.optimizer.warmup_steps + 1)
    np.testing.assert_allclose(np.asarray(state.params["output"]), output - rate * gradient, atol=1e-5)
    nll = np.mean(log_sum - logits[np.arange(targets.size), targets])
    np.testing.assert_allclose(float(state.window.loss), nll, rtol=1e-5)
    recorded = records.read(0, trainer.model).stats.scoring
    np.testing.assert_allclose(np.asarray(recorded), np.linalg.norm(gradient, axis=1), rtol=1e-4)
    assert not trainer.has_sum_rule
    assert tiny.trainer_of(plain).has_sum_rule
