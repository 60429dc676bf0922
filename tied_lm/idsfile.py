"""Files of token ids that somebody has made: .bin (bare integers) and .npy."""

from pathlib import Path

import numpy as np

from tied_lm.config import ConfigError

SUFFIXES = (".bin", ".npy")


def layout(field: str, path: Path, size: int, bin_dtype: str, vocab_size: int) -> tuple[np.dtype, int]:
    """Type of the ids in a file of so many bytes, and the byte at which they begin.

    Args:
        field: of the config, which names the file.

    Raises:
        ConfigError: it is no such file.
        OSError: it cannot be read.
    """
    name = str(path)
    if path.suffix == ".bin":
        dtype, start = np.dtype(bin_dtype).newbyteorder("<"), 0
        if vocab_size - 1 > np.iinfo(dtype).max:
            allowed = f"uint32: ids up to data.vocab_size - 1 = {vocab_size - 1:,} are beyond {bin_dtype}"
            raise ConfigError("data.bin_dtype", bin_dtype, allowed)
    elif path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ConfigError(field, name, f"files that NumPy can map ({error})") from None
        if not isinstance(array, np.memmap) or array.dtype.kind not in "iu" or array.ndim != 1:
            told = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "an archive"
            raise ConfigError(field, name, f"arrays of whole numbers in one dimension; this is {told}")
        dtype, start = array.dtype, array.offset
    else:
        raise ConfigError(field, name, f"{' and '.join(SUFFIXES)} files, with data.tokenizer = 'ids'")
    if (size - start) % dtype.itemsize:
        raise ConfigError(
            field,
            name,
            f"whole ids of {dtype.itemsize} bytes ({dtype.name}); the file has {size - start} bytes of them",
        )
    return dtype, start
