import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loader import TokenStream, TrainBatches, open_split, validation_batches
from data.manifest import describe_shard, write_manifest
from data.shards import write_shard

ROOT = Path(__file__).resolve().parents[2]


def make_shards(folder, tokens, sizes, split="train"):
    folder.mkdir(exist_ok=True)
    paths = []
    for number, part in enumerate(np.split(np.asarray(tokens), np.cumsum(sizes)[:-1])):
        paths.append(folder / f"some_{split}_{number:06d}.bin")
        write_shard(paths[-1], part)
    return paths


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, 500, 1000)


@pytest.fixture
def stream(tmp_path, tokens):
    return TokenStream(make_shards(tmp_path, tokens, [7, 300, 1, 692]))


def test_any_range_reads_the_same_across_the_borders_of_shards(stream, tokens):
    rng = np.random.default_rng(2)
    assert len(stream) == 1000
    for _ in range(200):
        start, end = sorted(rng.integers(0, 1001, 2))
        read = stream.read(int(start), int(end - start))
        assert read.dtype == np.int64
        assert np.array_equal(read, tokens[start:end])


@pytest.mark.parametrize(("start", "count"), [(0, 1001), (1000, 1), (-1, 2), (5, -1)])
def test_a_range_outside_the_stream_is_refused_with_its_length(stream, start, count):
    with pytest.raises(ValueError, match=f"tokens {start} to {start + count} are outside the stream of 1000 tokens"):
        stream.read(start, count)


def test_an_id_beyond_the_vocabulary_names_file_token_id_and_vocabulary(tmp_path):
    paths = make_shards(tmp_path, [1, 2, 3, 4, 5, 99, 6], [3, 4])
    stream = TokenStream(paths, vocab_size=99)
    assert stream.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"some_train_000001.bin: token 2 has id 99, but the vocabulary has 99 ids"):
        stream.read(4, 3)


def test_a_damaged_shard_is_found_when_the_stream_is_opened(tmp_path):
    paths = make_shards(tmp_path, range(20), [10, 10])
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"some_train_000001.bin: truncated at byte 1043"):
        TokenStream(paths)


def test_reading_leaves_no_shard_mapped(stream):
    stream.read(0, 1000)
    assert not [found for found in gc.get_objects() if issubclass(type(found), np.memmap)]


def test_narrow_and_wide_shards_make_one_stream(tmp_path):
    tokens = [5, 6, 70_000, 7, 2**32 - 1, 8, 9]
    stream = TokenStream(make_shards(tmp_path, tokens, [2, 2, 1, 2]))
    assert stream.read(0, 7).tolist() == tokens
    narrow = TokenStream(stream.paths, vocab_size=70_000)
    with pytest.raises(ValueError, match=r"some_train_000001.bin: token 0 has id 70000, but the vocabulary has 70000"):
        narrow.read(0, 4)
    with pytest.raises(ValueError, match=r"some_train_000001.bin: token 0 has id 70000"):
        narrow.check_vocabulary()


