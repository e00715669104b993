"""From shards to rows of tokens, in an order that depends on nothing but the data and the tokens per step.

Step s, row r of a training run is the tokens [s S + r T, s S + (r + 1) T) of the stream, S tokens a step and T a row,
and its targets are one token further. So the data of a step is the same for every number of processes, micro-batch,
position scheme and seed, and the state to resume from is s alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from data.manifest import MANIFEST, check_files, read_manifest
from data.shards import count_tokens, read_shard

Rows = tuple[Int64[Tensor, "rows length"], Int64[Tensor, "rows length"]]


SCANNED_AT_ONCE = 1 << 22  # tokens


class TokenStream:
    """Shards read one after the other as one sequence of `len(stream)` tokens.

    A shard is mapped only while it is read, so resident memory and open files don't grow with the data. All headers are
    checked at construction, which raises as `count_tokens` does; with `vocab_size`, every id read is checked too.
    """

    def __init__(self, paths: Sequence[str | Path], vocab_size: int | None = None) -> None:
        self.paths = [Path(path) for path in paths]
        if not self.paths:
            raise ValueError("a token stream needs at least one shard; got none")
        self.vocab_size = vocab_size
        # _starts[k] is the position of shard k's first token; the last entry is the length of the stream.
        self._starts = np.cumsum([0] + [count_tokens(path) for path in self.paths])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> Int64[np.ndarray, " count"]:
        """Tokens [start, start + count), across the borders of shards.

        Raises ValueError for a range outside the stream, and for an id outside the vocabulary (naming file and token).
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise ValueError(
                f"tokens {start} to {start + count} are outside the stream of {len(self)} tokens "
                f"in {self.paths[0].parent}"
            )
        tokens = np.empty(count, np.int64)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            first = start + done - int(self._starts[shard])
            part = read_shard(self.paths[shard])[first : first + count - done]
            tokens[done : done + part.size] = part
            self._check_vocabulary(self.paths[shard], first, tokens[done : done + part.size])
            done += part.size
            shard += 1
        return tokens

    def read_periodic(self, start: int, count: int) -> Int64[np.ndarray, " count"]:
        """Tokens [start, start + count) of the endless sequence that repeats the stream."""
        parts = []
        while count > 0:
            start %= len(self)
            part = self.read(start, min(count, len(self) - start))
            parts.append(part)
            start, count = start + part.size, count - part.size
        return np.concatenate(parts)

    def check_vocabulary(self) -> None:
        """Reads every id once, and raises ValueError naming file and token where one is outside the vocabulary."""
        for start in range(0, len(self), SCANNED_AT_ONCE):
            self.read(start, min(SCANNED_AT_ONCE, len(self) - start))

    def _check_vocabulary(self, path: Path, first: int, ids: np.ndarray) -> None:
        if self.vocab_size is not None and ids.max() >= self.vocab_size:
            index = int((ids >= self.vocab_size).argmax())
            raise ValueError(
                f"{path}: token {first + index} has id {ids[index]}, but the vocabulary has {self.vocab_size} ids; "
                "use data of this model's tokenizer, or a larger model.vocab_size"
            )


