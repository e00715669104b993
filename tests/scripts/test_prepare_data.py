import subprocess
import sys
from pathlib import Path

import pytest

from data.loader import open_split
from data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def prepare_data(*words):
    return subprocess.run(
        [sys.executable, "scripts/prepare_data.py", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def text(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(4):
        (tmp_path / "in" / f"{number}.txt").write_text(f"Hello world {number}")
    return tmp_path / "in"


def test_the_command_prepares_gpt2_tokens_and_closes_with_a_summary(text, tmp_path):
    words = ["source=text", f"path={text}", f"out_dir={tmp_path / 'out'}", "val_every=4"]
    done = prepare_data(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "prepared: 2 files, 12 training tokens, 4 validation tokens, 4 documents in " + f"{tmp_path / 'out'}\n"
    )
    assert done.stderr == ""
    stream = open_split(tmp_path / "out", "val")
    assert load_tokenizer("gpt2").decode(stream.read(0, len(stream))) == "<|endoftext|>Hello world 3"
    assert prepare_data(*words).stdout.startswith("already prepared: 2 files")


def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path):
    failed = prepare_data("source=text", f"path={tmp_path / 'gone'}", f"out_dir={tmp_path / 'out'}")
    assert failed.returncode == 2
    assert failed.stderr == f"error: path={tmp_path / 'gone'}: no such file or folder\n"
    assert list(tmp_path.iterdir()) == []
