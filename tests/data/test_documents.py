"""Documents counted against a plain loop over the tokens."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

from data.documents import Bin, count_documents, draw_samples, histogram, median
from data.loader import TokenStream
from data.shards import write_shard
from data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
END = 256


@pytest.fixture
def bar():
    with tqdm(disable=True) as bar:
        yield bar


def make_stream(folder, ids, sizes):
    paths = []
    for number, part in enumerate(np.split(np.asarray(ids), np.cumsum(sizes)[:-1])):
        paths.append(folder / f"some_train_{number:06d}.bin")
        write_shard(paths[-1], part)
    return TokenStream(paths)


def lengths_by_hand(ids):
    """Lengths of the documents, and the tokens before the first, one token at a time."""
    lengths, headless = [], 0
    for token in ids:
        if token == END:
            lengths.append(1)
        elif lengths:
            lengths[-1] += 1
        else:
            headless += 1
    return Counter(lengths), headless


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_counted_across_shards_and_chunks(tmp_path, bar, monkeypatch, chunk, seed):
    monkeypatch.setattr("data.loader.SCANNED_AT_ONCE", chunk)
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random(200) < 0.08, END, rng.integers(0, 250, 200))
    if seed == 0:
        ids[0] = END
    found = count_documents(make_stream(tmp_path, ids, [3, 100, 1, 96]), END, bar)
    lengths, headless = lengths_by_hand(ids)
    assert found.lengths == lengths
    assert found.headless_tokens == headless
    assert (found.tokens, found.largest_id) == (200, max(ids))
    parts = np.split(ids, [3, 103, 104])
    assert list(found.by_file.values()) == [(part == END).sum() for part in parts]


def test_tokens_without_a_document_are_all_headless(tmp_path, bar):
    found = count_documents(make_stream(tmp_path, [1, 2, 3], [2, 1]), END, bar)
    assert (found.headless_tokens, found.lengths) == (3, Counter())


def test_the_histogram_has_a_bin_a_power_of_two():
    lengths = Counter({1: 3, 2: 1, 3: 2, 16: 5, 31: 1})
    bins = histogram(lengths)
    assert bins == [Bin(1, 3, 3), Bin(2, 3, 8), Bin(4, 0, 0), Bin(8, 0, 0), Bin(16, 6, 111)]
    assert histogram(Counter()) == []


@pytest.mark.parametrize("n", [1, 2, 9, 10])
def test_half_of_the_documents_are_no_longer_than_the_median(n):
    values = np.random.default_rng(n).integers(1, 20, n)
    assert median(Counter(values.tolist())) == sorted(values)[(n - 1) // 2]


def test_a_sample_is_a_document_from_its_start_on(tmp_path, monkeypatch):
    tokenizer = load_tokenizer("bytes")
    texts = ["first", "zweite \u2600", "\x1b[31mred\x07\n", "x" * 500]
    ids = np.concatenate([[*b"lost", 256], *([*text.encode(), 256] for text in texts)])
    stream = make_stream(tmp_path, ids[:-1], [9, len(ids) - 10])
    with tqdm(disable=True) as bar:
        documents = count_documents(stream, END, bar)
    monkeypatch.setattr("data.loader.SCANNED_AT_ONCE", 5)
    shown = {
        seed: {sample.text: sample.position for sample in draw_samples(stream, documents, tokenizer, 2, 20, seed)}
        for seed in range(30)
    }
    assert all(len(samples) == 2 for samples in shown.values())
    wanted = {"first": 4, "zweite \u2600": 10, "\ufffd[31mred\ufffd\n": 21, "x" * 20: 32}
    assert {text: position for samples in shown.values() for text, position in samples.items()} == wanted
    assert len(draw_samples(stream, documents, tokenizer, 9, 20, seed=0)) == 4
    assert draw_samples(stream, documents, tokenizer, 0, 20, seed=0) == []


def test_tokens_without_a_document_have_no_sample(tmp_path, bar):
    stream = make_stream(tmp_path, [1, 2, 3], [3])
    assert draw_samples(stream, count_documents(stream, END, bar), load_tokenizer("bytes"), 2, 10, seed=0) == []


COUNT = """
import sys
from pathlib import Path
from tqdm import tqdm
from data.documents import count_documents
from data.loader import TokenStream

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

paths = sorted(Path(sys.argv[1]).glob("*.bin"))
with tqdm(disable=True) as bar:
    count_documents(TokenStream(paths[:1]), 1, bar)
    before = peak()
    found = count_documents(TokenStream(paths), 1, bar)
print(found.tokens, found.lengths.total(), peak() - before)
"""


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Six shards of 20 million tokens in documents of 5 tokens: 24 million documents, 240 MB."""
    for number in range(6):
        write_shard(tmp_path / f"a_train_{number}.bin", np.tile(np.array([1, 2, 3, 4, 5], np.uint16), 4_000_000))
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    tokens, documents, added = map(int, ran.stdout.split())
    assert (tokens, documents) == (120_000_000, 24_000_000)
    assert added < 10e6
