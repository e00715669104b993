import json

import numpy as np
import pytest

from data import fineweb
from data import prepare as module
from data.loader import open_split
from data.prepare import prepare
from data.shards import read_shard, write_shard
from data.sources import sotu_files

DOCUMENTS = [f"document {k} " * (k % 7 + 1) for k in range(25)]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "shards" / "mine"


def ids(documents):
    """The tokens that bytes gives to a sequence of documents, each led by 256."""
    return [id for document in documents for id in (256, *document.encode())]


def stored(folder, split):
    stream = open_split(folder, split)
    return stream.read(0, len(stream)).tolist()


def leftovers(out):
    return sorted(path.name for path in out.parent.iterdir() if path != out) if out.parent.exists() else []


@pytest.mark.parametrize("shard_tokens", [50, 64, 10**8])
@pytest.mark.parametrize("batch_characters", [1, 100, 1 << 22])
def test_the_tokens_are_the_documents_in_order_whatever_the_shard_and_batch_sizes(
    text, out, monkeypatch, shard_tokens, batch_characters
):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", batch_characters)
    done = prepare("text", out, "bytes", text, shard_tokens, val_every=10)
    held_out = [DOCUMENTS[9], DOCUMENTS[19]]
    assert stored(out, "val") == ids(held_out)
    assert stored(out, "train") == ids(d for d in DOCUMENTS if d not in held_out)
    sizes = [entry["tokens"] for entry in done.manifest["files"] if entry["split"] == "train"]
    assert all(size == shard_tokens for size in sizes[:-1])
    assert leftovers(out) == []


def test_the_manifest_says_what_each_file_holds(text, out):
    done = prepare("text", out, "bytes", text, shard_tokens=300)
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
    first = prepare("text", out, "bytes", text)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare("text", out, "bytes", text)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.manifest == first.manifest
    assert again.summary().startswith("already prepared: ")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_a_finished_folder_with_a_damaged_shard_is_not_called_done(text, out):
    prepare("text", out, "bytes", text)
    shard = out / "text_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"text_train_000001.bin: ends at byte"):
        prepare("text", out, "bytes", text)
    assert prepare("text", out, "bytes", text, overwrite=True).fresh


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"val_every": 5}, "prepared with val_every=10, now asked for val_every=5"),
        ({"shard_tokens": 64}, "shard_tokens=100000000, now asked for shard_tokens=64"),
        ({"tokenizer": "gpt2"}, "tokenizer=bytes, now asked for tokenizer=gpt2"),
        ({"val_tokens": 9}, "val_every=10, now asked for val_every=None"),
    ],
)
def test_other_arguments_over_a_finished_folder_name_the_difference_and_overwrite_replaces_it(
    text, out, changed, message
):
    arguments = {"source": "text", "out_dir": out, "tokenizer": "bytes", "path": text}
    prepare(**arguments)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=f"{message}; choose another out_dir, or add overwrite=true"):
        prepare(**{**arguments, **changed})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert prepare(**{**arguments, **changed}, overwrite=True).fresh
    assert not prepare(**{**arguments, **changed}).fresh
    assert leftovers(out) == []


def test_changed_text_is_not_taken_for_done(text, out):
    prepare("text", out, "bytes", text)
    text.write_text(text.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ValueError, match="prepared with source_bytes="):
        prepare("text", out, "bytes", text)


def test_other_peoples_files_are_never_replaced(text, out):
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds files but no manifest.json"):
        prepare("text", out, "bytes", text)
    with pytest.raises(ValueError, match=r"also holds thesis.tex, which is not prepared data"):
        prepare("text", out, "bytes", text, overwrite=True)
    (out / "thesis.tex").rename(out.parent / "thesis.tex")
    prepare("text", out, "bytes", text)
    (out.parent / "thesis.tex").rename(out / "thesis.tex")
    with pytest.raises(ValueError, match=r"also holds thesis.tex"):
        prepare("text", out, "bytes", text, overwrite=True)
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        prepare("text", text, "bytes", text)


