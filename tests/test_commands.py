"""The scripts, as a person calls them."""

import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tied_lm import open_run
from tied_lm.checks import ConfigError
from tied_lm.cli import compare, report, runs, show
from tied_lm.cli.command import run
from tied_lm.config import folder
from tied_lm.study.provenance import read_provenance

ROOT = Path(__file__).parent.parent
SMALL = [
    "--config.data.vocab_size=32",
    "--config.data.classes=4",
    "--config.model.features=4",
    "--config.data.batch_size=4",
    "--config.data.length=8",
    "--config.data.eval_tokens=64",
    "--config.log.probe_tokens=64",
    "--config.train.steps=20",
    "--config.optimizer.warmup_steps=2",
    "--config.train.eval_every=7",
    "--config.checkpoint.every=6",
    "--config.compare.seeds=2",
]


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-m", f"experiments.{script}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def succeed(script: str, *arguments: str) -> str:
    done = call(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def summary_of(place: Path) -> dict:
    return json.loads((place / "summary.json").read_text())


def contents(place: Path) -> dict[str, str]:
    return {
        str(p.relative_to(place)): hashlib.sha256(p.read_bytes()).hexdigest() for p in place.rglob("*") if p.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished small comparison."""
    place = tmp_path_factory.mktemp("runs") / "small"
    return place, succeed("compare", f"--workdir={place}", *SMALL)


@pytest.mark.slow
def test_default_comparison_reaches_the_entropy(tmp_path):
    out = succeed("compare", f"--workdir={tmp_path / 'run'}")
    summary = summary_of(tmp_path / "run")
    assert summary["entropy"] == pytest.approx(4.287, abs=5e-4)
    assert summary["seeds"] == [0, 1, 2, 3, 4]
    for arm in summary["arms"].values():
        assert all(0 < excess < 0.03 for excess in arm["excess"]["per_seed"])
        low, high = arm["eval_loss"]["ci95"]
        assert low < summary["law_loss"] + arm["excess"]["mean"] < high
        assert low < arm["eval_loss"]["mean"] < high
    assert summary["arms"]["tied"]["parameters"] * 2 == summary["arms"]["untied"]["parameters"]
    assert summary["difference"] == summary["differences"]["tied"]["eval_loss"]
    assert "tied - untied = +0.0" in " ".join(out.split())
    assert "On the same tokens the true law has a loss of" in " ".join(out.split())
    assert set(summary["arms"]["tied"]["bands"]) == {"0", "1", "2", "3", "4"}


@pytest.mark.slow
def test_directed_chain_costs_the_tied_model_unless_a_body_helps(tmp_path):
    excess = {}
    for body in ("none", "mlp"):
        place = tmp_path / body
        arguments = ["--config=configs/toy_directed.py", "--config.compare.seeds=1", f"--config.model.body={body}"]
        out = succeed("compare", f"--workdir={place}", *arguments)
        summary = summary_of(place)
        excess[body] = {name: arm["excess"]["mean"] for name, arm in summary["arms"].items()}
        assert summary["difference"]["ci95"] is None
        assert "there is no interval over seeds" in " ".join(out.split())
        assert f"exactly: tied by {excess[body]['tied']:.4f}, untied by" in " ".join(out.split())
    assert excess["none"]["tied"] - excess["none"]["untied"] >= 0.5
    assert excess["mlp"]["tied"] <= excess["none"]["tied"] / 4


@pytest.mark.slow
def test_text_is_learned_beyond_its_unigrams(tmp_path):
    from configs import text
    from tied_lm.config import build_run
    from tied_lm.data.documents import read_split

    succeed("compare", "--config=configs/text.py", "--config.compare.seeds=1", f"--workdir={tmp_path / 'run'}")
    heldout = read_split(build_run(text.get_config().to_dict()).data).heldout
    counts = sum(np.bincount(document.mapped(), minlength=256) for document in heldout)
    p = counts[counts > 0] / counts.sum()
    unigram = -np.sum(p * np.log(p))
    summary = summary_of(tmp_path / "run")
    assert summary["entropy"] is None
    for arm in summary["arms"].values():
        assert arm["excess"] is None
        assert arm["eval_loss"]["mean"] < unigram - 0.3


@pytest.mark.slow
def test_own_text_by_one_flag(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the cat sat on the mat. " * 100)
    arguments = [a for a in SMALL if "vocab_size" not in a]
    paths = f"--config.data.paths={text}"
    out = succeed("compare", "--config=configs/text.py", paths, f"--workdir={tmp_path / 'run'}", *arguments)
    assert "bits per byte" in out
    for arm in summary_of(tmp_path / "run")["arms"].values():
        assert arm["bits_per_byte"]["mean"] == pytest.approx(arm["eval_loss"]["mean"] / math.log(2))
        assert arm["perplexity"] is None
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["data"]["paths"] == [str(text)]
    assert config["text_train"]["bytes"] + config["text_heldout"]["bytes"] == text.stat().st_size


@pytest.mark.slow
def test_words_in_the_layout_of_ptb(tmp_path):
    rng = np.random.default_rng(0)
    for part, lines in (("train", 300), ("valid", 100)):
        words = rng.choice(["the", "cat", "sat", "<unk>", "N"], (lines, 6))
        (tmp_path / f"ptb.{part}.txt").write_text("".join(f" {' '.join(line)} \n" for line in words))
    arguments = [a for a in SMALL if "vocab_size" not in a]
    arguments += [
        f"--config.data.paths={tmp_path / 'ptb.train.txt'}",
        f"--config.data.heldout_paths={tmp_path / 'ptb.valid.txt'}",
        f"--workdir={tmp_path / 'run'}",
    ]
    done = call("compare", "--config=configs/words.py", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "data.vocab_size = 10000 is not possible; allowed: at most 6: " in line
    out = succeed("compare", "--config=configs/words.py", "--config.data.vocab_size=6", *arguments)
    assert "perplexity" in out
    for arm in summary_of(tmp_path / "run")["arms"].values():
        assert arm["perplexity"]["per_seed"] == pytest.approx(np.exp(arm["eval_loss"]["per_seed"]))
        assert arm["bits_per_byte"] is None
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["text_train"]["tokens"] == 300 * 7
    assert len(config["text_tokenizer"]["sha256"]) == 64


def test_comparison_leaves_what_it_promises(small):
    place, out = small
    page = (place / "report.html").read_text()
    assert page.count('<svg role="img" aria-label="') == 31
    known = ("http://www.w3.org", 'href="http://localhost:6006/', "http-equiv")
    assert page.count("http") == sum(map(page.count, known))
    for arm in ("tied", "untied"):
        for seed in (0, 1):
            run = place / arm / f"seed{seed}"
            for name in ("config.json", "metrics.jsonl", "rows.zarr", "checkpoints"):
                assert (run / name).exists()
            # What was written while it trained, and its line in the table of runs.
            assert len(list(run.glob("events.out.tfevents.*"))) == len(list(run.glob("events.*.hparams"))) + 1 == 2
            assert open_run(run).config.seed == seed
    summary = summary_of(place)
    losses = {name: arm["eval_loss"]["per_seed"] for name, arm in summary["arms"].items()}
    np.testing.assert_allclose(summary["difference"]["per_seed"], np.subtract(losses["tied"], losses["untied"]))
    assert "bands" in summary["arms"]["tied"]
    assert f"-m tensorboard.main --logdir {place}" in out


def test_pairs_share_batches_and_initial_embedding(small):
    place, _ = small
    tied, untied = (open_run(place / arm / "seed1").rows.isel(step=0) for arm in ("tied", "untied"))
    np.testing.assert_array_equal(tied["input_count"], untied["input_count"])
    np.testing.assert_array_equal(tied["weight"], untied["weight_embedding"])


def test_a_finished_comparison_is_left_alone(small, call_here):
    place, first = small
    before = contents(place)
    code, out, err = call_here(f"--workdir={place}", *SMALL)
    assert code == 0
    assert "nothing was changed" in err
    assert out == first
    assert contents(place) == before


def test_a_folder_shows_its_verdict_again_and_how_it_stands(small, tmp_path, capsys):
    place, first = small
    before = contents(place)
    show.main([str(place)], threading.Event())
    assert capsys.readouterr().out.strip().splitlines() == [
        line for line in first.strip().splitlines() if not line.startswith("Pictures: ")
    ]
    part, single = tmp_path / "deep" / "part", tmp_path / "single"
    shutil.copytree(place, part)
    (part / "summary.json").unlink()
    shutil.rmtree(part / "untied" / "seed1")
    shutil.copytree(place / "tied" / "seed0", single)
    with folder.locked(part):
        runs.main([str(tmp_path)], threading.Event())
    runs.main([str(place)], threading.Event())
    loss = summary_of(place)["arms"]["tied"]["eval_loss"]["per_seed"][0]
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == [
        f"{part}  comparison, running, 3 of 4 runs done",
        f"{single}  run, finished: held-out loss {loss:.4f}",
    ]
    outcome = summary_of(place)["difference"]["outcome"]
    assert out[2].startswith(f"{place}  comparison, finished, 2 seeds: tied {outcome}, ")
    show.main([str(part)], threading.Event())
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "comparison, stopped, 3 of 4 runs done"
    assert [line.split()[:4] for line in out[2:5]] == [
        ["tied,", "seed", "0", "20"],
        ["tied,", "seed", "1", "20"],
        ["untied,", "seed", "0", "20"],
    ]
    show.main([str(single)], threading.Event())
    assert f"held-out loss, nats a token {loss:.4f} 20" in " ".join(capsys.readouterr().out.split())
    (single / "config.json").write_text("{")
    runs.main([str(tmp_path)], threading.Event())
    assert "single  folder, cannot be read: " in capsys.readouterr().out
    for main in (show.main, runs.main):
        with pytest.raises(ConfigError, match=r"^DIR = "):
            main([str(tmp_path / "absent")], threading.Event())
    assert contents(place) == before


def test_seeds_can_be_added_and_nothing_else_changed(small, call_here):
    place, _ = small
    losses = summary_of(place)["arms"]["tied"]["eval_loss"]["per_seed"]
    code, _, err = call_here(f"--workdir={place}", *SMALL, "--config.optimizer.learning_rate=0.5")
    assert code == 2
    assert "optimizer.learning_rate: 0.02 -> 0.5" in err
    code, _, _ = call_here(f"--workdir={place}", *SMALL[:-1], "--config.compare.seeds=3")
    assert code == 0
    assert summary_of(place)["arms"]["tied"]["eval_loss"]["per_seed"][:2] == losses
    code, _, err = call_here(f"--workdir={place}", *SMALL)
    assert code == 2
    assert "compare.seeds" in err


def test_a_single_run(tmp_path):
    place = tmp_path / "run"
    out = succeed("train", f"--workdir={place}", *SMALL, "--config.model.tying=untied")
    assert "held-out loss" in out
    assert open_run(place).config.model.tying == "untied"
    assert read_provenance(place)[0]["seconds"] > 0
    report.main([str(place)], threading.Event())
    assert "Made by" in (place / "report.html").read_text(encoding="utf-8")
    done = call("train", f"--workdir={place}", *SMALL, "--config.model.tying=untied")
    assert "nothing was changed" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_loses_nothing(tmp_path, number):
    # Steps are many, so that the signal falls into the first run.
    arguments = [*SMALL, "--config.train.steps=100000", "--config.compare.seeds=1", "--config.checkpoint.every=500"]
    place = tmp_path / "run"
    command = [sys.executable, "-m", "experiments.compare", f"--workdir={place}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (place / "tied/seed0/checkpoints/500").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "the same command continues" in err
    assert "Traceback" not in err
    step = max(int(p.name) for p in (place / "tied/seed0/checkpoints").iterdir())
    assert f"stopped after {step} updates" in err
    assert 500 <= json.loads((place / "tied/seed0/metrics.jsonl").read_text().splitlines()[-1])["step"] < step < 100000


@pytest.fixture
def call_here(monkeypatch, capsys):
    """Call a script in this process, which saves the time of imports."""
    monkeypatch.chdir(ROOT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call_main(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare", *arguments])
        with pytest.raises(SystemExit) as exit_:
            run(compare.main)
        return exit_.value.code, *capsys.readouterr()

    yield call_main
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.data.vocab_size=1", ["data.vocab_size", "1", "at least 2"]),
        ("--config.model.features=0", ["model.features", "0", "at least 1"]),
        ("--config.data.reversibility=1.5", ["data.reversibility", "1.5", "0 to 1"]),
        ("--config.train.steps=0", ["train.steps", "0", "at least 1"]),
        ("--config.train.stepz=3", ["train.stepz", "steps"]),
        ("--config.nothing.here=3", ["nothing", "model"]),
        ("--config.train.steps=many", ["train.steps", "many", "whole number"]),
        ("--config.train.steps=2.5", ["train.steps", "2.5", "whole number"]),
        ("--config.optimizer.learning_rate=nan", ["optimizer.learning_rate", "nan"]),
        ("--config.model.tying=knotted", ["model.tying", "knotted", "tied | untied"]),
        ("--config.model.body=lstm5", ["model.body", "lstm5", "none | mlp"]),
        ("--config.data.source=web", ["data.source", "web", "toy | text"]),
        ("--config.log.tokens=5,900", ["log.tokens", "900", "255"]),
        ("--config.compare.seeds=0", ["compare.seeds", "0", "at least 1"]),
        ("--config.compare.baseline=none", ["compare.baseline", "none", "tied | untied"]),
        ("--config.compare.arms.tied=model.tying", ["compare.arms.tied", "field=value"]),
        ("--config=configs/absent.py", ["config", "configs/absent.py"]),
        ("--nonsense", ["--nonsense"]),
    ],
)
def test_a_mistake_is_one_line(tmp_path, call_here, flag, words):
    code, out, err = call_here(f"--workdir={tmp_path / 'run'}", flag)
    assert code == 2
    (line,) = err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not out
    assert not (tmp_path / "run").exists()


def test_mistakes_in_text(tmp_path, call_here):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    for name, words in [("absent.txt", "existing"), ("empty.txt", "not empty"), ("short.txt", "data.length")]:
        paths = f"--config.data.paths={tmp_path / name}"
        code, _, err = call_here("--config=configs/text.py", f"--workdir={tmp_path / 'run'}", paths)
        assert code == 2
        (line,) = err.strip().splitlines()
        assert "data.paths" in line
        assert words in line
        assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_refused(tmp_path, call_here):
    (tmp_path / "thesis.tex").write_text("precious")
    code, _, err = call_here(f"--workdir={tmp_path}", *SMALL)
    assert code == 2
    assert "workdir" in err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
