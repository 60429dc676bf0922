"""Whole runs on real text: no cut into dispatches changes them, and what their losses amount to."""

import math

import jax
import numpy as np
import pytest

from tests import tiny
from tied_lm import open_run
from tied_lm.data import text as textstream
from tied_lm.study.plan import Arm
from tied_lm.train import loop
from tied_lm.train.build import build_stream
from tied_lm.train.loop import Interrupted

VOCABULARIES = {"bytes": 256, "words": 8, "bpe": 280}
LINES = ["the cat sat on the mat\n", "a cat\n", "\n", "the mat sat\n"]


def text_config(folder, tokenizer, *overrides):
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("".join(rng.choice(LINES, 300)))
    return tiny.make_config(
        "data.source=text",
        f"data.tokenizer={tokenizer}",
        f"data.vocab_size={VOCABULARIES[tokenizer]}",
        f"data.paths={folder / 'text.txt'}",
        *overrides,
    )


def test_no_cut_into_dispatches_changes_a_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(textstream, "TOKENS_AHEAD", 2 * 6 * 4)
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 1e9)
    config = text_config(tmp_path, "words", "data.order=contiguous")
    assert build_stream(config).most_updates == 4
    tiny.train(tmp_path / "whole", config)
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 0.0)
    with pytest.raises(Interrupted):
        tiny.train(tmp_path / "stopped", config, 13)
    tiny.train(tmp_path / "stopped", config)
    tiny.assert_same_run(tmp_path / "stopped", tmp_path / "whole", config)


def test_the_records_are_of_the_batches_of_the_stream(tmp_path):
    config = text_config(tmp_path, "words", "data.order=contiguous")
    tiny.train(tmp_path / "run", config)
    rows = tiny.dataset(tmp_path / "run" / "rows.zarr")
    stream = build_stream(config)
    for k, step in enumerate(tiny.ROW_STEPS):
        ids = np.asarray(stream.ahead(step, 1).tokens[0])
        np.testing.assert_array_equal(rows["input_count"][k], np.bincount(ids[:, :-1].ravel(), minlength=8))


def test_seeds_share_their_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "DISPATCH_SECONDS", 1e-3)
    config = text_config(tmp_path, "words")
    tiny.train(tmp_path / "0", config)
    compiled = []

    def listen(event, _, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        tiny.train(tmp_path / "1", text_config(tmp_path, "words", "seed=1"))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


@pytest.mark.parametrize("tokenizer", VOCABULARIES)
def test_what_the_loss_amounts_to(tmp_path, tokenizer):
    config = text_config(tmp_path, tokenizer)
    tiny.train(tmp_path / "run", config)
    run, stream = open_run(tmp_path / "run"), build_stream(config)
    (loss,) = {run.scalars("loss/eval")[39]}
    if tokenizer == "bytes":
        assert "loss/perplexity" not in run.tags()
    else:
        assert run.scalars("loss/perplexity")[39] == pytest.approx(math.exp(loss), rel=1e-6)
    if tokenizer == "words":
        assert "loss/bits_per_byte" not in run.tags()
    else:
        # Of the very tokens that were evaluated, the first 23.
        targets = np.asarray(stream.heldout_ahead(23).tokens)[..., 1:].ravel()[:23]
        size = sum(len(stream.decode([i]).encode()) for i in targets)
        assert size == 23 if tokenizer == "bytes" else size > 40
        assert run.scalars("loss/bits_per_byte")[39] == pytest.approx(23 * loss / math.log(2) / size, rel=1e-6)


def test_tokens_are_shown_with_their_rows(tmp_path):
    config = text_config(tmp_path, "bpe")
    tiny.train(tmp_path / "run", config)
    run, strings = open_run(tmp_path / "run"), build_stream(config).token_strings
    assert {"<0x0A>", "<unk>"} <= set(strings)
    assert any("␣" in string for string in strings)
    for rows in (run.rows, run.probe):
        with rows:
            assert rows.token_string.values.tolist() == strings
            assert rows.lookup.sel(step=39).dims == ("token",)


def test_an_empty_band_has_no_loss(tmp_path):
    # The rare words are in the training part alone.
    (tmp_path / "train.txt").write_text("a a a a a a a b b b c c d\n" * 20)
    (tmp_path / "valid.txt").write_text("a a a a a a a a a a a a a a a a a a a a b\n" * 3)
    config = tiny.make_config(
        "data.source=text",
        "data.tokenizer=words",
        "data.vocab_size=6",
        f"data.paths={tmp_path / 'train.txt'}",
        f"data.heldout_paths={tmp_path / 'valid.txt'}",
        "data.eval_tokens=1000",
    )
    stream = build_stream(config)
    trainer = Arm.of(config, stream).trainer
    tiny.train(tmp_path / "run", config, trainer=trainer)
    tags = {tag for tag in open_run(tmp_path / "run").tags() if tag.endswith("/loss") and tag.startswith("band/")}
    bands = set(np.asarray(trainer.bands)[[stream.encode(word)[0] for word in "ab\n"]])
    assert tags == {f"band/{band}/loss" for band in bands}
    assert len(bands) < len(np.unique(trainer.bands))
