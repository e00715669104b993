"""FineWeb and C4 as text, streamed from a local server with the hub's layout that breaks off, corrupts and refuses."""

import functools
import gzip
import io
import json
import logging
import random
import subprocess
import sys

import datasets.config
import httpx2
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import stream as stream_module
from data.loader import open_split
from data.prepare import prepare
from data.stream import Stream, _telling_apart
from tests.hub_server import COMMIT, ROOT, command

TEXTS = "HuggingFaceFW/fineweb"
README = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""
README_WITH_COLUMNS = (
    README.removesuffix("---\n")
    + """dataset_info:
- config_name: sample-10BT
  features:
  - {name: id, dtype: string}
  - {name: text, dtype: string}
  splits:
  - {name: train}
---
"""
)
C4_README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
---
"""
FILES = [f"sample/10BT/{k:03d}_00000.parquet" for k in range(3)]
WORDS = ["source=fineweb", "subset=sample-10BT", "tokenizer=bytes", "shard_tokens=90000"]


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=100)
    return file.getvalue()


@pytest.fixture
def documents(hub):
    """Three files of sample-10BT beside another subset; the documents that have a text."""
    documents = [[f"file {k} document {i} " * (i % 9 * 9) for i in range(700)] for k in range(3)]
    hub.files[TEXTS, "README.md"] = README.encode()
    hub.files[TEXTS, "data/CC-MAIN-2013-20/000_00000.parquet"] = parquet(id=["a"], text=["another subset"])
    for name, texts in zip(FILES, documents, strict=True):
        hub.files[TEXTS, name] = parquet(id=[str(i) for i in range(len(texts))], text=texts)
    return [text for texts in documents for text in texts if text]


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """The libraries of this process talk to the server, keep their caches apart, and don't wait long."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    for name in ("HF_CACHE_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setattr(datasets.config, name, tmp_path / name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    quick = functools.partial(huggingface_hub.utils.http_backoff, max_retries=1, base_wait_time=0.001)
    monkeypatch.setattr("huggingface_hub.hf_file_system.http_backoff", quick)


def prepare_here(out):
    return prepare("fineweb", out, tokenizer="bytes", shard_tokens=90_000)


def tokens(texts):
    return [id for text in texts for id in (256, *text.encode())]


def read(folder, split):
    stream = open_split(folder, split)
    return stream.read(0, len(stream)).tolist()


def read_all(folder):
    return [*read(folder, "val"), *read(folder, "train")]


def test_fineweb_is_streamed_tokenized_and_gone_on_with_after_a_failure(hub, documents, out, tmp_path):
    words = [*WORDS, f"out_dir={out}"]
    home = {"HF_HOME": str(tmp_path / "hf")}
    hub.faults["GET", FILES[2]] = [(404, {})] * 99
    failed = subprocess.run(**command(hub.url, *words, **home), check=False)
    assert failed.returncode == 2, failed.stderr
    (error,) = failed.stderr.splitlines()
    assert error.startswith(f"error: source=fineweb: could not read {FILES[2]} of HuggingFaceFW/fineweb")
    assert not out.exists()
    hub.faults.clear()
    hub.requests.clear()
    hub.commit = "b" * 40  # meanwhile there is a newer version; the first start's is gone on with
    done = subprocess.run(**command(hub.url, *words, **home), check=False)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stderr
    read_now = {path for _, path, _ in hub.requests if path.endswith(".parquet")}
    assert len(read_now) > 1
    assert all(f"/resolve/{COMMIT}/" in path for path in read_now), read_now
    assert read_all(out) == tokens(documents)
    assert len(read(out, "val")) == 90_000


def test_c4_is_streamed_and_tokenized_until_there_are_enough_shards(hub, out, tmp_path):
    texts = [f"page {i} says this and that" for i in range(900)]
    hub.files["allenai/c4", "README.md"] = C4_README.encode()
    for k in range(2):
        lines = [{"text": text, "url": "http://a", "timestamp": "2019-04-25T12:57:54Z"} for text in texts[k::2]]
        content = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
        hub.files["allenai/c4", f"en/c4-train.{k:05d}-of-00002.json.gz"] = content
    words = ["source=c4", "tokenizer=bytes", "shard_tokens=5000", "shards=2", f"out_dir={out}"]
    done = subprocess.run(**command(hub.url, *words, HF_HOME=str(tmp_path / "hf")), check=False)
    assert done.returncode == 0, done.stderr
    assert read_all(out) == tokens([*texts[0::2], *texts[1::2]])[:15_000]
    assert len(read(out, "val")) == 5000
    assert json.loads((out / "manifest.json").read_text())["dataset"] == "allenai/c4"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault", [(429, {}), (429, {"Retry-After": "0"}), (503, {}), 3000, 0])
