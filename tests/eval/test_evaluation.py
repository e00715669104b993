"""Evaluations of runs, from eval.json files that were made by hand."""

from pathlib import Path

import pytest

from eval.evaluation import by_position, evaluate_command, lacking, losses_by_position, why_missing
from eval.experiment import Run
from tests.evaluations import write_evaluation

CONFIG = {
    "train": {"steps": 10, "tokens_per_step": 64, "length": 4, "micro_batch_tokens": 64},
    "validation": {"lengths": [4, 8], "tokens": 16},
    "data": {"name": "tiny", "dir": "data/shards/tiny"},
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run, as far as its folder tells."""
    return make_run(tmp_path, 0)


def make_run(folder: Path, seed: int, row: str = "rope") -> Run:
    run_dir = folder / "runs" / f"{row}-seed{seed}"
    (run_dir / "checkpoints" / "step_000010").mkdir(parents=True)
    return Run(row, seed, {"position": row}, (), run_dir, CONFIG, folder / "kept" / run_dir.name)


def test_a_run_lacks_its_evaluation_until_it_is_there(run: Run):
    (job,) = lacking([run])
    assert (job.status, job.trained, job.tokens) == ("missing", run.run_dir, 32)
    write_evaluation(run.run_dir, run)
    assert job.status == "finished"
    assert lacking([run]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"by_position": None},
        {"step": 8},
        {"data": "data/shards/other"},
        {"by_position": {"4": {"edges": [0, 4], "mean": [1.0], "tokens": [16]}}},  # not all lengths
        {"by_position": {key: {"edges": [0, 4], "mean": [1.0], "tokens": [32]} for key in "48"}},  # other tokens
    ],
    ids=["without positions", "of another step", "of other data", "of fewer lengths", "of more tokens"],
)
def test_an_evaluation_of_something_else_does_not_count(run: Run, changes: dict):
    write_evaluation(run.run_dir, run, **changes)
    assert by_position(run) is None
    assert len(lacking([run])) == 1


def test_the_same_data_in_another_place_are_the_same_data(run: Run):
    write_evaluation(run.run_dir, run, data="/elsewhere/tiny")
    assert by_position(run)


def test_a_damaged_evaluation_is_named(run: Run):
    (run.run_dir / "eval.json").write_text("{")
    with pytest.raises(ValueError, match=r"rope-seed0/eval\.json is damaged .* delete it"):
        lacking([run])


def test_a_run_is_evaluated_as_it_was_validated(run: Run):
    words = evaluate_command(lacking([run])[0])[1:]
    assert words == [
        "scripts/evaluate.py", f"run_dir={run.run_dir}", "device=cpu", "precision=fp32", "micro_batch_tokens=64"
    ]  # fmt: skip


def test_what_was_not_finished_or_is_only_kept_cannot_be_evaluated(tmp_path: Path, run: Run):
    (run.run_dir / "checkpoints" / "step_000010").rename(tmp_path / "gone")
    assert lacking([run]) == []
    assert why_missing(run) is None  # a run that is not finished is named elsewhere
    assert run.kept_dir
    run.kept_dir.mkdir(parents=True)
    (run.kept_dir / "config.yaml").touch()
    assert run.status == "finished"
    assert lacking([run]) == []
    assert "was kept without it" in str(why_missing(run))


def test_losses_by_position_are_a_row_a_range_of_positions(tmp_path: Path):
    runs = [make_run(tmp_path, seed) for seed in (0, 1, 2)]
    write_evaluation(runs[0].run_dir, runs[0], start=1.0)
    write_evaluation(runs[1].run_dir, runs[1], start=3.0)
    losses = losses_by_position(runs)
    assert set(losses["seed"]) == {0, 1}
    first = losses[(losses["seed"] == 1) & (losses["length"] == 8)]
    assert first[["start", "end", "loss"]].to_numpy().tolist() == [[0, 1, 3], [1, 2, 4], [2, 4, 5], [4, 8, 6]]
    assert set(losses["row"]) == {"rope"}
