"""FineWeb as public shards of GPT-2 tokens, those of the NanoGPT speedrun."""

from pathlib import Path
from typing import Any

import numpy as np

from data.hub import Hub
from data.manifest import describe_shard
from data.shards import read_shard

VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# source: the data set on the Hugging Face hub, and how many training shards of 100 million tokens it has
DATASETS = {"fineweb10b": ("kjj0/fineweb10B-gpt2", 103), "fineweb100b": ("kjj0/fineweb100B-gpt2", 1030)}


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