def test_what_fails_for_a_while_in_the_middle_is_read_again(hub, documents, out, fault, capsys):
    """Twice for what huggingface_hub tries again by itself, so that it is our turn."""
    hub.faults["GET", FILES[1]] = [fault] * 3
    prepare_here(out)
    assert read_all(out) == tokens(documents)
    assert f"read {FILES[1]}: " in capsys.readouterr().err
    assert not hub.faults["GET", FILES[1]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault", [(429, {}), (503, {}), 3000])
def test_what_fails_for_long_in_the_middle_ends_in_one_error_and_the_same_command_goes_on(
    hub, documents, out, fault, capsys
):
    hub.files[TEXTS, "README.md"] = README_WITH_COLUMNS.encode()  # as FineWeb's; so no file is read for them
    hub.faults["GET", FILES[2]] = [fault] * 999
    with pytest.raises(
        ConnectionError, match=rf"could not read {FILES[2]} of {TEXTS} .*: it goes on where it stopped$"
    ):
        prepare_here(out)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == stream_module.RETRIES
    assert all(line.startswith(f"read {FILES[2]}: ") and line.endswith("again in 0 s") for line in said)
    hub.faults.clear()
    hub.requests.clear()
    prepare_here(out)
    assert read_all(out) == tokens(documents)
    asked = {path.partition("resolve/")[2].partition("/")[2] for method, path, _ in hub.requests if method == "GET"}
    assert FILES[0] not in asked  # it had been tokenized


@pytest.mark.usefixtures("here")
def test_a_network_that_dies_in_the_middle_ends_in_one_error(hub, documents, out, monkeypatch):
    before = Stream._read

    def dies(self, start):
        for index, piece in enumerate(before(self, start)):
            if index == 100:
                hub.die()
            yield piece

    monkeypatch.setattr(Stream, "_read", dies)
    with pytest.raises(ConnectionError, match=r"could not read sample/10BT/00\d_.*ConnectError.*it goes on where"):
        prepare_here(out)


@pytest.mark.usefixtures("here")
def test_a_file_that_arrives_damaged_is_named_and_fetched_again(hub, documents, out, capsys):
    hub.faults["GET", FILES[1]] = ["corrupt", "corrupt"]
    prepare_here(out)
    assert read_all(out) == tokens(documents)
    assert capsys.readouterr().err.count(f"{FILES[1]}: ArrowInvalid: ") == 2


@pytest.mark.usefixtures("here")
def test_a_file_that_is_damaged_ends_in_one_error_and_what_was_written_is_kept(hub, documents, out, capsys):
    intact = hub.files[TEXTS, FILES[2]]
    hub.files[TEXTS, FILES[2]] = bytes(len(intact))
    with pytest.raises(ConnectionError, match=rf"{FILES[2]} of {TEXTS} arrived damaged 3 times; .*ArrowInvalid"):
        prepare_here(out)
    assert len(capsys.readouterr().err.splitlines()) == 2
    hub.files[TEXTS, FILES[2]] = intact
    prepare_here(out)
    assert "going on after" in capsys.readouterr().err
    assert read_all(out) == tokens(documents)


@pytest.mark.usefixtures("here")
def test_rows_of_another_kind_in_a_later_file_are_damage_not_a_users_mistake(hub, documents, out):
    hub.files[TEXTS, FILES[2]] = parquet(id=["a"], body=["no text"])
    with pytest.raises(ConnectionError, match=rf"{FILES[2]} of {TEXTS} arrived damaged"):
        prepare_here(out)
    assert out.with_name(".mine.partial").exists()


@pytest.mark.usefixtures("here")
def test_a_subset_without_texts_says_which_columns_there_are(hub, documents, out):
    for name in FILES:
        hub.files[TEXTS, name] = parquet(id=["a"], body=["no text"])
    with pytest.raises(
        ValueError, match=r'^source=fineweb subset=sample-10BT: .* has no column "text" there, but id, body; choose'
    ):
        prepare_here(out)
    assert not out.parent.exists() or not list(out.parent.iterdir())


@pytest.mark.usefixtures("here")
def test_a_row_without_a_text_is_an_empty_document(hub, documents, out):
    hub.files[TEXTS, FILES[0]] = parquet(id=["a", "b", "c"], text=["one", None, "two"])
    done = prepare_here(out)
    assert read_all(out)[:8] == tokens(["one", "two"])
    assert done.manifest["empty_documents"] == 1 + 2 * len([i for i in range(700) if i % 9 == 0])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault", [(429, {}), "corrupt"])
def test_the_libraries_say_nothing_in_their_own_words(hub, documents, out, fault):
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).addHandler(handler)
    hub.faults["GET", FILES[1]] = [fault] * 2
    prepare_here(out)
    for name in ("datasets", "huggingface_hub"):
        logging.getLogger(name).removeHandler(handler)
    assert not said.getvalue()