def test_an_interrupted_preparation_leaves_nothing_and_the_next_one_succeeds(text, out, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_manifest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare("text", out, "bytes", text)
    assert not out.exists()
    assert leftovers(out) == []
    (out.parent / ".mine.partial").mkdir()  # what a killed process leaves
    (out.parent / ".mine.partial" / "text_train_000007.bin").write_bytes(b"half")
    prepare("text", out, "bytes", text)
    assert stored(out, "val") == ids([DOCUMENTS[9], DOCUMENTS[19]])
    assert leftovers(out) == []


def test_a_failing_overwrite_keeps_the_old_data(text, out):
    prepare("text", out, "bytes", text)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    text.write_text(text.read_text() + "not json\n")
    with pytest.raises(ValueError, match="line 26 is not JSON"):
        prepare("text", out, "bytes", text, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert leftovers(out) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "c4"}, "source=c4 is unknown; choose one of: sotu, text, fineweb10b"),
        ({"source": "text"}, "path is not set; source=text needs path="),
        ({"source": "sotu", "path": "x"}, "path=x is only for source=text"),
        ({"source": "sotu", "shards": 3}, "shards=3 is only for fineweb10b, fineweb100b"),
        ({"source": "sotu", "shard_tokens": 0}, "shard_tokens=0: must be a whole number, 1 to 2147483647"),
        ({"source": "sotu", "shard_tokens": 1e6}, "shard_tokens=1000000.0: must be a whole number"),
        ({"source": "sotu", "val_every": 1}, "val_every=1: must be a whole number, 2 to"),
        ({"source": "sotu", "val_tokens": -1}, "val_tokens=-1: must be a whole number, 1 or more"),
        ({"source": "sotu", "tokenizer": "gpt4"}, "tokenizer=gpt4 is unknown"),
        ({"source": "sotu", "overwrite": "no"}, "overwrite=no: must be true or false"),
        ({"source": "fineweb10b", "tokenizer": "bytes", "shards": 1}, "set tokenizer=gpt2"),
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
        (["a"], {}, "val_every=10 puts none of the 1 documents into validation"),
        (["abc"], {"val_tokens": 4}, "val_tokens=4 leaves none of the 4 tokens for training"),
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
def hub(monkeypatch):
    """A hub of small shards; `hub.asked` lists the downloads, `hub.broken` the files that fail."""

    class Hub:
        def __init__(self):
            self.asked, self.broken = [], set()

        def download(self, repo, name, repo_type, local_dir):
            self.asked.append((repo, name, repo_type))
            if name in self.broken:
                raise ConnectionError("no route")
            (local_dir / ".cache").mkdir(exist_ok=True)
            write_shard(local_dir / name, [50256, 1, 2, 50256, len(self.asked)])
            return str(local_dir / name)

    hub = Hub()
    monkeypatch.setattr(fineweb, "hf_hub_download", hub.download)
    return hub


def test_public_shards_become_a_prepared_folder(out, hub):
    done = prepare("fineweb10b", out, shards=2)
    names = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert hub.asked == [("kjj0/fineweb10B-gpt2", name, "dataset") for name in names]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "manifest.json"])
    assert stored(out, "train") == [50256, 1, 2, 50256, 2, 50256, 1, 2, 50256, 3]
    assert (done.total("documents"), done.manifest["vocab_size"]) == (6, 50257)
    assert not prepare("fineweb10b", out, shards=2).fresh
    with pytest.raises(ValueError, match="prepared with shards=2, now asked for shards=3"):
        prepare("fineweb10b", out, shards=3)


def test_an_unreachable_hub_says_what_to_do_and_the_next_start_keeps_what_came(out, hub):
    hub.broken.add("fineweb_train_000002.bin")
    with pytest.raises(ValueError, match=r"could not download fineweb_train_000002.bin .*check the network"):
        prepare("fineweb100b", out, shards=2)
    assert not out.exists()
    assert (out.parent / ".mine.partial" / "fineweb_train_000001.bin").exists()
    prepare("fineweb100b", out, shards=1)
    assert hub.asked[0][0] == "kjj0/fineweb100B-gpt2"
    assert len(open_split(out, "train")) == 5
    assert leftovers(out) == []


def test_a_download_that_is_not_a_shard_is_refused(out, hub, monkeypatch):
    def page(repo, name, repo_type, local_dir):
        (local_dir / name).write_bytes(b"<html>" * 500)
        return str(local_dir / name)

    monkeypatch.setattr(fineweb, "hf_hub_download", page)
    with pytest.raises(ValueError, match=r"fineweb_val_000000.bin: byte 0: not a token shard"):
        prepare("fineweb10b", out, shards=1)
    assert not out.exists()
