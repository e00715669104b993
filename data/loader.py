"""From shards to rows of tokens, in an order that depends on nothing but the data and the tokens per step.

Step s, row r of a training run is the tokens [s S + r T, s S + (r + 1) T) of the stream, S tokens a step and T a row,
and its targets are one token further. So the data of a step is the same for every number of processes, micro-batch,
position scheme and seed, and the state to resume from is s alone.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from data.manifest import MANIFEST, check_files, read_manifest
from data.shards import count_tokens, read_shard

Rows = tuple[Int64[Tensor, "rows length"], Int64[Tensor, "rows length"]]

SCANNED_AT_ONCE = 1 << 22  # tokens
# What data.shuffle_seed moves, in tokens: long enough for the longest rows of the paper, which are never cut.
SHUFFLED_BLOCK = 1 << 16
LARGEST_SEED = 2**32 - 1


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

    def read(self, start: int, count: int, out: np.ndarray | None = None) -> Int64[np.ndarray, " count"]:
        """Tokens [start, start + count), across the borders of shards; written to `out` where that is given.

        Raises ValueError for a range outside the stream, and for an id outside the vocabulary (naming file and token).
        """
        tokens = np.empty(max(count, 0), np.int64) if out is None else out
        done = 0
        for part in self.parts(start, count):
            tokens[done : done + part.size] = part
            done += part.size
        return tokens

    def parts(self, start: int, count: int) -> Iterator[np.ndarray]:
        """The ids of `read` as they lie in the shards, uint16 or uint32, one memory-mapped piece a shard."""
        if start < 0 or count < 0 or start + count > len(self):
            raise ValueError(
                f"tokens {start} to {start + count} are outside the stream of {len(self)} tokens "
                f"in {self.paths[0].parent}"
            )
        end = start + count
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            path, first = self.paths[shard], start - int(self._starts[shard])
            part = np.asarray(read_shard(path)[first : first + end - start])
            self._check_ids(path, first, part)
            yield part
            start += part.size
            shard += 1

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[np.ndarray]:
        """`parts` of [start, end), no longer than 4 million tokens each, so that not even a whole shard is resident."""
        end = len(self) if end is None else end
        for first in range(start, end, SCANNED_AT_ONCE):
            yield from self.parts(first, min(SCANNED_AT_ONCE, end - first))

    def check_vocabulary(self) -> None:
        """Reads every id once, and raises ValueError naming file and token where one is outside the vocabulary."""
        for _ in self.chunks():
            pass  # to pass them on is to check them

    def _check_ids(self, path: Path, first: int, ids: np.ndarray) -> None:
        if self.vocab_size is not None and ids.max() >= self.vocab_size:
            index = int((ids >= self.vocab_size).argmax())
            raise ValueError(
                f"{path}: token {first + index} has id {ids[index]}, but the vocabulary has {self.vocab_size} ids; "
                "use data of this model's tokenizer, or train with a larger model.vocab_size"
            )


def open_split(data_dir: str | Path, split: str, vocab_size: int | None = None, key: str = "data.dir") -> TokenStream:
    """The stream of `*_<split>_*.bin` in a prepared folder, by name; `split` is `train` or `val`.

    Where the folder has a manifest, its files' sizes and token counts are compared with it, and its tokenizer's
    vocabulary with `vocab_size`; without one, every id is read once and compared.

    Args:
        key: of the command that names the folder, for its errors.

    Raises FileNotFoundError for a missing folder, split or listed file, and ValueError for a mismatch.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise FileNotFoundError(f"{key}={data_dir}: no such folder; make it: {_prepare_command(data_dir)}")
    paths = sorted(data_dir.glob(f"*_{split}_*.bin"))
    if manifest := read_manifest(data_dir):
        check_files(data_dir, manifest)
        listed = {entry["name"] for entry in manifest["files"]}
        if strangers := [path for path in paths if path.name not in listed]:
            raise ValueError(
                f"{strangers[0]}: not listed in {MANIFEST}; where prepare_data.py was interrupted run it again, "
                "else move the file out of the folder"
            )
        _check_manifest_vocabulary(f"{key}={data_dir}", manifest.get("vocab_size"), vocab_size)
    if not paths:
        raise FileNotFoundError(f"{key}={data_dir}: no *_{split}_*.bin in it; make them: {_prepare_command(data_dir)}")
    stream = TokenStream(paths, vocab_size)
    if vocab_size is not None and not (manifest and "vocab_size" in manifest):
        stream.check_vocabulary()  # nothing else tells, and a run should not find out in the middle
    return stream


