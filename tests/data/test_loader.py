import gc
import json

import numpy as np
import pytest
import torch

from data.loader import TokenStream, TrainBatches, open_split, validation_batches
from data.manifest import describe_shard, write_manifest
from data.shards import write_shard


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


@pytest.mark.parametrize("text", ["{", "[]", '{"files": 3}', '{"files": [{"name": "x"}]}'])
def test_a_damaged_manifest_is_named(prepared, text):
    (prepared / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json: .*delete the folder"):
        open_split(prepared, "train")
