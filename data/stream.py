"""The texts of FineWeb or C4, streamed from the Hugging Face hub by `datasets` while they are tokenized."""

import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import httpx2
import pyarrow as pa
from huggingface_hub.errors import HfHubHTTPError
from tqdm import tqdm

from data.hub import FETCHES, Hub
from data.sources import Batch, Piece, Position, batched, binary_texts, decode, document_pieces

T = TypeVar("T")
# source: the data set whose texts are streamed, and its subset unless another is asked for
STREAMED = {"fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"), "c4": ("allenai/c4", "en")}
ROWS_AT_ONCE = 256
RETRIES = 2  # where nothing comes, beside those of huggingface_hub
RETRY_SETTING = re.compile("STREAMING_.*(MAX_RETRIES|RETRY_INTERVAL)")  # of datasets.config


class Stream:
    """The texts of a subset of FineWeb or C4, read from the hub while they are tokenized.

    A row without a text is an empty document. What fails on the way is read again from the last rows that came, as in
    a download; in the end there is one error, and positions let the next start go on.
    """

    total_bytes: int | None = None

    def __init__(self, source: str, subset: str) -> None:
        self._source, self._subset = source, subset
        billions = re.search(r"(\d+)BT$", subset)  # sample-10BT has about 10 billion tokens
        self.about_tokens: float | None = 1e9 * int(billions[1]) if billions else None
        self.identity: dict[str, Any] = {"positions": "in files"}  # they name the version of the data

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """Raises ConnectionError where the hub can't be read, ValueError for an unknown subset or without a `text`."""
        return batched(self._read(start or {"revision": None, "file": 0, "state": None, "row": 0, "bytes": 0}))

    def _read(self, start: Position) -> Iterator[tuple[Position | None, Piece, int]]:
        hub = Hub(STREAMED[self._source][0], self._source)
        newest = hub.probe("README.md")
        revision = start["revision"] or newest  # a later start goes on in the version that the first one read
        skipped, n_bytes = start["row"], start["bytes"]
        with _single_tries():
            tables = Tables(hub, self._source, self._subset, revision, start["file"], start["state"])
            while (table := tables.next()) is not None:
                for row, value in enumerate(binary_texts(table.texts)):
                    if row < skipped:
                        continue
                    position = {"revision": revision, **table.place, "row": row, "bytes": n_bytes}
                    n_bytes += len(value or b"")
                    for index, piece in enumerate(document_pieces(*decode(value or b""))):
                        yield position if index == 0 else None, piece, n_bytes
                skipped = 0


class Table(NamedTuple):
    """Some rows of a file. `place` has the file's index, and the state from which they can be read again."""

    place: dict[str, Any]
    texts: pa.ChunkedArray


class Tables:
    """The tables of a subset in order, from a file and a state within it on."""

    def __init__(
        self, hub: Hub, source: str, subset: str, revision: str | None, file: int, state: dict[str, Any] | None
    ) -> None:
        self._hub, self._file, self._state = hub, file, state
        self._opened: Iterator[Table] | None = None
        self._names, self._files = self._fetched(f"subset={subset}", lambda: open_subset(source, subset, revision))

    def next(self) -> Table | None:
        """The next one, None behind the last. Raises ConnectionError, naming the file, where it can't be read."""
        while self._file < len(self._names):
            if table := self._fetched(self._names[self._file], self._next_of_file):
                return table
            self._file, self._state, self._opened = self._file + 1, None, None
        return None

    def _next_of_file(self) -> Table | None:
        """After a failure the file is opened again, behind the last table that came."""
        tables, self._opened = self._opened or self._tables_of_file(), None
        try:
            table = next(tables, None)
        except ValueError as error:
            raise Damaged(_said(error)) from error
        self._opened = tables
        return table

    def _tables_of_file(self) -> Iterator[Table]:
        file = self._files.shard(num_shards=len(self._names), index=self._file)
        if self._state is not None:
            file.load_state_dict(self._state)
        before = file.state_dict()
        for table in file.iter(batch_size=ROWS_AT_ONCE):
            if "text" not in table.column_names:
                raise ValueError(f'no column "text" among {", ".join(table.column_names)}')
            self._state = file.state_dict()
            yield Table({"file": self._file, "state": before}, table.column("text"))
            before = self._state

    def _fetched(self, name: str, work: Callable[[], T]) -> T:
        """`work`, again where the hub fails or sends damaged data."""
        for fetch in range(1, FETCHES + 1):
            try:
                return self._hub.retried(f"read {name}", lambda: _telling_apart(work), retries=RETRIES)
            except Damaged as error:
                if fetch == FETCHES:
                    raise self._hub.damaged(name, error) from error
                tqdm.write(f"{name}: {error}; fetching it again", file=sys.stderr)
        raise AssertionError


class Damaged(Exception):
    """What came is not what it should be."""


def _telling_apart(work: Callable[[], T]) -> T:
    """Raises what the hub or the network did wrong, which may lie under other errors, or else Damaged."""
    try:
        return work()
    except (OSError, httpx2.HTTPError, pa.ArrowException, EOFError, zlib.error) as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (httpx2.TransportError, HfHubHTTPError)):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise Damaged(_said(error)) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def open_subset(source: str, subset: str, revision: str | None) -> tuple[list[str], Any]:
    """The names of a subset's files, and a data set of one shard a file that gives tables.

    Raises ValueError for a subset that isn't there, and for one without a column "text".
    """
    from datasets import load_dataset_builder  # takes a second to import

    def load(**options: Any) -> Any:
        return load_dataset_builder(STREAMED[source][0], name=subset, revision=revision, **options)

    # Of parquet files only that column is downloaded; lines of JSON come whole.
    builder = load(columns=["text"]) if source == "fineweb" else load()
    files = builder.as_streaming_dataset(split="train")
    if "text" not in (files.column_names or []) and (
        columns := load().as_streaming_dataset(split="train").column_names
    ):
        raise ValueError(
            f'source={source} subset={subset}: {STREAMED[source][0]} has no column "text" there, but '
            f"{', '.join(columns)}; choose another subset"
        )
    urls = builder.config.data_files["train"]  # hf://datasets/REPO@REVISION/NAME
    return [url.partition("@")[2].partition("/")[2] for url in urls], files.with_format("arrow")


@contextmanager
def _single_tries() -> Iterator[None]:
    """Lets `datasets` try each request once, in silence.

    It would try for half an hour, and each of the libraries says so in its own words. huggingface_hub still asks six
    times, with pauses that add up to 23 seconds.
    """
    from datasets import config

    once = {name: 1 if name.endswith("MAX_RETRIES") else 0 for name in dir(config) if RETRY_SETTING.fullmatch(name)}
    before = {name: getattr(config, name) for name in once}
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for name, value in once.items():
            setattr(config, name, value)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
