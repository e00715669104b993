"""The shard format of the public pre-tokenised GPT-2 data: 256 little-endian int32, then the tokens as uint16.

    header: magic 20240520, version 1, token count n, 253 zeros      (1024 bytes)
    tokens: n little-endian uint16                                   (2 n bytes)

A shard that breaks this raises ValueError with the file and the byte, before a token of it is used.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_BYTES = 2
MAX_ID = 2 ** (8 * TOKEN_BYTES) - 1
MAX_TOKENS = 2**31 - 1


def write_shard(path: str | os.PathLike[str], tokens: ArrayLike) -> None:
    """Writes ids in [0, 65535] as one shard, under a temporary name that is renamed when the file is complete.

    Raises ValueError for an id that does not fit (with its index), for no tokens, and for more than 2^31 - 1.
    """
    path = Path(path)
    ids = np.asarray(tokens)
    _check_ids(path, ids)
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, VERSION, ids.size
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header.data)
            file.write(np.ascontiguousarray(ids, "<u2").data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def count_tokens(path: str | os.PathLike[str]) -> int:
    """The number of tokens in a shard, after checking its header and its size; reads 1024 bytes.

    Raises FileNotFoundError for a missing file; ValueError for one that is shorter than a header, foreign, of a newer
    version, truncated or too long.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such shard")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
        found = os.fstat(file.fileno()).st_size
    if len(head) < HEADER_BYTES:
        raise ValueError(f"{path}: ends at byte {found}, within the header of {HEADER_BYTES} bytes")
    magic, version, n_tokens = (int(value) for value in np.frombuffer(head, "<i4", count=3))
    _check_header(path, magic, version, n_tokens)
    expected = HEADER_BYTES + TOKEN_BYTES * n_tokens
    if found < expected:
        raise ValueError(f"{path}: truncated at byte {found}; {n_tokens} tokens need {expected} bytes")
    if found > expected:
        raise ValueError(
            f"{path}: trailing bytes from byte {expected} on; the header says {n_tokens} tokens, "
            f"{expected} bytes, but the file has {found}"
        )
    return n_tokens


def read_shard(path: str | os.PathLike[str]) -> np.memmap:
    """The tokens of a checked shard, uint16, memory-mapped and read-only. Raises as `count_tokens` does."""
    n_tokens = count_tokens(path)
    return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(n_tokens,))


def _check_header(path: Path, magic: int, version: int, n_tokens: int) -> None:
    if magic != MAGIC:
        raise ValueError(f"{path}: byte 0: not a token shard (magic {magic}, expected {MAGIC})")
    if version > VERSION:
        raise ValueError(f"{path}: byte 4: version {version} is newer than this code reads ({VERSION})")
    if version < VERSION:
        raise ValueError(f"{path}: byte 4: version {version} is unknown (this code reads {VERSION})")
    if n_tokens < 1:
        raise ValueError(f"{path}: byte 8: a token count of {n_tokens}; a shard holds at least one token")


def _check_ids(path: Path, ids: np.ndarray) -> None:
    if ids.ndim != 1 or not 1 <= ids.size <= MAX_TOKENS:
        raise ValueError(f"{path}: tokens of shape {ids.shape}; a shard holds a sequence of 1 to {MAX_TOKENS} ids")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path}: tokens of type {ids.dtype}; ids are integers")
    if ids.dtype == np.uint16:
        return
    outside = (ids < 0) | (ids > MAX_ID)
    if outside.any():
        index = int(outside.argmax())
        raise ValueError(f"{path}: token {index} has id {ids[index]}, outside 0 to {MAX_ID}")
