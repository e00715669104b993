"""What inspect_data.py says of a folder, and what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from data.manifest import describe_shard, write_manifest
from data.shards import write_shard
from scripts import inspect_data
from tests.tiny_run import refusal, run

# Training: 3 tokens of a document that starts elsewhere, then documents of 1, 6, 7 and 100 tokens, in two files.
TEXTS = ["", "hello", "worlds", "y" * 99]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    ids = np.concatenate([[1, 2, 3], *([256, *text.encode()] for text in TEXTS)])
    parts = {"train_000001": ids[:12], "train_000002": ids[12:], "val_000000": np.array([256, 97, 98])}
    entries = []
    for name, part in parts.items():
        path = folder / f"some_{name}.bin"
        write_shard(path, part)
        entries.append(describe_shard(path, name.split("_")[0], int((part == 256).sum())))
    write_manifest(folder, {"source": "text", "tokenizer": "bytes", "vocab_size": 257, "files": entries})
    return folder


def edit_manifest(folder: Path, **changes: object) -> None:
    """Changes keys of the first file's entry."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0] |= changes
    write_manifest(folder, manifest)


def test_files_tokens_documents_and_their_lengths_are_told(folder: Path, capsys: pytest.CaptureFixture):
    assert run(inspect_data.main, [f"path={folder}"]) == 0
    text = capsys.readouterr().out
    assert "source=text, tokenizer=bytes (257 ids)" in text
    head, train, val = (line.split() for line in text.splitlines()[2:5])
    assert head == ["files", "tokens", "bytes", "largest", "id", "documents", "shortest", "median", "mean", "longest"]
    assert train == ["train", "2", "117", "2,282", "256", "4", "1", "6", "28", "100"]
    assert val == ["val", "1", "3", "1,030", "256", "1", "3", "3", "3", "3"]
    assert "train begins with 3 tokens of a document that starts elsewhere" in text
    assert "manifest.json: 3 files, sizes, tokens and documents agree (sha256=true" in text


def test_the_histogram_shares_out_documents_and_tokens(folder: Path, capsys: pytest.CaptureFixture):
    run(inspect_data.main, [f"path={folder}", "samples=0"])
    text = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.search(r"\d%", line)]
    assert rows[0] == ["1", "1", "20.0%", "0.9%", "#" * 20]
    assert rows[1] == ["2 to 3", "1", "20.0%", "2.6%", "#" * 20]
    assert rows[2] == ["4 to 7", "2", "40.0%", "11.1%", "#" * 40]
    assert rows[3] == ["8 to 15", "0", "0.0%", "0.0%"]
    assert rows[-1] == ["64 to 127", "1", "20.0%", "85.5%", "#" * 20]
    assert len(rows) == 7


def test_samples_are_decoded_and_follow_the_seed(folder: Path, capsys: pytest.CaptureFixture):
    shown = []
    for seed in (0, 0, 1):
        run(inspect_data.main, [f"path={folder}", "samples=2", "sample_tokens=3", f"seed={seed}"])
        text = capsys.readouterr().out
        shown.append(re.findall(r"^--- train, the document that starts at token (\d+):\n(.*)$", text, re.MULTILINE))
    assert len(shown[0]) == 2
    assert set(shown[0] + shown[2]) <= {("3", ""), ("4", "hel"), ("10", "wor"), ("17", "yyy")}
    assert shown[0] == shown[1] != shown[2]


def test_contents_are_compared_when_asked_for(folder: Path, capsys: pytest.CaptureFixture):
    assert run(inspect_data.main, [f"path={folder}", "sha256=true"]) == 0
    assert "sizes, tokens, documents and SHA-256 agree" in capsys.readouterr().out
    path = folder / "some_train_000002.bin"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1  # another letter
    path.write_bytes(raw)
    assert run(inspect_data.main, [f"path={folder}"]) == 0
    line = refusal(inspect_data.main, [f"path={folder}", "sha256=true"], capsys)
    assert f"{path}: its SHA-256" in line


def test_public_shards_without_a_manifest_need_the_tokenizer_said(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "manifest.json").unlink()
    for path in folder.glob("*_val_*"):
        path.unlink()
    line = refusal(inspect_data.main, [f"path={folder}"], capsys)
    assert "no manifest.json says which tokenizer made it; set tokenizer=gpt2 or bytes" in line
    assert run(inspect_data.main, [f"path={folder}", "tokenizer=bytes"]) == 0
    text = capsys.readouterr().out
    assert "no manifest.json to compare with" in text
    assert "val" not in text.splitlines()[4]


def test_a_picture_is_written_on_demand(folder: Path, capsys: pytest.CaptureFixture):
    out = folder.parent / "new" / "lengths.png"
    assert run(inspect_data.main, [f"path={folder}", "plot=true", f"out={out}"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert str(out) in capsys.readouterr().out


def test_tokens_without_a_document_are_told_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_shard(tmp_path / "a_train_1.bin", [1, 2, 3])
    assert run(inspect_data.main, [f"path={tmp_path}", "tokenizer=bytes"]) == 0
    text = capsys.readouterr().out
    assert "no document starts in it" in text
    assert "train begins with 3 tokens" in text
    line = refusal(inspect_data.main, [f"path={tmp_path}", "tokenizer=bytes", "plot=true"], capsys)
    assert "plot=true: no document starts" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["path=nowhere"], "path=nowhere: no such folder; scripts/prepare_data.py makes one"),
        (["path={folder}/some_val_000000.bin"], "some_val_000000.bin is a file; give the folder"),
        (["path={folder}/.."], "no *_train_*.bin and no *_val_*.bin in it"),
        (["path={folder}", "tokenizer=gpt2"], "tokenizer=gpt2, but {folder}/manifest.json says bytes"),
        (["path={folder}", "samples=-1"], "samples=-1 must be at least 0"),
        (["path={folder}", "sample_tokens=0"], "sample_tokens=0 must be at least 1"),
        (["path={folder}", "seed=-1"], "seed=-1 must be at least 0"),
        (["path={folder}", "sha256=maybe"], "sha256"),
        ([], "path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture):
    line = refusal(inspect_data.main, [word.format(folder=folder) for word in words], capsys)
    assert message.format(folder=folder) in line


def test_an_unknown_tokenizer_is_refused(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "manifest.json").unlink()
    line = refusal(inspect_data.main, [f"path={folder}", "tokenizer=spm"], capsys)
    assert "tokenizer=spm is unknown" in line
    line = refusal(inspect_data.main, [f"path={folder}", "tokenizer=bytes", "sha256=true"], capsys)
    assert "has no manifest.json to compare with" in line


def test_damage_names_the_file(folder: Path, capsys: pytest.CaptureFixture):
    edit_manifest(folder, documents=7)
    line = refusal(inspect_data.main, [f"path={folder}"], capsys)
    assert "some_train_000001.bin: 3 documents start in it, but manifest.json says 7" in line
    edit_manifest(folder, tokens=11)
    line = refusal(inspect_data.main, [f"path={folder}"], capsys)
    assert "some_train_000001.bin: byte 8: 12 tokens, but manifest.json says 11" in line
    edit_manifest(folder, tokens=12)
    path = folder / "some_val_000000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: ends at byte 1029" in refusal(inspect_data.main, [f"path={folder}"], capsys)


def test_an_id_beyond_the_tokenizer_names_the_token(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_shard(tmp_path / "a_train_1.bin", [256, 1, 300])
    line = refusal(inspect_data.main, [f"path={tmp_path}", "tokenizer=bytes"], capsys)
    assert "a_train_1.bin: token 2 has id 300, but the vocabulary has 257 ids" in line
