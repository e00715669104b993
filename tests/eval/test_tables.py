"""Tables from run folders that were made by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from eval.experiment import Experiment, Run
from eval.tables import (
    Row,
    collect,
    history,
    paired_difference,
    row_name,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_paired_csv,
    write_table,
)

STEPS = 10
LENGTHS = [4096, 16384]
LOSSES = {  # (row, seed): final losses at the two lengths; None: interrupted before the end
    ("rope", 0): [3.0, 5.0],
    ("rope", 1): [3.2, 5.4],
    ("rope", 2): [3.4, 5.2],
    ("scale_invariant_p_rope", 0): [2.5, 2.4],
    ("scale_invariant_p_rope", 1): [2.7, 2.6],
    ("scale_invariant_p_rope", 2): None,
    ("alibi", 0): None,
    ("alibi", 1): None,
    ("alibi", 2): None,
}


def make_run(folder: Path, row: str, seed: int, losses: list[float] | None, **axes) -> Run:
    """A run folder as train.py leaves it, with an early validation that must not be taken for the final one."""
    run_dir = folder / f"{row}-seed{seed}"
    run_dir.mkdir()
    early = {"step": 5, "tokens": 500} | {f"val/loss_{length}": 9.0 for length in LENGTHS}
    lines = [{"step": STEPS, "tokens": 1000, "train/loss": 1.0}]
    if losses:
        lines.append(lines[0] | {f"val/loss_{length}": loss for length, loss in zip(LENGTHS, losses, strict=True)})
        (run_dir / "checkpoints" / f"step_{STEPS:06d}").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [early, *lines]))
    config = {
        "train": {"steps": STEPS, "tokens_per_step": 100, "length": 4096},
        "validation": {"lengths": LENGTHS},
        "model": {"name": "162m"},
    }
    return Run(row, seed, axes or {"position": row}, (), run_dir, config)


@pytest.fixture
def runs(tmp_path):
    return [make_run(tmp_path, row, seed, losses) for (row, seed), losses in LOSSES.items()]


def experiment(published: str | None = None, seeds: tuple[int, ...] = (0, 1, 2)) -> Experiment:
    return Experiment("table1", "Table 1", "table1", "table1", (), {}, seeds, published=published)


def test_mean_and_standard_error_over_seeds_are_those_computed_by_hand(runs):
    row = collect(experiment(), runs, "make").rows["rope"]
    assert row.mean == pytest.approx([3.2, 5.2])
    assert row.stderr == pytest.approx([0.2 / math.sqrt(3)] * 2)  # deviations -0.2, 0, 0.2: sample deviation 0.2


def test_one_seed_has_no_standard_error():
    row = Row("RoPE", [[3.0, 5.0]])
    assert (row.mean, row.stderr) == ([3.0, 5.0], [None, None])


def test_markdown_has_names_bold_best_missing_marks_and_how_it_was_made(runs):
    lines = to_markdown(collect(experiment(), runs, "make all", "abc123")).splitlines()
    assert "| RoPE | 3.200 ± 0.115 | 5.200 ± 0.115 |" in lines
    assert "| Scale-invariant p-RoPE (2 of 3 seeds) | **2.600 ± 0.100** | **2.500 ± 0.100** |" in lines
    assert "| ALiBi | missing | missing |" in lines
    assert lines[-1] == (
        "Model 162m, trained at 4096 tokens; 10 steps, 1,000 tokens a run; seeds: 0, 1, 2. "
        "Drawn by `make all` at commit abc123, from runs trained at unknown."
    )


def test_a_table_names_the_commits_that_its_runs_were_trained_at(runs):
    for at, run in zip(["b2", "a1"], runs, strict=False):
        (run.run_dir / "environments.json").write_text(json.dumps([{"commit": at}, {"commit": "c3"}]))
    table = collect(experiment(), runs, "make", "abc123")
    assert table.trained_at == ["a1", "b2", "c3", "unknown"]
    assert json.loads(to_json(table))["trained_at"] == ["a1", "b2", "c3", "unknown"]
    assert to_markdown(table).endswith("at commit abc123, from runs trained at a1, b2, c3, unknown.\n")


def test_published_figures_stand_beside_at_the_same_lengths(runs):
    table = collect(experiment("table1_val_loss_162m_train4k"), runs, "make")
    assert table.rows["rope"].published == {"mean": [3.261, 3.936], "stderr": [0.001, 0.010]}
    header, _, rope = to_markdown(table).splitlines()[4:7]
    assert header == (
        "|  | val@4096 | val@16384 | published val@4096 (ours minus it) | published val@16384 (ours minus it) |"
    )
    assert rope.endswith("| 3.261 ± 0.001 (-0.061) | 3.936 ± 0.010 (+1.264) |")


def test_a_published_table_that_does_not_exist_is_refused(runs):
    with pytest.raises(ValueError, match=r"experiment\.published=table9 .* choose one of: .*table1_val_loss"):
        collect(experiment("table9"), runs, "make")


def test_json_follows_the_fixed_schema(runs):
    table = json.loads(to_json(collect(experiment("table1_val_loss_162m_train4k"), runs, "make", "abc")))
    assert list(table) == ["experiment", "columns", "rows", "command", "commit", "trained_at", "paired"]
    assert (table["experiment"], table["command"], table["commit"]) == ("table1", "make", "abc")
    assert table["columns"] == ["val@4096", "val@16384"]
    assert list(table["rows"]) == ["rope", "scale_invariant_p_rope", "alibi"]
    assert all(list(row) == ["mean", "stderr", "seeds", "published"] for row in table["rows"].values())
    assert table["rows"]["alibi"]["mean"] == table["rows"]["alibi"]["stderr"] == [None, None]
    assert table["rows"]["scale_invariant_p_rope"]["seeds"] == [[2.5, 2.4], [2.7, 2.6], [None, None]]


def test_a_loss_that_is_not_finite_is_shown_as_diverged_and_keeps_the_json_valid(tmp_path):
    runs = [make_run(tmp_path, "rope", 0, [3.0, math.nan]), make_run(tmp_path, "nope", 0, [3.5, 8.0])]
    table = collect(experiment(seeds=(0,)), runs, "make")
    assert "| RoPE | **3.000** | diverged |" in to_markdown(table)
    assert "| NoPE | 3.500 | **8.000** |" in to_markdown(table)
    assert json.loads(to_json(table))["rows"]["rope"]["mean"] == [3.0, None]


def test_csv_and_latex_have_the_same_rows(runs, tmp_path):
    table = collect(experiment(), runs, "make")
    (tmp_path / "table.csv").write_text(to_csv(table))
    frame = pd.read_csv(tmp_path / "table.csv", index_col="scheme")
    assert list(frame.columns) == [
        "name", "seeds", "val@4096", "val@4096_stderr", "val@16384", "val@16384_stderr"
    ]  # fmt: skip
    assert float(frame.loc["rope", "val@16384"]) == pytest.approx(5.2)  # pyright: ignore[reportArgumentType]
    assert (frame.loc["alibi", "val@4096"], frame.loc["alibi", "seeds"]) == ("missing", 0)
    latex = to_latex(table)
    assert r"RoPE & 3.200 $\pm$ 0.115 & 5.200 $\pm$ 0.115 \\" in latex
    assert r"& \textbf{2.600 $\pm$ 0.100} &" in latex
    assert latex.startswith(r"\begin{tabular}{lrr}")


def test_paired_differences_are_those_computed_by_hand_over_the_seeds_that_both_have(runs):
    table = collect(experiment(), runs, "make")
    assert table.reference == "scale_invariant_p_rope"
    rope, alibi = table.paired["rope"], table.paired["alibi"]
    assert list(table.paired) == ["rope", "alibi"]
    assert rope.mean == pytest.approx([0.5, 2.7])  # 3.0 - 2.5, 3.2 - 2.7; 5.0 - 2.4, 5.4 - 2.6: not of the third seed
    assert rope.stderr == pytest.approx([0.0, 0.1], abs=1e-12)  # deviations -0.1, 0.1: sd 0.1 sqrt(2), / sqrt(2)
    assert rope.seeds == [2, 2]
    assert (alibi.mean, alibi.stderr, alibi.seeds) == ([None, None], [None, None], [0, 0])


def test_what_the_seeds_have_in_common_cancels_in_a_paired_difference():
    noise = [0.0, 3.0, -2.0]
    row, reference = (Row("", [[base + shared] for shared in noise]) for base in (5.5, 5.0))
    paired = paired_difference(row, reference)
    assert (paired.mean, paired.stderr, paired.seeds) == ([0.5], [pytest.approx(0, abs=1e-12)], [3])
    assert row.stderr[0] > 1  # pyright: ignore[reportOptionalOperand]


def test_paired_differences_are_a_second_table_and_a_file_and_a_key(runs, tmp_path):
    table = collect(experiment(), runs, "make")
    lines = to_markdown(table).splitlines()
    second = lines.index("Loss minus that of Scale-invariant p-RoPE with the same seed, mean ± standard error.")
    assert lines[second + 2 : second + 6] == [
        "|  | val@4096 | val@16384 |",
        "| --- | ---: | ---: |",
        "| RoPE (2 of 3 seeds) | +0.500 ± 0.000 | +2.700 ± 0.100 |",
        "| ALiBi | missing | missing |",
    ]
    (tmp_path / "paired.csv").write_text(to_paired_csv(table))
    frame = pd.read_csv(tmp_path / "paired.csv", index_col="scheme")
    rope = frame.loc["rope"].to_dict()
    assert (float(rope["val@16384"]), rope["val@16384_stderr"]) == (pytest.approx(2.7), pytest.approx(0.1))
    assert (rope["val@16384_seeds"], rope["reference"]) == (2, "scale_invariant_p_rope")
    paired = json.loads(to_json(table))["paired"]
    assert paired["reference"] == "scale_invariant_p_rope"
    assert paired["rows"]["rope"] == {"mean": pytest.approx([0.5, 2.7]), "stderr": pytest.approx([0, 0.1], abs=1e-12),
                                      "seeds": [2, 2]}  # fmt: skip


def test_one_seed_has_differences_without_an_error(tmp_path):
    runs = [make_run(tmp_path, "rope", 0, [3.0, 5.0]), make_run(tmp_path, "scale_invariant_p_rope", 0, [3.1, 4.0])]
    text = to_markdown(collect(experiment(seeds=(0,)), runs, "make"))
    assert "| RoPE | -0.100 | +1.000 |" in text
    assert "same seed.\n" in text


def test_a_diverged_run_has_no_difference_that_looks_like_one(tmp_path):
    runs = [make_run(tmp_path, "rope", 0, [3.0, math.nan]), make_run(tmp_path, "scale_invariant_p_rope", 0, [3.1, 4.0])]
    table = collect(experiment(seeds=(0,)), runs, "make")
    assert "| RoPE | -0.100 | diverged |" in to_markdown(table)
    assert json.loads(to_json(table))["paired"]["rows"]["rope"]["mean"] == [pytest.approx(-0.1), None]


def test_the_reference_is_the_experiments_own_or_the_best_at_the_longest_length(tmp_path):
    losses = {"nope": [3.0, 5.0], "rope": [3.4, 4.0], "alibi": [3.1, math.nan]}
    runs = [make_run(tmp_path, row, 0, values) for row, values in losses.items()]
    assert collect(experiment(seeds=(0,)), runs, "make").reference == "rope"
    own = replace(experiment(seeds=(0,)), reference="alibi")
    assert collect(own, runs, "make").reference == "alibi"


def test_a_run_without_its_last_validation_is_refused_by_name(tmp_path):
    run = make_run(tmp_path, "rope", 0, [3.0, 5.0])
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    (run.run_dir / "metrics.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(ValueError, match=r"rope-seed0/metrics\.jsonl lacks the validation at step 10"):
        collect(experiment(seeds=(0,)), [run], "make")


def test_every_table_is_written_and_nothing_else_is_left(runs, tmp_path):
    folder = tmp_path / "results" / "table1"
    paths = write_table(collect(experiment(), runs, "make"), folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    assert [path.name for path in paths] == [
        "table.md", "table.csv", "table.tex", "table.json", "paired.csv"
    ]  # fmt: skip


def test_history_has_every_finite_validation_of_unfinished_runs_too(runs):
    frame = history(runs)
    assert set(frame.columns) == {"row", "seed", "step", "length", "loss"}
    rope = frame[(frame["row"] == "rope") & (frame["seed"] == 1) & (frame["length"] == 16384)]
    assert list(zip(rope["step"], rope["loss"], strict=True)) == [(5, 9.0), (10, 5.4)]
    assert set(frame[frame["row"] == "alibi"]["step"]) == {5}


def test_history_of_runs_that_never_started_is_empty(tmp_path, runs):
    nowhere = Run("rope", 0, {}, (), tmp_path / "nowhere", runs[0].config)
    assert history([nowhere]).empty


def test_a_row_is_named_by_its_scheme_and_its_other_axes(tmp_path):
    axes = {"position": "scale_invariant_p_rope", "position.logits.tau": 0.1}
    assert row_name(make_run(tmp_path, "si", 0, None, **axes)) == "Scale-invariant p-RoPE, tau = 0.1"
