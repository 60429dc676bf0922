"""Matrices in files that other programs read and write: .npy and .safetensors. Reading one executes nothing."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from tied_lm.checks import ConfigError
from tied_lm.files import replace

# The types of the safetensors format that are numbers with a fraction; all are little-endian.
TYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
LONGEST_HEADER = 100_000_000  # bytes, the format's own bound
KINDS = "a .npy or .safetensors file"


def read_matrix(path: Path, key: str | None = None) -> Float[np.ndarray, "V D"]:
    """A matrix of numbers.

    Args:
        key: the tensor's name in a .safetensors file; needed where there are several matrices.

    Raises:
        ConfigError: it is no such file, or holds no such matrix.
    """
    try:
        if path.suffix == ".npy":
            # Mapped, so that a file which is shorter than it says allocates nothing; and without pickles.
            table = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".safetensors":
            table = _read_safetensors(path, key)
        else:
            raise ConfigError("file", str(path), KINDS)
    except (OSError, EOFError, AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("file", str(path), f"{KINDS}, whole and without pickles ({error})") from None
    if table.ndim != 2 or not (table.dtype.kind == "f" or table.dtype == TYPES["BF16"]):
        raise ConfigError("file", str(path), f"a matrix of floats; this is {table.dtype} of shape {table.shape}")
    return np.asarray(table, np.float64 if table.dtype.itemsize == 8 else np.float32)


def _read_safetensors(path: Path, key: str | None) -> np.ndarray:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise ValueError("its header is not as long as it says")
        header: dict[str, Any] = json.loads(file.read(length))
    matrices = {
        name: about for name, about in header.items() if name != "__metadata__" and len(about.get("shape", ())) == 2
    }
    if key is None and len(matrices) == 1:
        (key,) = matrices
    if key not in matrices:
        raise ConfigError("key", key, " | ".join(matrices) or f"a matrix; {path} has none")
    about = matrices[key]
    if about["dtype"] not in TYPES:
        raise ValueError(f"{key} is {about['dtype']}, not {' | '.join(TYPES)}")
    dtype, (rows, width), (start, end) = TYPES[about["dtype"]], about["shape"], about["data_offsets"]
    if not 0 <= start <= end <= size - 8 - length or rows * width * dtype.itemsize != end - start:
        raise ValueError(f"{key} is not where its header says")
    return np.memmap(path, dtype, "r", 8 + length + start, (rows, width))


def write_matrix(path: Path, matrices: dict[str, Float[np.ndarray, "V D"]]) -> None:
    """Write matrices as float32: one to .npy, any number by name to .safetensors.

    Raises:
        ConfigError: of another kind of file, or several for .npy.
    """
    tables = {name: np.ascontiguousarray(table, "<f4") for name, table in matrices.items()}
    if path.suffix == ".npy" and len(tables) == 1:
        with path.open("wb") as file:
            np.save(file, next(iter(tables.values())), allow_pickle=False)
        return
    if path.suffix != ".safetensors":
        allowed = ".safetensors" if path.suffix == ".npy" else KINDS
        raise ConfigError("save", str(path), f"{allowed}, for {', '.join(tables)}")
    header, start = {}, 0
    for name, table in tables.items():
        header[name] = {"dtype": "F32", "shape": table.shape, "data_offsets": (start, start + table.nbytes)}
        start += table.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    replace(path, len(text).to_bytes(8, "little") + text + b"".join(table.tobytes() for table in tables.values()))
