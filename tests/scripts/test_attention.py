"""scripts/attention.py on a finished run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from data.loader import open_split
from eval.attention_statistics import Sampling, attention_statistics
from eval.runs import load_run
from scripts import attention
from tests.tiny_run import listing, refusal, run, tiny_words, write_tiny_data
from training.distributed import ALONE

FILES = {f"run/{name}" for name in ("attention.json", "attention.png", "attention.pdf")}
FILES |= {"run/attention_qq.png", "run/attention_qq.pdf"}
SMALL = ("device=cpu", "precision=fp32", "pairs=100", "queries=7")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_data(folder / "data")
    words = ["position=scale_invariant_p_rope", "train.steps=2", "validation.every=2"]
    assert run(train.main, tiny_words(folder, *words)) == 0
    return folder


@pytest.fixture
def folder(trained: Path) -> Iterator[Path]:
    """The same, without what an earlier test measured."""
    yield trained
    for path in (trained / "run").glob("attention*"):
        path.unlink()


def measured(folder: Path, *words: str) -> dict[str, Any]:
    assert run(attention.main, [f"run_dir={folder / 'run'}", *SMALL, "plot=false", *words]) == 0
    return json.loads((folder / "run" / "attention.json").read_text())


def test_attention_json_holds_the_statistics_of_the_validation_split(folder: Path):
    result = measured(folder, "sequences=3", "length=200")
    model, config = load_run(folder / "run")
    tokens = torch.from_numpy(open_split(config.data.dir, "val").read(0, 600)).view(3, 200)
    expected = attention_statistics(model, tokens, Sampling(7, 100), ALONE)
    assert result["queries"] == expected["queries"]
    assert result["ranges"] == expected["ranges"]
    for got, wanted in zip(result["layers"], expected["layers"], strict=True):
        for name, values in wanted.items():
            np.testing.assert_allclose(np.array(got[name], dtype=float), values, rtol=1e-5, atol=1e-6, err_msg=name)
    assert result["qq"]["layers"][0]["rotated"]["mean"] == pytest.approx(
        expected["qq"]["layers"][0]["rotated"]["mean"], rel=1e-5
    )
    assert result["made_with"]["step"] == 2
    assert result["position"] == "scale_invariant_p_rope"


def test_the_length_is_by_default_the_longest_validated(folder: Path):
    assert measured(folder)["queries"][-1] == 63


def test_a_text_file_is_encoded_and_starts_as_a_document_does(folder: Path):
    (folder / "text.txt").write_text("abcdefghij" * 10)
    result = measured(folder, f"text={folder / 'text.txt'}", "tokenizer=bytes", "sequences=1", "length=101")
    tokens = torch.tensor([[256, *(b"abcdefghij" * 10)]])
    model, _ = load_run(folder / "run")
    expected = attention_statistics(model, tokens, Sampling(7, 100), ALONE)
    np.testing.assert_allclose(result["layers"][0]["entropy"], expected["layers"][0]["entropy"], rtol=1e-5)
    assert result["made_with"]["data_dir"] is None


def test_the_pictures_are_drawn_and_the_last_query_is_printed(folder: Path, capsys: pytest.CaptureFixture):
    before = listing(folder)
    capsys.readouterr()
    assert run(attention.main, [f"run_dir={folder / 'run'}", *SMALL]) == 0
    after = listing(folder)
    assert after.keys() - before.keys() == FILES
    assert {name: after[name] for name in before} == before
    said = capsys.readouterr().out
    layer = json.loads(after["run/attention.json"])["layers"][0]
    last = f"{np.mean([head[-1] for head in layer['entropy']]):.3f}"
    assert last in said
    assert "10-63" in said
    assert str(folder / "run" / "attention_qq.png") in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["length=1000"], ["sequences=4 of length=1000 need 4000 tokens", "1500", "lower length"]),
        (["length=2000", "sequences=1"], ["need 2000 tokens", "use length=1500 or less"]),
        (["length=1"], ["length=1 must be at least 2"]),
        (["queries=0"], ["queries=0 must be at least 1"]),
        (["sequences=0"], ["sequences=0 must be at least 1"]),
        (["pairs=0"], ["pairs=0 must be at least 1"]),
        (["step=7"], ["no checkpoint of step 7", "[2]"]),
        (["text=nowhere.txt", "tokenizer=bytes"], ["nowhere.txt"]),
        (["text=some.txt"], ["tokenizer=null", "set tokenizer=gpt2 or tokenizer=bytes"]),
        (["text=some.txt", "data_dir=other"], ["text=some.txt and data_dir=other", "leave one"]),
        (["tokenizer=bytes"], ["tokenizer=bytes encodes text=FILE"]),
        (["data_dir=nowhere"], ["data_dir=nowhere"]),
        (["run_dir=nowhere"], ["nowhere"]),
        (["precision=fp8"], ["precision=fp8 is unknown"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_a_mistake_is_refused_and_nothing_written(
    folder: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture
):
    before = listing(folder)
    line = refusal(attention.main, [f"run_dir={folder / 'run'}", *SMALL, *words], capsys)
    for part in parts:
        assert part in line
    assert listing(folder) == before


def test_a_run_without_softmax_attention_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_tiny_data(tmp_path / "data")
    words = ["position=infini_rope", "train.steps=1", "validation.every=1"]
    assert run(train.main, tiny_words(tmp_path, *words)) == 0
    line = refusal(attention.main, [f"run_dir={tmp_path / 'run'}", *SMALL], capsys)
    assert "position.core.kind=infini" in line
    assert not (tmp_path / "run" / "attention.json").exists()


def test_more_than_one_process_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refusal(attention.main, [f"run_dir={folder / 'run'}"], capsys)
