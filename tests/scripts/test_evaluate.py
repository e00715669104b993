import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from data.loader import open_split
from eval.loss import loss_by_length
from eval.runs import load_run, read_metrics
from scripts import evaluate
from tests.tiny_run import ROOT, listing, refusal, run, tiny_words, write_tiny_data
from training.checkpoint_folder import record_validation
from training.distributed import start_process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a finished run."""
    write_tiny_data(tmp_path / "data")
    assert run(train.main, tiny_words(tmp_path)) == 0
    return tmp_path


def evaluated(folder: Path, *words: str) -> dict[str, Any]:
    assert run(evaluate.main, [f"run_dir={folder / 'run'}", "device=cpu", "precision=fp32", *words]) == 0
    return json.loads((folder / "run" / "eval.json").read_text())


def test_eval_json_equals_the_last_validation_of_the_run(folder: Path):
    result = evaluated(folder)
    last = read_metrics(folder / "run").iloc[-1]
    assert result["loss"].keys() == {"32", "64"}
    for length, entry in result["loss"].items():
        assert entry == {"mean": pytest.approx(last[f"val/loss_{length}"], abs=1e-6), "tokens": 1024}
    assert result["step"] == 12


def test_eval_json_has_the_loss_by_position_at_each_length(folder: Path):
    result = evaluated(folder)
    assert result["by_position"].keys() == {"32", "64"}
    for length, entry in result["by_position"].items():
        assert entry["edges"] == [0, 1, 2, 4, 8, 16, 32, 64][: 7 if length == "32" else 8]
        assert sum(entry["tokens"]) == 1024
        mean = np.average(entry["mean"], weights=entry["tokens"])
        assert mean == pytest.approx(result["loss"][length]["mean"], rel=1e-12)


def test_the_picture_is_drawn_where_asked_for(folder: Path):
    evaluated(folder, "plot=true")
    assert (folder / "run" / "loss_by_position.png").read_bytes().startswith(b"\x89PNG")
    assert not list((folder / "run").glob("*.pdf"))


def test_lengths_and_tokens_can_be_chosen(folder: Path):
    result = evaluated(folder, "lengths=[16,128]", "tokens=512")
    model, config = load_run(folder / "run")
    with start_process("cpu", "fp32") as process:
        expected = loss_by_length(model, open_split(config.data.dir, "val"), [16, 128], 512, process)
    assert result["loss"] == {
        str(length): {"mean": pytest.approx(loss, abs=1e-6), "tokens": 512} for length, loss in expected.items()
    }


def test_how_much_is_fed_at_a_time_does_not_matter(folder: Path):
    whole, single = evaluated(folder)["loss"], evaluated(folder, "micro_batch_tokens=1")["loss"]
    for length, entry in whole.items():
        assert single[length]["mean"] == pytest.approx(entry["mean"], abs=1e-6)


def test_an_earlier_checkpoint_has_its_own_loss_and_step(folder: Path):
    result = evaluated(folder, "step=8")
    metrics = read_metrics(folder / "run").set_index("step")
    assert result["loss"]["32"]["mean"] == pytest.approx(metrics.loc[8, "val/loss_32"], abs=1e-6)
    assert result["step"] == 8


def test_the_best_checkpoint_is_the_one_of_the_lowest_validation_loss(folder: Path):
    assert evaluated(folder, "step=best")["step"] == 12
    record_validation(folder / "run" / "checkpoints" / "step_000008", 32, {32: 0.1, 64: 9.0})
    assert evaluated(folder, "step=best")["step"] == 8


def test_an_unfinished_run_is_evaluated_at_the_step_that_it_has_reached(folder: Path):
    (folder / "run" / "checkpoints" / "step_000012").rename(folder / "moved")
    result = evaluated(folder)
    assert result["loss"]["32"]["mean"] == evaluated(folder, "step=8")["loss"]["32"]["mean"]
    assert result["step"] == 8


def test_other_data_of_the_same_tokenizer_can_be_used(folder: Path):
    write_tiny_data(folder / "other", train=100, val=900)
    result = evaluated(folder, f"data_dir={folder / 'other'}", "tokens=512")
    assert result["loss"]["32"]["mean"] != evaluated(folder, "tokens=512")["loss"]["32"]["mean"]
    assert result["data"] == str(folder / "other")


@pytest.mark.filterwarnings("ignore:attention=auto takes blockwise")
def test_a_run_trained_on_a_machine_with_a_compiler_is_evaluated_on_one_without(folder: Path, monkeypatch):
    expected = evaluated(folder)["loss"]
    config = folder / "run" / "config.yaml"
    config.write_text(config.read_text().replace("attention: auto", "attention: native"))
    monkeypatch.setattr("model.attend.native.load_kernel", lambda: "there is no compiler here")
    for length, entry in evaluated(folder)["loss"].items():
        assert entry["mean"] == pytest.approx(expected[length]["mean"], abs=1e-5)


def test_only_eval_json_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    before = listing(folder)
    evaluated(folder)
    after = listing(folder)
    assert after.keys() - before.keys() == {"run/eval.json"}
    assert {name: after[name] for name in before} == before


def test_the_losses_are_printed(folder: Path, capsys: pytest.CaptureFixture):
    capsys.readouterr()
    result = evaluated(folder)
    text = capsys.readouterr().out
    for length, entry in result["loss"].items():
        assert f"{length} tokens  {entry['mean']:.4f} nats per token" in text
    assert str(folder / "run" / "eval.json") in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data_dir=nowhere"], "data_dir=nowhere: no such folder; make it:"),
        (["lengths=[24]"], "tokens=1024 must be a multiple of every length in lengths, and 24 does not divide it"),
        (["tokens=0"], "tokens=0 must be a multiple of every length in lengths"),
        (
            ["tokens=1504"],
            "tokens=1504 needs one token more than that, but the validation split has 1500; the largest ",
        ),
        (["tokens=1504"], "at length 32 is tokens=1472"),
        (["lengths=[1600]", "tokens=1600"], "no row of length 1600 fits; prepare more data, or take shorter lengths"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_keys_of_the_command(folder: Path, words: list[str], message: str, capsys):
    line = refusal(evaluate.main, [f"run_dir={folder / 'run'}", "device=cpu", "precision=fp32", *words], capsys)
    assert message in line
    assert "validation." not in line
    assert not (folder / "run" / "eval.json").exists()


PEAK = """
import sys
from pathlib import Path
from scripts import evaluate

evaluate.main()
print("peak", int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_length_of_131072_tokens_is_evaluated_in_under_three_gigabytes(tmp_path: Path):
    """One block of the laptop's model, since the blocks come one after the other. Its matrix T x T would be 69 GB."""
    length = 1 << 17
    write_tiny_data(tmp_path / "data", val=length + 1)
    words = ["model.width=128", "position=scale_invariant_p_rope", "train.steps=1", "validation.lengths=[32]"]
    assert run(train.main, tiny_words(tmp_path, *words)) == 0
    words = [f"run_dir={tmp_path / 'run'}", f"lengths=[{length}]", f"tokens={length}", "device=cpu", "precision=fp32"]
    ran = subprocess.run([sys.executable, "-c", PEAK, *words], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr
    peak = int(ran.stdout.split("peak")[1])
    print(f"{peak / 1e9:.2f} GB")
    assert peak < 3e9
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert result["by_position"][str(length)]["edges"][-2:] == [length // 2, length]
