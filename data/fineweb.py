"""FineWeb as public shards of GPT-2 tokens (those of the NanoGPT speedrun), or streamed as text; so is C4."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pyarrow as pa

from data.hub import Hub
from data.manifest import describe_shard
from data.shards import read_shard
from data.sources import Batch, Piece, Position, batched, binary_texts, decode, document_pieces

VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# source: the data set on the Hugging Face hub, and how many training shards of 100 million tokens it has
DATASETS = {"fineweb10b": ("kjj0/fineweb10B-gpt2", 103), "fineweb100b": ("kjj0/fineweb100B-gpt2", 1030)}
TEXTS = "HuggingFaceFW/fineweb"
# source: the data set whose texts are streamed, and its subset unless another is asked for
STREAMED = {"fineweb": (TEXTS, "sample-10BT"), "c4": ("allenai/c4", "en")}
ROWS_AT_ONCE = 256


def check_shards(source: str, shards: int | None) -> int:
    """The number of training shards to download. Raises ValueError unless it is one the data set has."""
    published = DATASETS[source][1]
    if not isinstance(shards, int) or isinstance(shards, bool) or not 1 <= shards <= published:
        raise ValueError(
            f"shards={shards}: source={source} has {published} training shards of 100 million tokens (200 MB each); "
            f"set shards to 1 ... {published} (25 hold the 2.4 billion tokens of the 162m runs)"
        )
    return shards


def shard_names(shards: int) -> list[str]:
    """The validation shard, and the first `shards` training shards."""
    return ["fineweb_val_000000.bin", *(f"fineweb_train_{k:06d}.bin" for k in range(1, shards + 1))]


def download(source: str, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Downloads shards into `folder`, each checked by size, hash, header and ids; returns their manifest entries.

    What is there already is checked, and only what is missing is fetched. Raises ConnectionError where that fails.
    """
    return Hub(DATASETS[source][0], source).download(names, folder, _describe)


def _describe(path: Path) -> dict[str, Any]:
    """The manifest entry of a shard. Raises ValueError for a file that is not a whole shard of GPT-2 tokens."""
    try:
        tokens = read_shard(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from error
    if (largest := int(tokens.max())) >= VOCAB_SIZE:
        raise ValueError(f"token {int(tokens.argmax())} has id {largest}, outside the {VOCAB_SIZE} ids of gpt2")
    documents = int(np.count_nonzero(tokens == END_OF_TEXT))
    return describe_shard(path, path.name.split("_")[1], documents)


class Stream:
    """The texts of a subset of FineWeb or C4, read from the hub while they are tokenized."""

    total_bytes: int | None = None

    def __init__(self, source: str, subset: str) -> None:
        self._source, self._repo, self._subset = source, STREAMED[source][0], subset
        billions = re.search(r"(\d+)BT$", subset)  # sample-10BT has about 10 billion tokens
        self.about_tokens: float | None = 1e9 * int(billions[1]) if billions else None
        self.identity: dict[str, Any] = {}  # positions name the version of the data

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """Raises ConnectionError where the hub can't be read, ValueError for an unknown subset or without a `text`."""
        return batched(self._read(start or {"revision": None, "state": None, "row": 0, "bytes": 0}))

    def _read(self, start: Position) -> Iterator[tuple[Position | None, Piece, int]]:
        hub = Hub(self._repo, self._source)
        newest = hub.probe("README.md")
        revision = start["revision"] or newest  # a later start goes on in the version that the first one read
        skipped, n_bytes = start["row"], start["bytes"]
        try:
            dataset = self._open(revision)
            state = start["state"] or dataset.state_dict()
            dataset.load_state_dict(state)
            for table in dataset.iter(batch_size=ROWS_AT_ONCE):
                for row, value in enumerate(binary_texts(table.column("text"))):
                    if row < skipped:
                        continue
                    position = {"revision": revision, "state": state, "row": row, "bytes": n_bytes}
                    n_bytes += len(value or b"")
                    for index, piece in enumerate(document_pieces(*decode(value or b""))):
                        yield position if index == 0 else None, piece, n_bytes
                skipped = 0
                state = dataset.state_dict()
        except (OSError, httpx2.HTTPError, pa.ArrowException) as error:
            raise hub.error(f"read subset={self._subset}", error) from error

    def _open(self, revision: str | None) -> Any:
        """The stream as tables of one column. Raises ValueError for a subset that isn't there."""
        from datasets import load_dataset  # takes a second to import

        # Of parquet files only that column is downloaded; lines of JSON come whole.
        options: dict[str, Any] = {"columns": ["text"]} if self._source == "fineweb" else {}
        dataset = load_dataset(
            self._repo, name=self._subset, split="train", streaming=True, revision=revision, **options
        ).select_columns(["text"])
        if "text" not in (dataset.column_names or ["text"]):
            raise ValueError(f'subset={self._subset}: {self._repo} has no column "text" there')
        return dataset.with_format("arrow")
