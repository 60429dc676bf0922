"""Matrices in files of other programs, and the command that measures them."""

import json
import pickle
import threading

import numpy as np
import pytest

from tests import tiny
from tied_lm.checks import ConfigError
from tied_lm.cli import geometry
from tied_lm.cli.matrices import read_matrix, write_matrix

RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(30, 4)).astype(np.float32), RNG.normal(size=(30, 4)).astype(np.float32)


def raw(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype, shape, end):
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


def test_what_is_written_is_read(tmp_path):
    write_matrix(tmp_path / "a.npy", {"a": A})
    np.testing.assert_array_equal(read_matrix(tmp_path / "a.npy"), A)
    write_matrix(tmp_path / "two.safetensors", {"a": A, "b": B})
    np.testing.assert_array_equal(read_matrix(tmp_path / "two.safetensors", "b"), B)
    with pytest.raises(ConfigError, match=r"^key = nothing is not possible; allowed: a \| b$"):
        read_matrix(tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"^save = .* allowed: .safetensors, for a, b$"):
        write_matrix(tmp_path / "two.npy", {"a": A, "b": B})


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    upper = (A.view(np.uint32) >> 16).astype("<u2")
    (tmp_path / "w.safetensors").write_bytes(raw(entry("BF16", A.shape, upper.nbytes), upper.tobytes()))
    expected = (upper.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(read_matrix(tmp_path / "w.safetensors"), expected)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


def test_what_is_no_matrix_is_refused_in_one_line(tmp_path):
    np.save(tmp_path / "object.npy", np.array([[Bomb()]], object), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Bomb()))
    np.save(tmp_path / "ints.npy", np.ones((3, 2), int))
    np.save(tmp_path / "row.npy", np.ones(3))
    whole = (tmp_path / "row.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    (tmp_path / "w.pt").write_bytes(b"")
    bad = {
        "long": raw(entry("F32", [2**40, 2**20], 2**62)),
        "short": (10**9).to_bytes(8, "little") + b"{}",
        "text": raw(["w"]),
        "type": raw(entry("I8", [1, 1], 1), b"1"),
        "size": raw(entry("F32", [1, 1], 8), b"12345678"),
        "none": raw({}),
    }
    for name, data in bad.items():
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    for path in [*tmp_path.iterdir(), tmp_path / "missing.npy"]:
        with pytest.raises(ConfigError, match=r"^(file|key) = [^\n]* is not possible; allowed: [^\n]*$"):
            read_matrix(path)


def test_the_matrices_of_a_run_are_measured_and_exported(tmp_path, capsys):
    tiny.train(tmp_path / "run", tiny.make_config())
    out = tmp_path / "out.npy"
    geometry.main([str(tmp_path / "run"), f"--save={out}"], threading.Event())
    told = capsys.readouterr().out
    assert "effective rank" in told
    assert "cosine of a row to its start" in told
    assert read_matrix(out).shape == (20, 4)
    with pytest.raises(ConfigError, match=r"^key = 'nope' .* allowed: embedding$"):
        geometry.main([str(tmp_path / "run"), "--key=nope"], threading.Event())
    capsys.readouterr()
    geometry.main([str(out), str(out)], threading.Event())
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "spearman" in line] == ["1"]
    write_matrix(tmp_path / "other.npy", {"a": A})
    with pytest.raises(ConfigError, match=r"a has 20 rows and b has 30"):
        geometry.main([str(out), str(tmp_path / "other.npy")], threading.Event())


@pytest.mark.parametrize("table", [np.full((3, 2), np.nan), np.ones((0, 3)), np.ones((3, 0))])
def test_what_cannot_be_measured_is_refused(tmp_path, table):
    np.save(tmp_path / "a.npy", table)
    with pytest.raises(ConfigError, match=r"^path = .*allowed: a matrix that can be measured \(table "):
        geometry.main([str(tmp_path / "a.npy")], threading.Event())
