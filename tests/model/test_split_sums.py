"""The held-out fraction, whatever the sizes of the files."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import toy
from tied_lm.config import build_run
from tied_lm.data.documents import read_split

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text")

sizes = st.lists(st.integers(1, 300) | st.integers(300, 20_000), min_size=1, max_size=12)
fractions = st.floats(0.02, 0.98)


def text_of(documents):
    return b"".join(block for document in documents for _, block in document.blocks())


def share_held_out(contents, fraction, seed, tokenizer):
    """Share of the items; each item must be on one side, and a cut where the tokenizer wants it."""
    with tempfile.TemporaryDirectory() as folder:
        suffix = "bin" if tokenizer == "ids" else "txt"
        for i, content in enumerate(contents):
            (Path(folder) / f"{i:02}.{suffix}").write_bytes(content)
        split = read_split(
            dataclasses.replace(
                DATA, paths=(folder,), heldout_fraction=fraction, seed=seed, tokenizer=tokenizer, vocab_size=65536
            )
        )
        assert sum(document.size for part in split.parts for document in part) == sum(map(len, contents))
        cuts = [document for document in split.train if document.stop < document.place.stat().st_size]
        assert len(cuts) <= 1
        assert len(split.train) + len(split.heldout) == len(contents) + len(cuts)
        for document in cuts:
            (rest,) = [other for other in split.heldout if other.place == document.place]
            assert rest.start == document.stop
            before = text_of([document])
            if tokenizer == "ids":
                assert len(before) % 2 == 0
            else:
                assert before.endswith(b"\n") or tokenizer == "words"
                assert before.endswith(b"\n") or text_of([rest]).startswith(b" ")
        heldout = text_of(split.heldout)
        return len(heldout) / sum(map(len, contents))


@settings(max_examples=150, deadline=None)
@given(sizes=sizes, fraction=fractions, seed=st.integers(0, 2**32 - 1), tokenizer=st.sampled_from(["words", "bytes"]))
def test_lines(sizes, fraction, seed, tokenizer):
    """Lines of 6 to 8 bytes, numbered throughout so that no files are the same."""
    rng, contents, n = np.random.default_rng(seed), [], 0
    for size in sizes:
        contents.append(b"".join(b"%05d%s\n" % (n + i, b"xx"[: rng.integers(3)]) for i in range(1 + size // 7)))
        n += 1 + size // 7
    total = sum(map(len, contents))
    if min(fraction, 1 - fraction) * total < 200:  # too little for lines to be fine enough
        return
    assert abs(share_held_out(contents, fraction, seed, tokenizer) / fraction - 1) <= 0.2


@settings(max_examples=100, deadline=None)
@given(sizes=sizes, fraction=fractions, seed=st.integers(0, 2**32 - 1), tokenizer=st.sampled_from(["words", "ids"]))
def test_one_line_and_ids(sizes, fraction, seed, tokenizer):
    rng, contents = np.random.default_rng(seed), []
    for i, size in enumerate(sizes):
        ids = rng.integers(0, 50_000, size) if tokenizer == "ids" else ()
        contents.append(np.append(i, ids).astype("<u2").tobytes() if len(ids) else b"%05d bcd " % i * (1 + size // 10))
    if min(fraction, 1 - fraction) * sum(map(len, contents)) < 200:
        return
    assert abs(share_held_out(contents, fraction, seed, tokenizer) / fraction - 1) <= 0.2


@pytest.mark.parametrize("seed", range(5))
def test_few_unequal_files(tmp_path, seed):
    """A large file among small ones was held out whole: 93 % and more."""
    contents = [b"%d\n" % i * n for i, n in enumerate((100, 200, 100_000, 400))]
    assert abs(share_held_out(contents, 0.1, seed, "bytes") - 0.1) < 0.011