@pytest.mark.parametrize("seed", range(8))
def test_every_world_size_and_micro_batch_sees_the_rows_of_one_process(tmp_path, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60000, 700)
    cuts = np.sort(rng.choice(np.arange(1, 700), 5, replace=False))
    sizes = np.diff(np.concatenate([[0], cuts, [700]]))
    stream = TokenStream(make_shards(tmp_path, tokens, sizes))
    length, rows = int(rng.integers(1, 9)), 12
    for step in range(3):
        alone = TrainBatches(stream, rows * length, length).batch(step)
        for row in range(rows):
            start = step * rows * length + row * length
            assert np.array_equal(alone[0][row], tokens[start : start + length])
            assert np.array_equal(alone[1][row], tokens[start + 1 : start + length + 1])
        for world_size in (2, 3, 12):
            ranks = [TrainBatches(stream, rows * length, length, k, world_size) for k in range(world_size)]
            for which in (0, 1):
                micro = [part for r in ranks for part in r.batch(step)[which].split(1 + rows // world_size // 2)]
                assert torch.equal(torch.cat(micro), alone[which])


def test_batches_say_their_shape(stream):
    batches = TrainBatches(stream, 60, 5, rank=1, world_size=3)
    assert (batches.rows_per_step, batches.rows_per_rank) == (12, 4)
    tokens, targets = batches.batch(0)
    assert tokens.shape == targets.shape == (4, 5)
    assert tokens.dtype == targets.dtype == torch.int64


def test_a_repeated_stream_is_periodic_to_the_token(stream, tokens):
    batches = TrainBatches(stream, 90, 9, repeat=True)
    endless = np.tile(tokens, 4)
    for step in range(35):
        rows, targets = batches.batch(step)
        assert np.array_equal(rows.ravel(), endless[step * 90 : step * 90 + 90])
        assert np.array_equal(targets.ravel(), endless[step * 90 + 1 : step * 90 + 91])


def test_a_step_longer_than_the_repeated_stream_reads_it_several_times(tmp_path):
    stream = TokenStream(make_shards(tmp_path, [1, 2, 3], [2, 1]))
    assert TrainBatches(stream, 8, 4, repeat=True).batch(1)[0].tolist() == [[3, 1, 2, 3], [1, 2, 3, 1]]


class Watched(TokenStream):
    """Notes which thread read which tokens."""

    def __init__(self, paths):
        super().__init__(paths)
        self.reads = []

    def read(self, start, count, out=None):
        self.reads.append((start, count, threading.current_thread() is threading.main_thread()))
        return super().read(start, count, out)


def test_the_next_batch_is_read_by_a_thread_while_this_one_is_in_use(tmp_path, tokens):
    stream = Watched(make_shards(tmp_path, tokens, [1000]))
    batches = TrainBatches(stream, 90, 9)
    batches.batch(0)
    deadline = time.monotonic() + 20
    while len(stream.reads) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stream.reads == [(0, 91, True), (90, 91, False)]
    assert batches.batch(1)[0].flatten().tolist() == tokens[90:180].tolist()
    assert (90, 91, True) not in stream.reads


def test_steps_may_be_asked_for_in_any_order(stream, tokens):
    batches = TrainBatches(stream, 90, 9)
    for step in (3, 4, 0, 10, 10, 1, 2, 2):  # step 10 is the last
        assert batches.batch(step)[0].flatten().tolist() == tokens[90 * step : 90 * step + 90].tolist()


def test_a_bad_id_met_in_the_background_is_raised_at_its_own_step(tmp_path):
    stream = TokenStream(make_shards(tmp_path, [1] * 15 + [99] + [1] * 20, [36]), vocab_size=99)
    batches = TrainBatches(stream, 10, 5)
    batches.batch(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="token 15 has id 99"):
            batches.batch(1)
    with pytest.raises(ValueError, match="step 3 needs 41 tokens, outside the stream of 36"):
        batches.batch(3)


def test_a_process_reads_its_own_rows_and_no_others(tmp_path, tokens):
    stream = Watched(make_shards(tmp_path, tokens, [1000]))
    TrainBatches(stream, 480, 5, rank=2, world_size=4).batch(0)
    assert stream.reads[0][:2] == (240, 121)  # the last target is the next process's first token


def test_validation_is_read_ahead_by_a_thread(tmp_path, tokens):
    stream = Watched(make_shards(tmp_path, tokens, [1000]))
    assert len(list(validation_batches(stream, 10, 100, 4))) == 3
    assert [read[:2] for read in stream.reads] == [(0, 41), (40, 41), (80, 21)]
    assert not any(main for *_, main in stream.reads)


def test_a_validation_that_is_broken_off_leaves_no_thread(stream):
    before = threading.active_count()
    batches = validation_batches(stream, 10, 500, 4)
    next(batches)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]  (what a for loop's break does)
    assert threading.active_count() == before


def test_pinned_batches_are_asked_for_in_page_locked_memory(stream, monkeypatch):
    asked, empty = [], torch.empty

    def without_cuda(*size, pin_memory, **rest):
        asked.append(pin_memory)
        return empty(*size, **rest)

    monkeypatch.setattr("data.loader.torch.empty", without_cuda)
    TrainBatches(stream, 900, 10, pin_memory=True).batch(0)
    TrainBatches(stream, 900, 10).batch(0)
    assert asked == [True, False]


@pytest.mark.gpu
def test_batches_for_cuda_are_pinned(stream):
    for step in range(3):
        assert all(rows.is_pinned() for rows in TrainBatches(stream, 90, 9, pin_memory=True).batch(step))


class TestShuffle:
    """Blocks of 64 tokens here, and the token at position p of the stream has the id p."""

    BLOCK = 64

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        monkeypatch.setattr("data.loader.SHUFFLED_BLOCK", self.BLOCK)

    @pytest.fixture
    def stream(self, tmp_path):
        return TokenStream(make_shards(tmp_path, range(1000), [7, 300, 1, 692]))

    def order(self, stream, epochs=1, **arguments):
        """The tokens of so many epochs, as steps of 8 tokens read them."""
        batches = TrainBatches(stream, 8, 8, repeat=True, **arguments)
        return np.concatenate([batches.batch(step)[0].flatten().numpy() for step in range(epochs * 1000 // 8)])

    def test_an_epoch_is_a_permutation_of_whole_blocks_and_the_rest(self, stream):
        epoch = self.order(stream, shuffle_seed=0)
        assert sorted(epoch) == list(range(1000))
        blocks = epoch[:960].reshape(15, self.BLOCK)
        assert (blocks[:, 0] % self.BLOCK == 0).all()
        assert (np.diff(blocks, axis=1) == 1).all()
        assert epoch[960:].tolist() == list(range(960, 1000))
        assert blocks[:, 0].tolist() != sorted(blocks[:, 0])

    def test_each_seed_and_each_epoch_has_an_order_of_its_own(self, stream):
        orders = [
            tuple(epoch) for seed in (0, 1) for epoch in self.order(stream, 3, shuffle_seed=seed).reshape(3, 1000)
        ]
        assert len(set(orders)) == 6
        assert all(sorted(epoch) == list(range(1000)) for epoch in orders)

    def test_the_order_of_a_seed_never_changes(self, stream):
        """As numpy's legacy generator draws it, whose numbers are frozen; a resumed run relies on this."""
        assert (self.order(stream, shuffle_seed=5)[:960:64] // 64).tolist() == [
            5,
            7,
            1,
            8,
            11,
            4,
            6,
            12,
            3,
            9,
            10,
            13,
            14,
            2,
            0,
        ]

    @pytest.mark.parametrize("length", [1, 16, 64])
    def test_a_step_holds_the_same_tokens_at_every_length_and_world_size(self, stream, length):
        reference = TrainBatches(stream, 192, 64, shuffle_seed=3)
        for step in range(5):
            wanted = [rows.flatten().tolist() for rows in reference.batch(step)]
            for world_size in (1, 3):
                ranks = [TrainBatches(stream, 192, length, k, world_size, shuffle_seed=3) for k in range(world_size)]
                parts = [rank.batch(step) for rank in ranks]
                assert [torch.cat([part[k] for part in parts]).flatten().tolist() for k in (0, 1)] == wanted

    def test_targets_are_one_token_further_in_the_shuffled_order(self, stream):
        batches = TrainBatches(stream, 192, 64, shuffle_seed=3)
        tokens = np.concatenate([batches.batch(step)[0].flatten() for step in range(5)])
        targets = np.concatenate([batches.batch(step)[1].flatten() for step in range(5)])
        assert np.array_equal(targets[:-1], tokens[1:])
        assert (targets - tokens == 1).sum() >= len(tokens) - 15

    def test_without_repeat_the_steps_that_fit_are_the_same_as_without_shuffle(self, stream):
        batches = TrainBatches(stream, 128, 64, shuffle_seed=3)
        batches.check(7)
        assert batches.batch(6)[0].shape == (2, 64)
        with pytest.raises(ValueError, match="enough for 7 steps"):
            batches.check(8)
        with pytest.raises(ValueError, match="outside the stream"):
            batches.batch(7)

    @pytest.mark.parametrize(
        ("length", "seed", "message"),
        [
            (8, -1, "data.shuffle_seed=-1 must be 0 to 4294967295, or null"),
            (8, 2**32, "data.shuffle_seed=4294967296 must be"),
            (24, 1, "train.length=24 must divide 64, the tokens of a block that data.shuffle_seed=1"),
            (128, 1, "train.length=128 must divide 64"),
        ],
    )
    def test_what_cannot_be_shuffled_is_refused(self, stream, length, seed, message):
        with pytest.raises(ValueError, match=message):
            TrainBatches(stream, 384, length, shuffle_seed=seed)

    def test_a_single_block_is_refused(self, tmp_path):
        stream = TokenStream(make_shards(tmp_path, range(127), [127]))
        with pytest.raises(ValueError, match="blocks of 64 tokens, and the training split has only 127 tokens"):
            TrainBatches(stream, 8, 8, shuffle_seed=1)


READ_ALL = """
import sys
from pathlib import Path
from data.loader import TrainBatches, open_split

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

stream = open_split(sys.argv[1], "train")
batches = TrainBatches(stream, 1 << 19, 4096, shuffle_seed=1)
for step in range(4):
    batches.batch(step)
before = peak()
for step in range((len(stream) - 1) >> 19):
    batches.batch(step)
open_split(sys.argv[1], "train", vocab_size=300)  # without a manifest: reads every id
print(len(stream), peak() - before)
"""


def test_resident_memory_does_not_grow_with_the_data(tmp_path):
    """Eight shards of 32 million tokens, 512 MB, are read twice: that adds less than a single shard of 64 MB."""
    for number in range(8):
        write_empty_shard(tmp_path / f"some_train_{number:06d}.bin", 32_000_000)
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    n_tokens, added = map(int, ran.stdout.split())
    assert n_tokens == 8 * 32_000_000
    assert added < 60e6


def write_empty_shard(path, n_tokens):
    """A valid shard of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(np.array([20240520, 1, n_tokens] + [0] * 253, "<i4").tobytes())
        file.truncate(1024 + 2 * n_tokens)


def test_a_core_prepares_a_hundred_million_tokens_a_second(tmp_path):
    """In processor time, so that what else runs here matters little; the file is in the page cache."""
    ids = np.random.default_rng(0).integers(0, 50257, 20_000_000).astype(np.uint16)
    batches = TrainBatches(TokenStream(make_shards(tmp_path, ids, [ids.size]), 50304), 1 << 19, 4096)
    steps = (ids.size - 1) >> 19
    rates = []
    for _ in range(5):
        start = time.process_time()
        for step in range(steps):
            batches.batch(step)
        rates.append((steps << 19) / (time.process_time() - start))
    assert max(rates) > 100e6


@pytest.mark.parametrize(("n_tokens", "steps"), [(100, 9), (101, 10), (102, 10), (1, 0)])
def test_the_steps_that_fit_are_those_that_can_be_read(tmp_path, n_tokens, steps):
    stream = TokenStream(make_shards(tmp_path, range(n_tokens), [n_tokens]))
    batches = TrainBatches(stream, 10, 5)
    batches.check(steps)
    for step in range(steps):
        batches.batch(step)
    with pytest.raises(
        ValueError, match=rf"train.steps={steps + 1} needs .* enough for {steps} steps.*data.repeat=true"
    ):
        batches.check(steps + 1)
    with pytest.raises(ValueError, match="outside the stream"):
        batches.batch(steps)
    TrainBatches(stream, 10, 5, repeat=True).check(10**6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 7), "train.length=7 must divide train.tokens_per_step=100"),
        ((100, 0), "train.length=0 must divide"),
        ((100, 200), "train.length=200 must divide"),
        ((100, 10, 0, 3), "3 processes cannot share the 10 rows of a step"),
        ((100, 10, 2, 2), "rank=2 is outside the 2 processes"),
    ],
)
def test_divisions_with_a_remainder_name_the_keys(stream, arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainBatches(stream, *arguments)


@pytest.mark.parametrize("length", [1, 5, 60, 300])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_validation_covers_the_same_tokens_at_every_length_and_world_size(stream, tokens, length, world_size):
    alone = list(validation_batches(stream, length, 300, 4))
    shared = {}
    for rank in range(world_size):
        for number, batch in enumerate(validation_batches(stream, length, 300, 4, rank, world_size)):
            shared[rank + number * world_size] = batch
    assert sorted(shared) == list(range(len(alone)))
    for number, (x, y) in enumerate(alone):
        assert x.shape == y.shape == (min(4, 300 // length - 4 * number), length)
        assert torch.equal(shared[number][0], x)
        assert torch.equal(shared[number][1], y)
    assert np.array_equal(torch.cat([x.flatten() for x, _ in alone]), tokens[:300])
    assert np.array_equal(torch.cat([y.flatten() for _, y in alone]), tokens[1:301])


def test_validation_refuses_before_the_first_batch(stream):
    with pytest.raises(ValueError, match=r"validation.tokens=300 must be a multiple .*validation.lengths, and 7"):
        validation_batches(stream, 7, 300, 1)
    with pytest.raises(ValueError, match=r"validation.tokens=1000 needs .* has 1000; .* validation.tokens=992"):
        validation_batches(stream, 8, 1000, 1)
    with pytest.raises(ValueError, match=r"no row of length 1000 fits; prepare more data, or take shorter valid"):
        validation_batches(stream, 1000, 1000, 1)
    with pytest.raises(ValueError, match="rows_per_batch=0"):
        validation_batches(stream, 10, 100, 0)


@pytest.fixture
def prepared(tmp_path):
    folder = tmp_path / "data"
    train = make_shards(folder, range(100), [60, 40])
    val = make_shards(folder, range(200, 230), [30], split="val")
    files = [describe_shard(path, path.name.split("_")[1], 1) for path in (*train, *val)]
    write_manifest(folder, {"vocab_size": 257, "files": files})
    return folder


def test_a_split_is_its_files_by_name_with_or_without_a_manifest(prepared):
    for _ in range(2):
        assert open_split(prepared, "train").read(0, 100).tolist() == list(range(100))
        assert open_split(prepared, "val", vocab_size=50304).read(0, 30).tolist() == list(range(200, 230))
        (prepared / "manifest.json").unlink(missing_ok=True)


def test_missing_data_is_refused_with_the_command_that_makes_it(tmp_path):
    folder = tmp_path / "sotu_bytes"
    command = f"python scripts/prepare_data.py source=sotu tokenizer=bytes out_dir={folder}"
    with pytest.raises(FileNotFoundError, match=f"no such folder; make it: {command}"):
        open_split(folder, "train")
    make_shards(folder, range(10), [10])
    with pytest.raises(FileNotFoundError, match=rf"no \*_val_\*.bin in it; make them: {command}"):
        open_split(folder, "val")


def test_an_error_names_the_key_of_the_command_that_gave_the_folder(tmp_path, prepared):
    with pytest.raises(FileNotFoundError, match=r"^data_dir=.*no such folder"):
        open_split(tmp_path / "nowhere", "val", key="data_dir")
    with pytest.raises(FileNotFoundError, match=r"^data_dir=.*no \*_test_\*.bin"):
        open_split(prepared, "test", key="data_dir")
    with pytest.raises(ValueError, match=r"^data_dir=.*prepared with a tokenizer"):
        open_split(prepared, "val", vocab_size=100, key="data_dir")


def test_a_folder_that_differs_from_its_manifest_is_refused_with_the_file(prepared):
    last = prepared / "some_train_000001.bin"
    write_shard(last, range(41))
    with pytest.raises(ValueError, match=r"some_train_000001.bin: ends at byte 1106, but manifest.json says 1104"):
        open_split(prepared, "train")
    last.unlink()
    with pytest.raises(FileNotFoundError, match=r"some_train_000001.bin: listed in manifest.json but missing"):
        open_split(prepared, "train")


def test_a_token_count_that_differs_from_the_manifest_is_refused(prepared):
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["files"][0]["tokens"] = 61
    write_manifest(prepared, manifest)
    with pytest.raises(ValueError, match=r"some_train_000000.bin: byte 8: 60 tokens, but manifest.json says 61"):
        open_split(prepared, "val")


def test_a_shard_that_the_manifest_does_not_list_is_refused(prepared):
    write_shard(prepared / "other_train_000009.bin", [1])
    with pytest.raises(ValueError, match=r"other_train_000009.bin: not listed"):
        open_split(prepared, "train")


def test_data_of_a_larger_vocabulary_is_refused_at_once(prepared):
    with pytest.raises(ValueError, match=r"tokenizer of 257 ids, but model.vocab_size=100"):
        open_split(prepared, "train", vocab_size=100)


ELSEWHERE = {"name": "../some_train_000000.bin", "split": "train", "bytes": 1104, "tokens": 40}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"files": 3}', '{"files": [{"name": "x"}]}', json.dumps({"files": [ELSEWHERE]})]
)
def test_a_damaged_manifest_is_named(prepared, text):
    (prepared / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json: .*delete the folder"):
        open_split(prepared, "train")