class TrainBatches:
    """The rows of a training run that one process of `world_size` computes.

    A step has `rows_per_step = tokens_per_step / length` rows, of which rank k owns the `rows_per_rank` contiguous ones
    from k * rows_per_rank on, and reads no others. While a step is computed, a thread prepares the next one.

    With `repeat` the stream starts over at its end, in the middle of a row if need be. With `shuffle_seed` its blocks
    of 65,536 tokens are read in a permuted order, another one in each epoch; a last, shorter block keeps its place at
    the end. The order depends on that seed and the length of the stream alone. `length` must divide 65,536, so that no
    row of the first epoch crosses a block's border (the last target before one is the first token of the block that is
    read next), and a step holds the same tokens at every length.

    Args:
        pin_memory: whether batches lie in page-locked memory, from which copies to a CUDA device run aside.

    Raises ValueError where the divisions leave a remainder, or there is nothing to shuffle.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokens_per_step: int,
        length: int,
        rank: int = 0,
        world_size: int = 1,
        repeat: bool = False,
        shuffle_seed: int | None = None,
        pin_memory: bool = False,
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
        if shuffle_seed is not None:
            _check_shuffle(shuffle_seed, length, len(stream))
        self.stream = stream
        self.tokens_per_step = tokens_per_step
        self.length = length
        self.rank = rank
        self.repeat = repeat
        self.shuffle_seed = shuffle_seed
        self.rows_per_rank = self.rows_per_step // world_size
        self._pin_memory = pin_memory
        self._background = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[Rows]] | None = None

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
        """This process's tokens and targets of a step, each (rows_per_rank, length). Raises ValueError past the end.

        The two are views of one memory, for reading only.
        """
        following, self._next = self._next, None
        rows = following[1].result() if following and following[0] == step else self._read(step)
        if self._has(step + 1):
            self._next = step + 1, self._background.submit(self._read, step + 1)
        return rows

    def _has(self, step: int) -> bool:
        return self.repeat or (step + 1) * self.tokens_per_step < len(self.stream)

    def _read(self, step: int) -> Rows:
        if not self._has(step):
            needed = (step + 1) * self.tokens_per_step + 1
            raise ValueError(f"step {step} needs {needed} tokens, outside the stream of {len(self.stream)} tokens")
        count = self.rows_per_rank * self.length
        span = torch.empty(count + 1, dtype=torch.int64, pin_memory=self._pin_memory)
        out = span.numpy()
        for first, size in self._pieces(step * self.tokens_per_step + self.rank * count, count + 1):
            self.stream.read(first, size, out[:size])
            out = out[size:]
        return _rows(span, self.length)

    def _pieces(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """Where in the stream (first token, how many) the tokens [position, position + count) of the run lie."""
        while count > 0:
            first, room = self._locate(*divmod(position, len(self.stream)))
            size = min(count, room)
            yield first, size
            position, count = position + size, count - size

    def _locate(self, epoch: int, offset: int) -> tuple[int, int]:
        """The place in the stream of an epoch's token, and how many tokens are read from there in a row."""
        block, within = divmod(offset, SHUFFLED_BLOCK)
        n_blocks = len(self.stream) // SHUFFLED_BLOCK
        if self.shuffle_seed is None or block >= n_blocks:
            return offset, len(self.stream) - offset
        order = _permutation(n_blocks, self.shuffle_seed, epoch)
        return int(order[block]) * SHUFFLED_BLOCK + within, SHUFFLED_BLOCK - within


