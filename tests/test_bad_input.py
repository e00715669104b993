"""What a user can get wrong: one line that names key, value and remedy, exit code 2, and nothing half-written."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from data.shards import write_shard
from scripts import evaluate
from tests.tiny_run import ROOT, listing, refusal, run, tiny_words, write_tiny_data

TRAIN, VAL = "tiny_train_000001.bin", "tiny_val_000000.bin"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
SCALE_INVARIANT = "position=scale_invariant_p_rope"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with tiny data in data/."""
    write_tiny_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_data(folder / "data")
    assert run(train.main, tiny_words(folder)) == 0
    return folder


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["position=magic"], ["position=magic", "choose one of", "p_rope"]),
        (["model=1b"], ["model=1b", "choose one of", "162m"]),
        (["train.stepz=3"], ["train.stepz=3", "did you mean train.steps?"]),
        ([SCALE_INVARIANT, "position.logits.tau=0"], ["position.logits.tau=0", "above 0"]),
        ([SCALE_INVARIANT, "position.logits.tau=-1"], ["position.logits.tau=-1", "above 0"]),
        ([SCALE_INVARIANT, "position.logits.tau=nan"], ["position.logits.tau=nan", "finite"]),
        ([SCALE_INVARIANT, "position.logits.alpha=1"], ["position.logits.alpha=1", "position.logits.beta", "both"]),
        ([SCALE_INVARIANT, "position.logits.slope=1"], ["position.logits.slope=1", "tau"]),
        ([SCALE_INVARIANT, "position.rotary.tau=1"], ["position.rotary.tau=1", "base"]),
        ([SCALE_INVARIANT, "position.logits.kind=magic"], ["position.logits.kind=magic", "scale_invariant"]),
        ([SCALE_INVARIANT, "position.query_scale.kind=logn"], ["position.query_scale.kind=logn", "allow_two_temp"]),
        (["position=rope", "position.rotary.base=0"], ["position.rotary.base=0", "above 0"]),
        (["model.width=33"], ["model.width=33", "model.n_head=2", "try model.n_head="]),
        (["position=rope", "model.width=30"], ["head dimension 15", "odd", "model.width", "model.n_head"]),
        (["train.length=48"], ["train.length=48", "train.tokens_per_step=256", "divide"]),
        (["train.steps=999"], ["train.steps=999", "4000", "15 steps", "data.repeat=true"]),
        (["validation.lengths=[32,48]"], ["validation.tokens=1024", "48"]),
        (["validation.tokens=8192"], ["validation.tokens=8192", "1500", "1472"]),
        (["data.dir=nowhere"], ["data.dir=nowhere", "scripts/prepare_data.py"]),
        (["attention=paged"], ["attention=paged", "sdpa", "blockwise"]),
        ([SCALE_INVARIANT, "attention=sdpa"], ["attention=sdpa", "blockwise"]),
        (["seed=-1.5"], ["seed", "-1.5"]),
        (["optimizer.betas=[2,0.95]"], ["optimizer.betas"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_train_refuses(folder: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    before = listing(folder)
    line = refusal(train.main, tiny_words(folder, *words), capsys)
    for part in parts:
        assert part in line
    assert not (folder / "run").exists()
    assert listing(folder) == before


def test_too_few_tokens_are_no_mistake_when_repeating_is_asked_for(folder: Path):
    write_tiny_data(folder / "data", train=700)
    assert run(train.main, tiny_words(folder, "data.repeat=true")) == 0


def set_header(path: Path, index: int, value: int) -> None:
    header = np.fromfile(path, "<i4", count=256)
    header[index] = value
    path.write_bytes(header.tobytes() + path.read_bytes()[1024:])


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda path: path.unlink(), ["data.dir=", "scripts/prepare_data.py"]),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:2000]), ["byte 2000", "bytes"]),
    "shorter_than_a_header": (lambda path: path.write_bytes(path.read_bytes()[:100]), ["byte 100"]),
    "empty": (lambda path: path.write_bytes(b""), ["byte 0"]),
    "foreign": (lambda path: path.write_bytes(b"PAR1" + path.read_bytes()[4:]), ["byte 0", "not a token shard"]),
    "of_the_future": (lambda path: set_header(path, 1, 3), ["byte 4", "version 3", "newer"]),
    "without_tokens": (lambda path: set_header(path, 2, 0), ["byte 8"]),
    "too_long": (lambda path: path.write_bytes(path.read_bytes() + b"xy"), ["trailing", "byte"]),
}


