"""The evaluation of a run, as a person calls it."""

import json
import re
import shutil
import threading

import numpy as np
import pytest

from tests import tiny
from tests.test_commands import contents
from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.cli import evaluate
from tied_lm.files import Damaged, read_json, write_json
from tied_lm.train import resources

CONFIG = tiny.make_config()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of a finished run."""
    place = tmp_path_factory.mktemp("evaluate") / "run"
    tiny.train(place, CONFIG)
    return place


@pytest.fixture
def here(capsys):
    def call(*arguments):
        evaluate.main(list(map(str, arguments)), threading.Event())
        return capsys.readouterr()

    return call


def test_the_last_state_is_evaluated_and_writes(place, here):
    before = contents(place)
    out, err = here(place, "--samples=2", "--length=7", "--top_k=5", "--temperature=0.7", "--seed=3")
    assert contents(place) == before
    assert not err
    last = open_run(place).last()
    assert f"{place} after 39 updates: tied, body none" in out
    assert "23 tokens in 5 sequences" in out
    rows = {"loss, nats a token": "loss/eval", "above the best possible loss": "loss/excess"}
    rows |= {f"loss in band {band}": f"band/{band}/loss" for band in "01234"}
    for words, tag in rows.items():
        # So few sequences hold a token of a band that its loss has no interval.
        ending = "\n" if "band" in words else " ["
        assert re.search(rf"{words} +{last[tag]:.4f}{re.escape(ending)}", out)
    batch = CONFIG.data.batch_size * CONFIG.data.length
    assert f"What is predicted ({batch} held-out tokens):" in out
    (low,) = re.findall(r"log-sum-exp of the logits, mean, nats +([\d.]+)", out)
    assert float(low) > np.log(20) - 0.1  # of 20 rows, of which none scores much below 0
    assert re.search(r"mean log\(p / f\) in band 4 +-?\d", out)
    _, *samples = out.split("\nSample ")
    assert [text.splitlines()[0] for text in samples] == [
        f"{k} of 2 (temperature 0.7, seed 3, among the 5 likeliest tokens):" for k in (1, 2)
    ]
    for text in samples:
        ids = text.splitlines()[1].split()
        assert len(ids) == 8
        assert all(0 <= int(i) < 20 for i in ids)


def test_another_step_a_prompt_and_no_chance(place, here):
    step = max(int(p.name) for p in (place / "checkpoints").iterdir() if p.name != "39")
    out, _ = here(place, f"--step={step}", "--tokens=10", "--prompt=3 1 4", "--greedy", "--length=3")
    assert f"after {step} updates" in out
    assert "10 tokens in 2 sequences" in out
    assert "Sample 1 of 1 (the likeliest token every time):\n  3 1 4 " in out


def test_samples_say_how_far_they_look_back(tmp_path, here):
    config = tiny.write_letters(tmp_path, "model.body=lstm", "train.steps=6")
    tiny.train(tmp_path / "run", config)
    for flags, said in [
        (["--length=5"], ""),
        (["--length=9"], "up to 5 tokens before it; the model was trained on 5.\n"),
        (["--length=9", "--window=99"], "up to 9 tokens before it; the model was trained on 5.\n"),
    ]:
        before, _ = here(tmp_path / "run", "--samples=1", *flags)[0].split("\nSample ")
        assert ("Each token is scored with" in before) == bool(said)
        assert said in before


def test_a_carried_state_is_told(tmp_path, here):
    config = tiny.sequences(tmp_path, "stateful lstm, dropout, coupled adam", "train.steps=6")
    tiny.train(tmp_path / "run", config)
    out, _ = here(tmp_path / "run", "--samples=1", "--length=9")
    assert "The body starts each sequence with the state after the 5 tokens before it.\n" in out
    assert "up to 9 tokens before it; the model was trained on 5 at a time, with the state of those before.\n" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window=0"], "window = 0 is not possible; allowed: 1 to 100,000"),
        (["--step=5"], "step = '5' is not possible; allowed: "),
        (["--tokens=0"], "tokens = 0 is not possible; allowed: 1 to 1,000,000,000"),
        (["--tokens=1000000000000"], "tokens = 1000000000000 is not possible; allowed: 1 to 1,000,000,000"),
        (["--samples=1000000000000"], "samples = 1000000000000 is not possible; allowed: 0 to 1,000"),
        (["--length=1000000000000"], "length = 1000000000000 is not possible; allowed: 1 to 100,000"),
        (["--temperature=1e39"], "temperature = 1e+39 is not possible; allowed: 0 to 1,000"),
        (["--temperature=-1"], "temperature = -1.0"),
        (["--temperature=nan"], "temperature = nan"),
        (["--top_k=21"], "top_k = 21 is not possible; allowed: at most data.vocab_size = 20"),
        (["--prompt=20"], "ids from 0 to 19"),
        (["--prompt=3 \udcff"], "prompt = '3 \\udcff' is not possible; allowed: UTF-8 text"),
        (["--prompt="], "a text of at least one token"),
        (["--seed=4294967296"], "seed = 4294967296"),
    ],
)
def test_a_mistake_is_one_line(place, here, arguments, words):
    before = contents(place)
    with pytest.raises(ConfigError) as error:
        here(place, *arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert contents(place) == before


def test_samples_beyond_the_memory_are_refused_with_the_figure(place, here, monkeypatch):
    monkeypatch.setattr(resources, "memory_of_machine", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"^samples = 1000 .* 50,000 tokens .* at least 1 GB, and there are 1 GB$"):
        here(place, "--samples=1000", "--length=50000", "--window=100000")
    here(place, "--samples=1", "--length=5")


def test_what_is_no_run_is_refused(place, here, tmp_path):
    write_json(tmp_path / "config.json", {"compare": {"arms": {"tied": "", "untied": ""}}})
    for folder, words in [(tmp_path / "absent", "the folder of a run"), (tmp_path, "a comparison with tied, untied")]:
        with pytest.raises(ConfigError, match=words):
            here(folder)


def test_text_that_changed_is_refused_and_scarce_text_is_told(tmp_path, here):
    config = tiny.write_letters(tmp_path, "train.steps=6")
    place = tmp_path / "run"
    tiny.train(place, config)
    out, err = here(place, "--tokens=1000", "--samples=1", "--length=4", "--prompt=AB")
    assert "--tokens=1,000: the held-out text has whole sequences of 20 only; all of these are used" in err
    assert "20 tokens in 4 sequences" in out
    assert "above the best possible loss" not in out
    assert "\n  AB" in out
    (tmp_path / "letters.txt").write_bytes(tiny.LETTERS[::-1])
    with pytest.raises(ConfigError, match=r"the text that the run was trained on; text_heldout\.sha256: '.*' -> '"):
        here(place)


def test_a_missing_or_damaged_checkpoint_is_named(place, tmp_path, here):
    place = shutil.copytree(place, tmp_path / "run")
    for path in (place / "checkpoints/39/state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(Damaged, match=r"checkpoints/39 is damaged \([^\n]*$"):
        here(place)
    (place / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a run with checkpoints; there is none in"):
        here(place)
    assert not (place / "checkpoints").exists()


def test_a_scheme_of_another_name_is_told_in_one_line(tmp_path, here):
    config = tiny.make_config("model.tying=spd_pair", "model.body=mlp", "train.steps=4")
    tiny.train(tmp_path / "run", config)
    path = tmp_path / "run" / "config.json"
    # As an older folder has it, without a checksum.
    path.write_text(json.dumps(read_json(path, "")).replace("spd_pair", "pseudo_inverse"))
    assert open_run(tmp_path / "run").config.model.tying == "pseudo_inverse"
    with pytest.raises(ConfigError) as error:
        here(tmp_path / "run")
    assert str(error.value).startswith("model.tying = 'pseudo_inverse' is not possible; allowed: spd_pair, its name by")
    assert "\n" not in str(error.value)


def test_a_config_of_another_scheme_is_refused_by_field_and_not_called_damage(place, tmp_path, here):
    place = shutil.copytree(place, tmp_path / "run")
    values = read_json(place / "config.json", "")
    values["model"]["tying"] = "untied"
    write_json(place / "config.json", values)
    with pytest.raises(ConfigError, match=r"checkpoints of the run's config; .* model\.tying: 'untied' -> 'tied'$"):
        here(place)