def validation_batches(
    stream: TokenStream, length: int, n_tokens: int, rows_per_batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Rows]:
    """Rows of `length` over the first n_tokens tokens: row r is the tokens [r T, (r + 1) T), targets one further.

    Each length so covers the same tokens. The batches are the same for any number of processes: rank k takes those of
    index k, k + world_size, ...; the last one may be smaller. A thread reads one while the one before it is in use.
    Raises ValueError, before the first batch, if length doesn't divide n_tokens or the stream is too short.
    """
    check_validation(stream, length, n_tokens)
    if rows_per_batch < 1:
        raise ValueError(f"rows_per_batch={rows_per_batch} must be at least 1")
    rows = range(n_tokens // length)
    starts = range(rank * rows_per_batch, len(rows), world_size * rows_per_batch)
    batches = (rows[first : first + rows_per_batch] for first in starts)
    spans = (stream.read(batch[0] * length, len(batch) * length + 1) for batch in batches)
    return _prepared_ahead(_rows(torch.from_numpy(span), length) for span in spans)


def check_validation(stream: TokenStream, length: int, n_tokens: int, prefix: str = "validation.") -> None:
    """Raises ValueError if length doesn't divide n_tokens or the stream is too short; `prefix` is that of the command's
    keys `tokens` and `lengths`."""
    if length < 1 or n_tokens < 1 or n_tokens % length:
        raise ValueError(
            f"{prefix}tokens={n_tokens} must be a multiple of every length in {prefix}lengths, and {length} does not "
            "divide it; change one of them"
        )
    if n_tokens + 1 > len(stream):
        largest = max(0, len(stream) - 1) // length * length
        remedy = f"the largest value at length {length} is {prefix}tokens={largest}"
        if not largest:
            remedy = f"no row of length {length} fits; prepare more data, or take shorter {prefix}lengths"
        raise ValueError(
            f"{prefix}tokens={n_tokens} needs one token more than that, but the validation split has {len(stream)}; "
            f"{remedy}"
        )


def _rows(span: Int64[Tensor, " tokens"], length: int) -> Rows:
    """Rows of tokens and of targets out of k * length + 1 tokens; both are views of the same memory."""
    return span[:-1].view(-1, length), span[1:].view(-1, length)


def _prepared_ahead(batches: Iterator[Rows]) -> Iterator[Rows]:
    """The same batches, each made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="validation") as background:
        following = background.submit(next, batches, None)
        while (rows := following.result()) is not None:
            following = background.submit(next, batches, None)
            yield rows


@lru_cache(maxsize=2)  # a batch may hold the end of one epoch and the start of the next
def _permutation(n_blocks: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, because numpy promises that its numbers stay the same in later versions.
    return np.random.RandomState([seed, epoch]).permutation(n_blocks)


def _check_shuffle(seed: int, length: int, n_tokens: int) -> None:
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"data.shuffle_seed={seed} must be 0 to {LARGEST_SEED}, or null for the order of the data")
    if SHUFFLED_BLOCK % length:
        raise ValueError(
            f"train.length={length} must divide {SHUFFLED_BLOCK}, the tokens of a block that data.shuffle_seed={seed} "
            "moves; choose a power of two up to that, or data.shuffle_seed=null"
        )
    if n_tokens < 2 * SHUFFLED_BLOCK:
        raise ValueError(
            f"data.shuffle_seed={seed} moves blocks of {SHUFFLED_BLOCK} tokens, and the training split has only "
            f"{n_tokens} tokens; use data.shuffle_seed=null"
        )


def _check_manifest_vocabulary(folder: str, prepared: object, vocab_size: int | None) -> None:
    if vocab_size is not None and isinstance(prepared, int) and prepared > vocab_size:
        raise ValueError(
            f"{folder}: prepared with a tokenizer of {prepared} ids, but model.vocab_size={vocab_size}; "
            "use data of this model's tokenizer, or train with a larger model.vocab_size"
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
