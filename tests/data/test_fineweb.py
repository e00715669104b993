"""Against a local server with the hub's layout, which breaks off, corrupts, and answers 404, 429 and 503."""

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import hub as hub_module
from data.fineweb import Stream
from data.loader import open_split
from data.prepare import prepare
from data.shards import write_shard
from tests.hub_server import hub_server

ROOT = Path(__file__).resolve().parents[2]
REPO = "kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{k:06d}.bin" for k in range(1, 6))]
N_TOKENS = 50_000


def shard(folder, seed, n_tokens=N_TOKENS, largest=50256):
    ids = np.random.default_rng(seed).integers(0, largest, n_tokens, dtype=np.uint16)
    ids[:: n_tokens // 10] = largest
    write_shard(folder / "shard.bin", ids)
    return (folder / "shard.bin").read_bytes()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The public shards, 50,000 tokens each, on a server that the client of this process talks to, without waiting."""
    with hub_server() as running:
        for seed, name in enumerate(NAMES):
            running.files[REPO, name] = shard(tmp_path, seed)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(hub_module, "FIRST_WAIT", 0.001)
        yield running


@pytest.fixture
def out(tmp_path):
    return tmp_path / "shards" / "mine"


def stored(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


def published(server, shards):
    return {name: server.files[REPO, name] for name in NAMES[: shards + 1]}


def fetched(server):
    """The files that were asked for, with what was asked of them."""
    gets = [(path.split("/")[-1], part) for method, path, part in server.requests if method == "GET"]
    return [get for get in gets if get[0].endswith(".bin")]


def test_public_shards_become_a_prepared_folder(server, out):
    done = prepare("fineweb10b", out, shards=3)
    assert stored(out) == published(server, 3)
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES[:4], "manifest.json"])
    assert [entry["name"] for entry in done.manifest["files"]] == NAMES[:4]
    assert {entry["tokens"] for entry in done.manifest["files"]} == {N_TOKENS}
    assert {entry["documents"] for entry in done.manifest["files"]} == {10}
    assert (done.manifest["vocab_size"], done.manifest["shards"]) == (50257, 3)
    assert len(open_split(out, "train", vocab_size=50257)) == 3 * N_TOKENS
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_a_later_run_verifies_without_the_hub(server, out):
    prepare("fineweb10b", out, shards=2)
    server.requests.clear()
    again = prepare("fineweb10b", out, shards=2)
    assert not again.fresh
    assert server.requests == []


def test_a_later_run_names_corrupt_and_missing_files_and_fetches_only_those(server, out, capsys):
    first = prepare("fineweb10b", out, shards=4)
    raw = bytearray((out / NAMES[2]).read_bytes())
    raw[5000] ^= 1
    (out / NAMES[2]).write_bytes(raw)
    (out / NAMES[4]).unlink()
    server.requests.clear()
    again = prepare("fineweb10b", out, shards=4)
    assert again.manifest == first.manifest
    assert stored(out) == published(server, 4)
    assert sorted(name for name, _ in fetched(server)) == [NAMES[2], NAMES[4]]
    said = capsys.readouterr().err
    assert f"{NAMES[2]}: its SHA-256 is" in said
    assert f"{NAMES[4]}: listed in manifest.json but missing; fetching it again" in said
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_more_shards_are_added_to_those_that_are_there_and_fewer_are_a_part_of_them(server, out):
    prepare("fineweb10b", out, shards=2)
    server.requests.clear()
    assert prepare("fineweb10b", out, shards=4).manifest["shards"] == 4
    assert sorted(name for name, _ in fetched(server)) == NAMES[3:5]
    assert stored(out) == published(server, 4)
    server.requests.clear()
    assert not prepare("fineweb10b", out, shards=1).fresh
    assert server.requests == []
    with pytest.raises(ValueError, match="prepared with source=fineweb10b, now asked for source=fineweb100b"):
        prepare("fineweb100b", out, shards=1)


def test_broken_connections_go_on_where_they_broke(server, out, capsys):
    server.faults["GET", NAMES[1]] = [3000, 40_000, 0]
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    parts = [part for name, part in fetched(server) if name == NAMES[1]]
    assert parts == [None, "bytes=3000-", "bytes=43000-", "bytes=43000-"]
    assert server.sent[NAMES[1]] == len(server.files[REPO, NAMES[1]])
    assert capsys.readouterr().err.count(f"download {NAMES[1]}: RemoteProtocolError") == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_servers_are_asked_again(server, out, status):
    for method in ("HEAD", "GET"):
        server.faults[method, NAMES[1]] = [(status, {})] * hub_module.RETRIES
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


def test_the_waits_double_or_last_as_long_as_the_server_asks(server, out, monkeypatch, capsys):
    monkeypatch.setattr(hub_module, "FIRST_WAIT", 0.25)
    server.faults["GET", NAMES[1]] = [(503, {}), (503, {}), (429, {"Retry-After": "2"})]
    begin = time.monotonic()
    prepare("fineweb10b", out, shards=1)
    assert 0.25 + 0.5 + 2 < time.monotonic() - begin < 10
    assert f"download {NAMES[1]}: HTTP 429; again in 2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([(429, {})] * 9, r"HTTP 429\); run the same command again later: it goes on where it stopped"),
        ([(503, {})] * 9, r"HTTP 503\); run the same command again later: it goes on where it stopped"),
        ([(429, {"Retry-After": "9999"})], r"HTTP 429\); run the same command again later"),
        ([(403, {})], r"HTTP 403\)"),
    ],
)
def test_after_some_tries_there_is_one_error_and_the_next_start_fetches_only_the_rest(server, out, faults, message):
    server.faults["GET", NAMES[2]] = [5000, *faults]
    with pytest.raises(ConnectionError, match=rf"could not download {NAMES[2]} of {REPO} .*{message}"):
        prepare("fineweb10b", out, shards=2)
    assert not out.exists()
    server.faults.clear()
    server.requests.clear()
    before = dict(server.sent)
    prepare("fineweb10b", out, shards=2)
    assert stored(out) == published(server, 2)
    assert (NAMES[2], "bytes=5000-") in fetched(server)
    assert server.sent[NAMES[2]] - before[NAMES[2]] == len(server.files[REPO, NAMES[2]]) - 5000
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_a_file_that_arrives_corrupt_is_named_and_fetched_again(server, out, capsys):
    server.faults["GET", NAMES[1]] = ["corrupt", "corrupt"]
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)
    assert capsys.readouterr().err.count(f"{NAMES[1]}: its SHA-256 is") == 2


def test_a_file_that_always_arrives_corrupt_ends_in_one_error(server, out):
    server.faults["GET", NAMES[1]] = ["corrupt"] * 9
    with pytest.raises(ConnectionError, match=rf"{NAMES[1]} of {REPO} arrived damaged 3 times; .*SHA-256"):
        prepare("fineweb10b", out, shards=1)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda tmp_path: b"<html>" * 500, "byte 0: not a token shard"),
        (lambda tmp_path: shard(tmp_path, 0)[:-2], "truncated at byte"),
        (lambda tmp_path: shard(tmp_path, 0) + b"xx", "trailing bytes from byte"),
        (lambda tmp_path: shard(tmp_path, 0, largest=50257), "token 0 has id 50257, outside the 50257 ids of gpt2"),
    ],
)
def test_what_the_hub_has_must_be_a_whole_shard_of_gpt2_tokens(server, out, tmp_path, content, message):
    server.files[REPO, NAMES[1]] = content(tmp_path)
    with pytest.raises(ConnectionError, match=f"{NAMES[1]} .*{message}"):
        prepare("fineweb10b", out, shards=1)
    assert not out.exists()


def test_a_file_that_the_hub_replaced_meanwhile_is_not_mixed_with_the_old_one(server, out, tmp_path):
    server.faults["GET", NAMES[1]] = [5000, *[(403, {})]]
    with pytest.raises(ConnectionError):
        prepare("fineweb10b", out, shards=1)
    server.files[REPO, NAMES[1]] = shard(tmp_path, 99)
    prepare("fineweb10b", out, shards=1)
    assert stored(out) == published(server, 1)


def test_a_missing_file_and_a_missing_data_set_say_so_at_once(server, out):
    del server.files[REPO, NAMES[2]]
    with pytest.raises(ConnectionError, match=rf"could not find {NAMES[2]} of {REPO} .*HTTP 404.*it isn't there"):
        prepare("fineweb10b", out, shards=3)
    with pytest.raises(ConnectionError, match=r"of kjj0/fineweb100B-gpt2 .*HTTP 404.*it isn't there"):
        prepare("fineweb100b", out, shards=1)
    assert all(method == "HEAD" for method, _, _ in server.requests)


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(server, out, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=3 * len(server.files[REPO, NAMES[0]]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"GB are still to come, but the disk has .* ask for fewer shards"):
        prepare("fineweb10b", out, shards=3)
    assert fetched(server) == []


# The library `datasets` asks no other server, and imports faster.
LOCAL = {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "USE_TORCH": "0"}


def command(server_url, *words, **environment):
    return {
        "args": [sys.executable, "scripts/prepare_data.py", *map(str, words)],
        "cwd": ROOT,
        "env": {
            **os.environ,
            "HF_ENDPOINT": server_url,
            "USE_TORCH": "0",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            **environment,
        },
        "stderr": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }


def test_a_killed_download_goes_on_where_it_was(server, out):
    server.faults["GET", NAMES[2]] = [("stall", 5000)]
    words = ["source=fineweb10b", "shards=3", f"out_dir={out}"]
    with subprocess.Popen(**command(server.url, *words)) as process:
        deadline = time.monotonic() + 60
        part = out.with_name(".mine.partial")
        while not any(path.stat().st_size == 5000 for path in part.glob(f"{NAMES[2]}.*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    server.requests.clear()
    done = subprocess.run(**command(server.url, *words), check=False)
    assert done.returncode == 0, done.stderr
    assert stored(out) == published(server, 3)
    assert (NAMES[2], "bytes=5000-") in fetched(server)


@pytest.mark.parametrize("words", [("fineweb10b", "shards=1"), ("fineweb", "tokenizer=bytes")])
@pytest.mark.parametrize("offline", [{}, pytest.param({"HF_HUB_OFFLINE": "1"}, marks=pytest.mark.slow)])
def test_without_a_network_the_command_ends_in_seconds_and_says_what_to_do(tmp_path, words, offline):
    begin = time.monotonic()
    words = (f"source={words[0]}", words[1], f"out_dir={tmp_path / 'out'}")
    failed = subprocess.run(**command("http://127.0.0.1:9", *words, **offline), check=False)
    assert time.monotonic() - begin < 30  # most of it is the start of Python on a busy machine
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: {words[0]}: could not find ")
    assert failed.stderr.count("\n") == 1
    assert ("HF_HUB_OFFLINE" if offline else "check the network") in failed.stderr


TEXTS = "HuggingFaceFW/fineweb"
README = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=100)
    return file.getvalue()


C4_README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
---
"""


@pytest.fixture
def documents(server):
    """Three files of sample-10BT beside another subset."""
    documents = [[f"file {k} document {i} " * (i % 9 * 9) for i in range(700)] for k in range(3)]
    server.files[TEXTS, "README.md"] = README.encode()
    server.files[TEXTS, "data/CC-MAIN-2013-20/000_00000.parquet"] = parquet(id=["a"], text=["another subset"])
    for k, texts in enumerate(documents):
        content = parquet(id=[str(i) for i in range(len(texts))], text=texts)
        server.files[TEXTS, f"sample/10BT/{k:03d}_00000.parquet"] = content
    return [text for texts in documents for text in texts if text]


def test_fineweb_is_streamed_tokenized_and_gone_on_with_after_a_failure(server, documents, out, tmp_path):
    words = [
        "source=fineweb",
        "subset=sample-10BT",
        "tokenizer=bytes",
        "shard_tokens=90000",
        f"out_dir={out}",
    ]
    home = {"HF_HOME": str(tmp_path / "hf")}
    last = "sample/10BT/002_00000.parquet"
    server.faults["GET", last] = [(404, {})] * 99
    failed = subprocess.run(**command(server.url, *words, **home), check=False)
    assert failed.returncode == 2, failed.stderr
    error = failed.stderr.splitlines()[-1]
    assert error.startswith("error: source=fineweb: could not read subset=sample-10BT of HuggingFaceFW/fineweb")
    assert not out.exists()
    server.faults.clear()
    done = subprocess.run(**command(server.url, *words, **home), check=False)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stderr
    expected = [id for text in documents for id in (256, *text.encode())]
    assert [*read(out, "val"), *read(out, "train")] == expected
    assert len(read(out, "val")) == 90_000


def test_c4_is_streamed_and_tokenized_until_there_are_enough_shards(server, out, tmp_path):
    texts = [f"page {i} says this and that" for i in range(900)]
    server.files["allenai/c4", "README.md"] = C4_README.encode()
    for k in range(2):
        lines = [{"text": text, "url": "http://a", "timestamp": "2019-04-25T12:57:54Z"} for text in texts[k::2]]
        content = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
        server.files["allenai/c4", f"en/c4-train.{k:05d}-of-00002.json.gz"] = content
    words = ["source=c4", "tokenizer=bytes", "shard_tokens=5000", "shards=2", f"out_dir={out}"]
    done = subprocess.run(**command(server.url, *words, HF_HOME=str(tmp_path / "hf")), check=False)
    assert done.returncode == 0, done.stderr
    expected = [id for text in (*texts[0::2], *texts[1::2]) for id in (256, *text.encode())]
    assert [*read(out, "val"), *read(out, "train")] == expected[:15_000]
    assert len(read(out, "val")) == 5000
    assert json.loads((out / "manifest.json").read_text())["dataset"] == "allenai/c4"


def read(folder, split):
    stream = open_split(folder, split)
    return stream.read(0, len(stream)).tolist()


@pytest.mark.slow
def test_an_unknown_subset_lists_the_known_ones(server, documents, out, tmp_path):
    words = ["source=fineweb", "subset=sample-1T", "tokenizer=bytes", f"out_dir={out}"]
    failed = subprocess.run(**command(server.url, *words, HF_HOME=str(tmp_path / "hf")), check=False)
    assert failed.returncode == 2
    assert "sample-1T" in failed.stderr
    assert "sample-10BT" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_the_name_of_a_subset_says_how_long_it_is_where_it_does():
    subsets = {"sample-10BT": 1e10, "sample-350BT": 3.5e11, "CC-MAIN-2024-10": None, "default": None}
    assert {subset: Stream("fineweb", subset).about_tokens for subset in subsets} == subsets
