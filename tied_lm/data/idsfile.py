"""Files of token ids that somebody has made: .bin (bare integers) and .npy."""

from pathlib import Path

import numpy as np

from tied_lm.checks import ConfigError

SUFFIXES = (".bin", ".npy")
HEADER = 1024  # bytes: 256 numbers of 32 bits, of which the first three are a magic number, a version and a count
# Of llm.c and the nanoGPT speedruns (dev/data/data_common.py of llm.c), with the version and the type of the ids.
HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
MAGICS = range(20230101, 20300000)  # dates, as these magic numbers are
SAMPLE = 2**16  # bytes, at the beginning and in the middle, by which the type of bare ids is told
FEWEST = 256  # ids, by which that is told
LARGEST_VOCABULARY = 2**24  # that is thought possible


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
        dtype, start = _bare(field, path, size, bin_dtype)
        if start == 0 and vocab_size - 1 > np.iinfo(dtype).max:
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


def _bare(field: str, path: Path, size: int, bin_dtype: str) -> tuple[np.dtype, int]:
    """Type and beginning of the ids in a .bin file: those of its header, if it has one, or what the config says."""
    with path.open("rb") as file:
        beginning = file.read(max(HEADER, SAMPLE))
        file.seek(size // 2 // 8 * 8)
        middle = file.read(SAMPLE) if size > len(beginning) else b""
    magic, version, count = np.frombuffer(beginning[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic in MAGICS and 0 <= version < 100 and size >= HEADER:
        if magic not in HEADERS or version != HEADERS[magic][0]:
            known = " and ".join(f"{number} version {header[0]}" for number, header in HEADERS.items())
            told = f"ids, bare or with a header of llm.c ({known}); this header is {magic} version {version}"
            raise ConfigError(field, str(path), told)
        dtype = np.dtype(HEADERS[magic][1]).newbyteorder("<")
        if size - HEADER != count * dtype.itemsize:
            told = (
                f"whole files; its header tells of {count:,} ids, and there are {(size - HEADER) / dtype.itemsize:,g}"
            )
            raise ConfigError(field, str(path), told)
        return dtype, HEADER
    sample = beginning[: len(beginning) // 8 * 8] + middle[: len(middle) // 8 * 8]
    if _is_swapped(sample):
        raise ConfigError(field, str(path), "little-endian ids; these look to be big-endian")
    likely = _likely_type(sample, bin_dtype)
    if likely != bin_dtype:
        raise ConfigError("data.bin_dtype", bin_dtype, f"{likely}, of which the ids in {path} look to be")
    return np.dtype(bin_dtype).newbyteorder("<"), 0


def _is_swapped(sample: bytes) -> bool:
    """Whether bare ids seem to have their high bytes first: the low ones are all 0, or those of every second one."""
    pairs = np.frombuffer(sample, "<u2").reshape(-1, 2)
    if len(pairs) < FEWEST:
        return False
    return bool(not (pairs & 255).any() and pairs.any()) or bool(
        not pairs[:, 0].any() and (pairs[:, 1] > 255).mean() > 0.5
    )


def _likely_type(sample: bytes, bin_dtype: str) -> str:
    """The type of which bare ids seem to be. Ids of more bytes than they need have zeros at the same places."""
    quarters = np.frombuffer(sample, "<u2").reshape(-1, 4)
    if len(quarters) < 4:
        return bin_dtype

    def high(low: np.ndarray, rest: np.ndarray) -> bool:
        """Whether these are the high parts of ids, which are 0 or few next to the low ones."""
        few = rest.max() <= 15 and low.max() >= 1024 and low.size >= FEWEST
        return bool(np.mean(low != 0) > 0.5 and (not rest.any() or few))

    if not quarters[:, 2:].any() and high(quarters[:, 0], quarters[:, 1]):
        return "int64"
    halves = quarters.reshape(-1, 2)
    if high(halves[:, 0], halves[:, 1]):
        return "uint32"
    # Read as more bytes than they have, ids are beyond any vocabulary.
    narrower = ("int64", "uint32", "uint16")
    for name in narrower[narrower.index(bin_dtype) :]:
        ids = np.abs(np.frombuffer(sample, np.dtype(name).newbyteorder("<")).astype("<i8"))
        # Of a vocabulary of more than 2**16 the low parts have all values, of two narrow ids those of one.
        beyond = ids[ids >= 2**16]
        narrow = name == "uint32" and 2 * beyond.size > ids.size >= FEWEST and (beyond % 2**16).max() < 2**15
        if np.mean(ids >= LARGEST_VOCABULARY) <= 0.5 and not narrow:
            return name
    return bin_dtype
