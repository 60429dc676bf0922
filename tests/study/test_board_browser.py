"""TensorBoard over a comparison, in a real browser."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from urllib.request import urlopen

import pytest

from tests import browser, tiny
from tests.study.test_board import nothing, values_of
from tied_lm.study import comparison
from tied_lm.study.board import ADDRESS, deep_link
from tied_lm.study.summary import read_summary
from tied_lm.study.sweep import Sweep, read_grid
from tied_lm.study.sweepboard import write_sweep_board

# The text of a page, with what stands in its shadow trees and frames, too.
TEXT = """(() => { const all = n => n.nodeType === 3 ? n.data : ['STYLE', 'SCRIPT'].includes(n.nodeName) ? '' :
  n.nodeName === 'IFRAME' && n.contentDocument && n.contentDocument.body ? all(n.contentDocument.body) :
  [...(n.shadowRoot ? [n.shadowRoot] : []), ...n.childNodes].map(all).join(' '); return all(document.body) })()"""
COUNT = """(() => { const all = n => (n.matches && n.matches('SELECTOR') ? 1 : 0) +
  [...(n.shadowRoot ? [n.shadowRoot] : []), ...n.childNodes].map(all).reduce((a, b) => a + b, 0);
  return all(document.body) })()"""


# Of what TensorBoard's own code complains.
THEIRS = ("Three.js", "WebGL", "paper-", "deprecated", "GPU", "GL Driver")
ARMS = {
    "cap": "model.tying=soft_cap",
    "scaled": "model.tying=scaled_output",
    "late": "model.tying=late_untie scheme.untie_step=20",
    "low_rank": "model.tying=low_rank scheme.rank=2",
}


def ours(tabs):
    """Complaints of pages that are not TensorBoard's own."""
    return [text for tab in tabs for text in tab.complaints if not any(words in text for words in THEIRS)]


@contextlib.contextmanager
def served(place, last):
    """The address of TensorBoard over a folder, once it knows a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={place}", f"--port={port}", "--host=127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address, end = f"http://127.0.0.1:{port}/", time.monotonic() + 60
    try:
        while True:
            try:
                with urlopen(address + "data/runs", timeout=5) as answer:
                    if last in json.loads(answer.read()):
                        break
            except OSError:
                assert time.monotonic() < end
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The address of TensorBoard over a finished comparison, and the comparison's folder."""
    browser.chromium()
    place = tmp_path_factory.mktemp("browser") / "compared"
    comparison.complete(place, tiny.plan_of(values_of()), threading.Event(), nothing)
    with served(place, "mean/untied") as address:
        yield address, place


@pytest.mark.slow
def test_every_tab_shows_the_comparison(board, tmp_path):
    address, place = board
    link = deep_link(read_summary(place)).replace(ADDRESS, address)
    with browser.started(tmp_path) as opened:
        tab = opened.open(link, width=1500)
        tab.wait(COUNT.replace("SELECTOR", "scalar-card") + " >= 4")
        tab.wait(TEXT + ".includes('mean/tied')")
        assert "Tags matching filter" in tab.evaluate(TEXT)
        tab = opened.open(address + "#hparams", width=1500)
        tab.wait(TEXT + ".includes('held-out loss')")
        tab.wait(TEXT + ".includes('parameters')")
        tab = opened.open(address + "#custom_scalars", width=1500)
        tab.wait(TEXT + ".includes('held-out loss less untied')")
        tab.wait(TEXT + ".includes('Matches (2)')")
        tab = opened.open(address + "#images", width=1500)
        tab.wait(TEXT + ".includes('rows_map/share')")
        tab = opened.open(address + "#projector", width=1500)
        tab.wait(rf"/Points:\s*20\b/.test({TEXT})")
        with urlopen(address + "data/plugin/projector/runs", timeout=20) as answer:
            assert sorted(json.loads(answer.read())) == ["mean/tied", "mean/untied"]
        tabs = list(opened.tabs.values())
        outside = [url for tab in tabs for url in tab.requests if not url.startswith((address, "data:", "blob:"))]
        assert outside == ["about:blank"] * outside.count("about:blank")
        assert ours(tabs) == []


def check_hparams(opened, address, fields):
    tab = opened.open(address + "#hparams", width=1500)
    for text in ("held-out loss", "excess", "share", "parameters", *fields):
        tab.wait(f"{TEXT}.includes({json.dumps(text)})")


@pytest.mark.slow
def test_six_arms_are_in_one_chart_and_one_table(tmp_path):
    browser.chromium()
    values, place = values_of(), tmp_path / "compared"
    values["compare"]["arms"] |= ARMS
    comparison.complete(place, tiny.plan_of(values), threading.Event(), nothing)
    means = read_summary(place).arms
    with served(place, "mean/untied") as address, browser.started(tmp_path / "profile") as opened:
        check_hparams(
            opened, address, ["scheme.untie_step", "scheme.rank", *(f"{m.eval_loss.mean:#.5g}" for m in means.values())]
        )
        tab = opened.open(address + "#custom_scalars", width=1500)
        tab.wait(TEXT + ".includes('held-out loss less untied')")
        tab.wait(TEXT + f".includes('Matches ({len(means)})')")
        tab = opened.open(address + "#images", width=1500)
        tab.wait(TEXT + ".includes('rows_map/cosine')")  # those of the other parts are on its next pages
        tab = opened.open(deep_link(read_summary(place)).replace(ADDRESS, address), width=1500)
        tab.wait(COUNT.replace("SELECTOR", "scalar-card") + " >= 4")
        for name in means:
            tab.wait(TEXT + f".includes('mean/{name}')")
        tab = opened.open(address + "#projector", width=1500)
        tab.wait(rf"/Points:\s*20\b/.test({TEXT})")
        with urlopen(address + "data/plugin/projector/runs", timeout=20) as answer:
            assert sorted(json.loads(answer.read())) == sorted(f"mean/{name}" for name in means)
        assert ours(opened.tabs.values()) == []


@pytest.mark.slow
def test_a_sweep_is_one_table(tmp_path):
    browser.chromium()
    values, place = values_of(), tmp_path / "swept"
    sweep = Sweep.of(values, read_grid(values, ["data.reversibility=0,1"]), place)
    sweep.open()
    for point in sweep.points:
        comparison.complete(point.place, point.plan, threading.Event(), nothing)
    write_sweep_board(sweep)
    losses = [arm.eval_loss.mean for point in sweep.points for arm in read_summary(point.place).arms.values()]
    last = f"{sweep.points[-1].place.name}/mean/untied"
    with served(place, last) as address, browser.started(tmp_path / "profile") as opened:
        check_hparams(opened, address, ["data.reversibility", *(f"{loss:#.5g}" for loss in losses)])
        link = deep_link(read_summary(sweep.points[0].place), of_sweep=True).replace(ADDRESS, address)
        tab = opened.open(link, width=1500)
        for point in sweep.points:
            tab.wait(TEXT + f".includes('{point.place.name}/mean/tied')")
        assert "/seed0" not in tab.evaluate(TEXT)
        tab = opened.open(address + "#custom_scalars", width=1500)
        tab.wait(TEXT + f".includes('held-out loss, nats a token, at {sweep.points[1].place.name}')")
        tab.wait(TEXT + ".includes('Matches (2)')")
        assert "Matches (4)" not in tab.evaluate(TEXT)
        assert ours(opened.tabs.values()) == []
