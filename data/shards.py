"""The shard format of the public pre-tokenised GPT-2 data, and its wider sister for larger vocabularies.

    header: magic 20240520, version, token count n, 253 zeros     (256 little-endian int32, 1024 bytes)
    tokens: n little-endian uint16 in version 1 (the public one), n little-endian uint32 in version 2

Version 2 is written only for ids beyond 65535, so a program that knows version 1 alone reads every other shard, and
refuses these instead of misreading them. A shard that breaks the format raises ValueError with the file and the byte,
before a token of it is used.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

MAGIC = 20240520
DTYPES = {1: np.dtype("<u2"), 2: np.dtype("<u4")}  # of the tokens, by version
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_TOKENS = 2**31 - 1


def write_shard(path: str | os.PathLike[str], tokens: ArrayLike) -> None:
    """Writes ids as one shard, under a temporary name that is renamed when the file is complete.

    Ids up to 65535 make a shard of version 1, larger ones, up to 2^32 - 1, of version 2.

    Raises ValueError for an id that does not fit (with its index), for no tokens, and for more than 2^31 - 1; OSError
    naming the file when it can't be written.
    """
    path = Path(path)
    ids = np.asarray(tokens)
    version = _version_for(path, ids)
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, version, ids.size
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header.data)
            file.write(np.ascontiguousarray(ids, DTYPES[version]).data)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def count_tokens(path: str | os.PathLike[str]) -> int:
    """The number of tokens in a shard, after checking its header and its size; reads 1024 bytes.

    Raises FileNotFoundError for a missing file; ValueError for one that is shorter than a header, foreign, of a newer
    version, truncated or too long.
    """
    return _read_header(Path(path))[1]


def read_shard(path: str | os.PathLike[str]) -> np.memmap:
    """The tokens of a checked shard, uint16 or uint32, memory-mapped and read-only. Raises as `count_tokens` does."""
    dtype, n_tokens = _read_header(Path(path))
    return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(n_tokens,))


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """The type and the number of a shard's tokens, once its size agrees with them."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such shard")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        found = os.fstat(file.fileno()).st_size
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path}: ends at byte {found}, within the header of {HEADER_BYTES} bytes")
    magic, version, n_tokens = (int(value) for value in np.frombuffer(head, "<i4", count=3))
    _check_header(path, magic, version, n_tokens)
    expected = HEADER_BYTES + DTYPES[version].itemsize * n_tokens
    if found < expected:
        raise ValueError(f"{path}: truncated at byte {found}; {n_tokens} tokens need {expected} bytes")
    if found > expected:
        raise ValueError(
            f"{path}: trailing bytes from byte {expected} on; the header says {n_tokens} tokens, "
            f"{expected} bytes, but the file has {found}"
        )
    return DTYPES[version], n_tokens


def _check_header(path: Path, magic: int, version: int, n_tokens: int) -> None:
    if magic != MAGIC:
        raise ValueError(f"{path}: byte 0: not a token shard (magic {magic}, expected {MAGIC})")
    if version > max(DTYPES):
        raise ValueError(f"{path}: byte 4: version {version} is newer than this code reads ({max(DTYPES)})")
    if version not in DTYPES:
        raise ValueError(f"{path}: byte 4: version {version} is unknown (this code reads 1 to {max(DTYPES)})")
    if n_tokens < 1:
        raise ValueError(f"{path}: byte 8: a token count of {n_tokens}; a shard holds at least one token")


def _version_for(path: Path, ids: np.ndarray) -> int:
    """The first version that holds all ids."""
    if ids.ndim != 1 or not 1 <= ids.size <= MAX_TOKENS:
        raise ValueError(f"{path}: tokens of shape {ids.shape}; a shard holds a sequence of 1 to {MAX_TOKENS} ids")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path}: tokens of type {ids.dtype}; ids are integers")
    smallest, largest = int(ids.min()), int(ids.max())
    for version, dtype in DTYPES.items():
        if smallest >= 0 and largest <= np.iinfo(dtype).max:
            return version
    index = int(ids.argmin() if smallest < 0 else ids.argmax())
    raise ValueError(f"{path}: token {index} has id {ids[index]}, outside 0 to {np.iinfo(np.uint32).max}")