def open_split(data_dir: str | Path, split: str, vocab_size: int | None = None) -> TokenStream:
    """The stream of `*_<split>_*.bin` in a prepared folder, by name; `split` is `train` or `val`.

    Where the folder has a manifest, its files' sizes and token counts are compared with it, and its tokenizer's
    vocabulary with `vocab_size`; without one, every id is read once and compared.

    Raises FileNotFoundError for a missing folder, split or listed file, and ValueError for a mismatch.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise FileNotFoundError(f"data.dir={data_dir}: no such folder; make it: {_prepare_command(data_dir)}")
    paths = sorted(data_dir.glob(f"*_{split}_*.bin"))
    if manifest := read_manifest(data_dir):
        check_files(data_dir, manifest)
        listed = {entry["name"] for entry in manifest["files"]}
        if strangers := [path for path in paths if path.name not in listed]:
            raise ValueError(f"{strangers[0]}: not listed in {MANIFEST}; move it out of the folder")
        _check_manifest_vocabulary(data_dir, manifest.get("vocab_size"), vocab_size)
    if not paths:
        raise FileNotFoundError(
            f"data.dir={data_dir}: no *_{split}_*.bin in it; make them: {_prepare_command(data_dir)}"
        )
    stream = TokenStream(paths, vocab_size)
    if vocab_size is not None and not (manifest and "vocab_size" in manifest):
        stream.check_vocabulary()  # nothing else tells, and a run should not find out in the middle
    return stream


class TrainBatches:
    """The rows of a training run that one process of `world_size` computes.

    A step has `rows_per_step = tokens_per_step / length` rows, of which rank k owns the `rows_per_rank` contiguous ones
    from k * rows_per_rank on. With `repeat` the stream starts over at its end, in the middle of a row if need be.
    Raises ValueError where the divisions leave a remainder.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokens_per_step: int,
        length: int,
        rank: int = 0,
        world_size: int = 1,
        repeat: bool = False,
    ) -> None:
        if length < 1 or tokens_per_step < 1 or tokens_per_step % length:
            raise ValueError(
                f"train.length={length} must divide train.tokens_per_step={tokens_per_step}; change one of them"
            )
        self.rows_per_step = tokens_per_step // length
        if self.rows_per_step % world_size:
            raise ValueError(
                f"{world_size} processes cannot share the {self.rows_per_step} rows of a step "
                f"(train.tokens_per_step={tokens_per_step} / train.length={length}); start a number that divides them"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is outside the {world_size} processes")
        self.stream = stream
        self.tokens_per_step = tokens_per_step
        self.length = length
        self.rank = rank
        self.repeat = repeat
        self.rows_per_rank = self.rows_per_step // world_size

    def check(self, steps: int) -> None:
        """Raises ValueError if the stream is too short for so many steps, unless it repeats."""
        needed = steps * self.tokens_per_step + 1
        if self.repeat or needed <= len(self.stream):
            return
        fit = max(0, len(self.stream) - 1) // self.tokens_per_step
        raise ValueError(
            f"train.steps={steps} needs {needed} tokens ({steps} * {self.tokens_per_step} + 1), but the training "
            f"split has {len(self.stream)}, enough for {fit} steps; use fewer train.steps, prepare more data, "
            "or set data.repeat=true"
        )

    def batch(self, step: int) -> Rows:
        """This process's tokens and targets of a step, each (rows_per_rank, length). Raises ValueError past the end."""
        count = self.rows_per_rank * self.length
        start = step * self.tokens_per_step + self.rank * count
        read = self.stream.read_periodic if self.repeat else self.stream.read
        return _rows(read(start, count + 1)[None], self.length)


def validation_batches(
    stream: TokenStream, length: int, n_tokens: int, rows_per_batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Rows]:
    """Rows of `length` over the first n_tokens tokens: row r is the tokens [r T, (r + 1) T), targets one further.

    Each length so covers the same tokens. The batches are the same for any number of processes: rank k takes those of
    index k, k + world_size, ...; the last one may be smaller.
    Raises ValueError, before the first batch, if length doesn't divide n_tokens or the stream is too short.
    """
    if length < 1 or n_tokens < 1 or n_tokens % length:
        raise ValueError(
            f"validation.tokens={n_tokens} must be a multiple of every length in validation.lengths, "
            f"and {length} does not divide it; change one of them"
        )
    if n_tokens + 1 > len(stream):
        largest = max(0, len(stream) - 1) // length * length
        raise ValueError(
            f"validation.tokens={n_tokens} needs one token more than that, but the validation split has {len(stream)}; "
            f"the largest value at length {length} is validation.tokens={largest}"
        )
    if rows_per_batch < 1:
        raise ValueError(f"rows_per_batch={rows_per_batch} must be at least 1")
    rows = range(n_tokens // length)
    starts = range(rank * rows_per_batch, len(rows), world_size * rows_per_batch)
    batches = (rows[first : first + rows_per_batch] for first in starts)
    return (_rows(np.stack([stream.read(r * length, length + 1) for r in batch]), length) for batch in batches)


def _rows(spans: np.ndarray, length: int) -> Rows:
    """Spans of k * length + 1 tokens, cut into rows of tokens and of targets (which get memory of their own)."""
    tokens = np.ascontiguousarray(spans[:, :-1]).reshape(-1, length)
    targets = np.ascontiguousarray(spans[:, 1:]).reshape(-1, length)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _check_manifest_vocabulary(data_dir: Path, prepared: object, vocab_size: int | None) -> None:
    if vocab_size is not None and isinstance(prepared, int) and prepared > vocab_size:
        raise ValueError(
            f"data.dir={data_dir}: prepared with a tokenizer of {prepared} ids, but model.vocab_size={vocab_size}; "
            "use data of this model's tokenizer, or a larger model.vocab_size"
        )


def _prepare_command(data_dir: Path) -> str:
    """The command that makes this folder, as far as its name tells."""
    source, _, tokenizer = data_dir.name.partition("_")
    if source in ("fineweb10b", "fineweb100b"):
        what = f"source={source} shards=25"
    elif source == "sotu":
        what = f"source=sotu tokenizer={tokenizer or 'gpt2'}"
    else:
        what = "source=text path=FILE_OR_FOLDER"
    return f"python scripts/prepare_data.py {what} out_dir={data_dir}"