@pytest.mark.parametrize("file", [TRAIN, VAL])
@pytest.mark.parametrize("damage", DAMAGES)
def test_train_refuses_a_shard_that_is(folder: Path, file: str, damage: str, capsys: pytest.CaptureFixture):
    harm, parts = DAMAGES[damage]
    harm(folder / "data" / file)
    line = refusal(train.main, tiny_words(folder), capsys)
    for part in parts:
        assert part in line
    assert damage == "missing" or str(folder / "data" / file) in line
    assert not (folder / "run").exists()


def write_manifest(data: Path, vocab_size: int) -> None:
    """What prepare_data.py would say of the tiny shards, with the tokenizer's size as given."""
    entries = [
        {"name": path.name, "split": split, "bytes": path.stat().st_size, "tokens": (path.stat().st_size - 1024) // 2}
        for split, path in (("train", data / TRAIN), ("val", data / VAL))
    ]
    (data / "manifest.json").write_text(json.dumps({"files": entries, "vocab_size": vocab_size}))


def test_train_refuses_data_of_a_larger_vocabulary_by_its_manifest(folder: Path, capsys: pytest.CaptureFixture):
    write_manifest(folder / "data", vocab_size=50257)
    line = refusal(train.main, tiny_words(folder), capsys)
    for part in ("50257", "model.vocab_size=264", "tokenizer"):
        assert part in line
    assert not (folder / "run").exists()


@pytest.mark.parametrize("file", [TRAIN, VAL])
def test_train_names_the_token_whose_id_is_beyond_the_vocabulary(
    folder: Path, file: str, capsys: pytest.CaptureFixture
):
    """Also without a manifest, before the run directory exists."""
    ids = np.arange(4000) % 257
    ids[700] = 300
    write_shard(folder / "data" / file, ids)
    line = refusal(train.main, tiny_words(folder), capsys)
    for part in (str(folder / "data" / file), "token 700", "id 300", "264", "model.vocab_size"):
        assert part in line
    assert not (folder / "run").exists()


def test_an_error_in_the_middle_of_a_run_is_one_line_on_the_terminal_and_a_traceback_in_its_log(
    folder: Path, capsys: pytest.CaptureFixture
):
    ids = np.arange(4000) % 257
    ids[700] = 300
    write_shard(folder / "data" / TRAIN, ids)
    write_manifest(folder / "data", vocab_size=257)  # which is not true, so it comes out when the token is read
    assert run(train.main, tiny_words(folder)) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert "Traceback" in (folder / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model.n_layer=2"], ["model.n_layer=2", "model.n_layer=1"]),
        (["model.width=64"], ["model.width=64", "model.width=32"]),
        (["model.n_head=4"], ["model.n_head=4", "model.n_head=2"]),
        (["position=nope"], ["position.logits.kind=none", "position.logits.kind=scale_invariant"]),
        (["position.logits.tau=20"], ["position.logits.tau=20", "position.logits.tau=10"]),
        (["train.length=64"], ["train.length=64", "train.length=32"]),
        (["seed=1"], ["seed=1", "seed=0"]),
    ],
    ids=lambda value: value[0],
)
def test_a_run_is_not_resumed_as_another(
    trained: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture
):
    before = listing(trained)
    line = refusal(train.main, tiny_words(trained, *words), capsys)
    for part in [*parts, f"run_dir={trained / 'run'}", "another run_dir"]:
        assert part in line
    assert listing(trained) == before


def test_a_run_with_a_damaged_checkpoint_is_not_resumed(folder: Path, trained: Path, capsys: pytest.CaptureFixture):
    for name, content in listing(trained).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    weights = folder / "run" / "checkpoints" / "step_000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    before = listing(folder)
    assert str(weights) in refusal(train.main, tiny_words(folder, f"data.dir={trained / 'data'}"), capsys)
    assert listing(folder) == before


