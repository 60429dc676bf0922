"""What paths name, and what of it is left out."""

import dataclasses
import os
import socket

import numpy as np
import pytest

from configs import toy
from tied_lm.checks import ConfigError
from tied_lm.config import build_run
from tied_lm.data.documents import read_split
from tied_lm.data.paths import find

DATA = dataclasses.replace(build_run(toy.get_config().to_dict()).data, source="text")


def names(root, *paths):
    found = find("data.paths", tuple(map(str, paths)))
    return [os.path.relpath(file, root) for file in found.files], {k: len(v) for k, v in found.left_out.items()}


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_hidden_files_and_folders_are_left_out_and_counted(tmp_path):
    for name in ("a.txt", ".hidden", ".git/config", "__MACOSX/a.txt", "sub/b.txt", "sub/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for path in (tmp_path, tmp_path / "**", tmp_path / "**" / "*"):
        assert names(tmp_path, path) == (["a.txt", "sub/b.txt"], {"hidden": 4})
    assert names(tmp_path, tmp_path / ".hidden", tmp_path / ".git")[0] == [".hidden", ".git/config"]
    assert names(tmp_path, tmp_path / ".h*")[0] == [".hidden"]


def test_links_are_followed_by_folders_and_globs_alike(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("a")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "again.txt").symlink_to(root / "a.txt")
    for i in range(3):  # with circles, of which each would double the work
        (root / f"circle{i}").symlink_to(root)
    (root / "nowhere.txt").symlink_to(root / "none")
    for path in (root, root / "**", root / "**" / "*.txt"):
        assert names(root, path) == (["a.txt", "folder/b.txt"], {"unreadable or no files": 1})


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_what_is_no_file_is_never_opened(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("x")
    else:
        path.symlink_to("/dev/zero")
    assert refusal(find, "data.heldout_paths", (str(path),)) == (
        f"data.heldout_paths = {str(path)!r} is not possible; allowed: files that can be read, and folders of them "
        f"(it is a {kind})"
    )
    (tmp_path / "a.txt").touch()
    assert names(tmp_path, tmp_path) == (["a.txt"], {"unreadable or no files": 1})


def test_binary_files_of_a_folder_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "c.bin").write_bytes(b"ids")
    for path in (tmp_path, tmp_path / "*"):
        data = dataclasses.replace(DATA, paths=(str(path),), heldout_fraction=0.5)
        split = read_split(data)
        assert split.files == 1
        assert {reason: len(files) for reason, files in split.left_out.items()} == {"binary": 2}
    # One that is named is meant.
    assert read_split(dataclasses.replace(DATA, paths=(str(tmp_path / "b.png"),))).files == 1
    (tmp_path / "a.txt").unlink()
    assert refusal(read_split, data).endswith("at least one file that is not empty; left out: 2 binary")


@pytest.mark.parametrize("name", ["a,b.txt", "a b.txt", "[x].txt", "~x", "*.txt", "ü.txt"])
def test_names_of_all_kinds(tmp_path, monkeypatch, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / name).write_text("text")
    monkeypatch.chdir(tmp_path / "sub")
    assert names(".", tmp_path / "sub" / ".." / "sub" / name)[0] == [name]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(".", f"~/sub/{name}")[0] == [name]
    assert names(".", "../sub/" + name)[0] == [name]


def test_a_thousand_files_need_few_open_ones(tmp_path):
    resource = pytest.importorskip("resource")
    from tied_lm.data.corpus import open_corpus

    for i in range(300):
        np.arange(i, i + 20, dtype="<u2").tofile(tmp_path / f"{i:04}.bin")
    data = dataclasses.replace(DATA, tokenizer="ids", paths=(str(tmp_path),), vocab_size=1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        corpus = open_corpus(data)
        found = np.concatenate([corpus.train.read(start, 20) for start in range(0, corpus.train.size, 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert corpus.train.size + corpus.heldout.size == 300 * 20
    assert found.size >= corpus.train.size