@pytest.mark.usefixtures("here")
def test_the_libraries_are_left_as_they_were(hub, documents, out):
    def settings():
        retries = {name: value for name, value in vars(datasets.config).items() if name.startswith("STREAMING")}
        return retries, logging.getLogger("datasets").level, logging.getLogger("huggingface_hub").level

    before = settings()
    assert max(value for name, value in before[0].items() if name.endswith("MAX_RETRIES")) > 1
    assert logging.CRITICAL not in before[1:]
    prepare_here(out)
    hub.faults["GET", FILES[0]] = [(503, {})] * 999
    with pytest.raises(ConnectionError):
        prepare_here(out.with_name("other"))
    assert settings() == before


@pytest.mark.parametrize("chained", [True, False])
def test_what_the_network_did_is_found_under_other_errors(chained):
    def work():
        try:
            raise httpx2.ConnectError("unplugged")
        except httpx2.ConnectError as error:
            if chained:
                raise OSError("can't read") from error
            raise OSError("can't read")  # noqa: B904

    with pytest.raises(httpx2.ConnectError, match="unplugged"):
        _telling_apart(work)


def test_positions_of_an_older_version_are_refused(hub, documents, out):
    unfinished = out.with_name(".mine.partial")
    unfinished.mkdir(parents=True)
    arguments = {
        "source": "fineweb",
        "dataset": TEXTS,
        "subset": "sample-10BT",
        "tokenizer": "bytes",
        "shard_tokens": 90_000,
        "val_every": None,
        "val_tokens": 90_000,
        "shards": None,
    }
    progress = {"identity": {}, "files": [], "checkpoint": None}
    (unfinished / "progress.json").write_text(json.dumps({"arguments": arguments, "progress": progress}))
    with pytest.raises(ValueError, match=r"source=fineweb: .* add overwrite=true to start over"):
        prepare_here(out)


MEASURE = """
import sys
from data.prepare import prepare
prepare("fineweb", sys.argv[1], tokenizer="bytes", shard_tokens=1 << 18, workers=2)
print(int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_stream(hub, out, tmp_path):
    """Files of 6 MB, of which some batches are in memory: few of them, then three times as many."""
    hub.files[TEXTS, "README.md"] = README.encode()
    hub.files[TEXTS, "data/CC-MAIN-2013-20/000_00000.parquet"] = parquet(id=["a"], text=["another subset"])
    peaks = []
    for files in (range(8), range(8, 24)):
        for k in files:
            texts = [f"{k} {i} " + random.Random(k * 1000 + i).randbytes(3000).hex() for i in range(1000)]
            hub.files[TEXTS, f"sample/10BT/{k:03d}_00000.parquet"] = parquet(id=texts[:1] * 1000, text=texts)
        words = [sys.executable, "-c", MEASURE, str(out.with_name(f"{files[-1]}"))]
        environment = {**command(hub.url)["env"], "HF_HOME": str(tmp_path / f"hf{files[-1]}")}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 30, f"{peaks} MB"  # of 96 MB more


@pytest.mark.slow
def test_an_unknown_subset_lists_the_known_ones(hub, documents, out, tmp_path):
    words = ["source=fineweb", "subset=sample-1T", "tokenizer=bytes", f"out_dir={out}"]
    failed = subprocess.run(**command(hub.url, *words, HF_HOME=str(tmp_path / "hf")), check=False)
    assert failed.returncode == 2
    assert "sample-1T" in failed.stderr
    assert "sample-10BT" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_the_name_of_a_subset_says_how_long_it_is_where_it_does():
    subsets = {"sample-10BT": 1e10, "sample-350BT": 3.5e11, "CC-MAIN-2024-10": None, "default": None}
    assert {subset: Stream("fineweb", subset).about_tokens for subset in subsets} == subsets