def test_a_run_dir_that_is_a_file_is_refused(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "run").write_text("mine")
    assert str(folder / "run") in refusal(train.main, tiny_words(folder), capsys)
    assert (folder / "run").read_text() == "mine"


def test_cuda_is_refused_where_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "device=cpu" in refusal(train.main, tiny_words(folder, "device=cuda"), capsys)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run_dir={}/nowhere"], ["run_dir=", "nowhere", "config.yaml"]),
        (["run_dir={}/data"], ["run_dir=", "data", "config.yaml"]),
        (["step=3"], ["step 3", "[8, 12]"]),
        (["step=last"], ["step=last", "best"]),
        (["lengths=[32,48]"], ["48", "1024"]),
        (["lengths=32"], ["lengths=32", "[32]"]),
        (["lengths=[long]"], ["lengths", "long"]),
        (["lengths=[0]"], ["lengths", "0"]),
        (["tokens=96000"], ["tokens=96000", "1500"]),
        (["tokens=0"], ["tokens=0"]),
        (["tokens=all"], ["tokens", "all"]),
        (["data_dir={}/nowhere"], ["nowhere", "no such folder"]),
        (["precision=fp16"], ["precision=fp16", "bf16"]),
        (["device=gpu"], ["device=gpu", "cuda"]),
        (["lenghts=[32]"], ["lenghts=[32]", "did you mean lengths?"]),
    ],
    ids=lambda value: value[0],
)
def test_evaluate_refuses(trained: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    before = listing(trained)
    given = [word.format(trained) for word in words]
    line = refusal(evaluate.main, [f"run_dir={trained / 'run'}", "device=cpu", "precision=fp32", *given], capsys)
    for part in parts:
        assert part in line
    assert listing(trained) == before


def test_evaluate_needs_a_run_dir(capsys: pytest.CaptureFixture):
    assert "run_dir is not set; add run_dir=... to the command" in refusal(evaluate.main, [], capsys)


def test_evaluate_refuses_a_run_without_a_checkpoint(folder: Path, trained: Path, capsys: pytest.CaptureFixture):
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_bytes((trained / "run" / "config.yaml").read_bytes())
    line = refusal(evaluate.main, [f"run_dir={folder / 'run'}"], capsys)
    assert "no checkpoint" in line
    assert "train.py" in line


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("train.py", "position.logits.tau=ten"),
        ("train.py", "position.rotary.base=big"),
        ("scripts/evaluate.py", "run_dir=nowhere"),
    ],
)
def test_as_a_real_command_a_mistake_is_one_line_and_exit_code_2(folder: Path, script: str, word: str):
    """In processes of their own, also because there nothing checks types at each call, as it does in the tests."""
    words = [*tiny_words(folder), word] if script == "train.py" else [word]
    done = subprocess.run([sys.executable, ROOT / script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert word in done.stderr
    assert {path.name for path in folder.iterdir()} == {"data"}


def test_processes_that_cannot_share_the_batch_are_refused_once(folder: Path):
    words = tiny_words(folder, "train.tokens_per_step=96")  # 3 sequences
    done = subprocess.run(
        [*TORCHRUN, ROOT / "train.py", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    for part in ("2 processes", "3 rows", "train.tokens_per_step=96", "train.length=32"):
        assert part in errors[0]
    assert not (folder / "run").exists()


def test_weights_that_are_not_finite_are_never_saved_nor_called_a_result(folder: Path, capsys: pytest.CaptureFixture):
    words = tiny_words(folder, "optimizer.eps=0", "train.steps=3", "train.checkpoint_every=1", "validation.every=3")
    assert run(train.main, words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the weights after step 1 are not finite; the last good checkpoint is None")
    assert not (folder / "run" / "checkpoints").exists()
    assert "NaN" not in (folder / "run" / "metrics.jsonl").read_text()


def test_a_folder_with_something_else_in_it_is_left_alone(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("years of work")
    before = listing(folder)
    assert "holds thesis.tex but no config.yaml" in refusal(train.main, tiny_words(folder), capsys)
    assert listing(folder) == before


def test_an_error_that_only_one_process_knows_is_said_by_it(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    line = refusal(train.main, tiny_words(folder, "device=cuda"), capsys)
    assert "(process 1)" in line
