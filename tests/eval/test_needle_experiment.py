"""Table 2 from run folders that were made by hand."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from eval.experiment import Experiment, Run
from eval.kept import portable
from eval.needle_experiment import NeedleRun, by_scheme, collect_needles, needle_runs
from eval.needle_figure import accuracy_by_length, heat_maps
from eval.tables import to_json, to_latex, to_markdown

STEPS = 10
WORDS = ("lengths=[4096,16384]", "samples=3", f"train.steps={STEPS}")
PUBLISHED = "table2_needle_accuracy_162m_train4k_finetuned"
FOUND = {("rope", 0): [1.0, 0.25], ("rope", 1): [0.5, 0.25], ("alibi", 0): [0.9, 0.1], ("alibi", 1): None}


def entry(mean: float, samples: int = 3) -> dict[str, Any]:
    parts = [{"from": 0.0, "to": 0.5, "mean": mean, "needles": 9}, {"from": 0.5, "to": 1.0, "mean": None, "needles": 0}]
    return {"mean": mean, "samples": samples, "by_depth": parts}


def write_tested(run: NeedleRun, means: list[float], samples: int = 3, **other: Any) -> None:
    """What scripts/needle.py leaves: a fine-tuned run, and what it found beside the parent's own files."""
    (run.run_dir / "checkpoints" / f"step_{run.steps:06d}").mkdir(parents=True, exist_ok=True)
    (run.parent.run_dir / "checkpoints" / "step_000005").mkdir(parents=True, exist_ok=True)
    accuracy = {str(n): entry(mean, samples) for n, mean in zip([4096, 16384], means, strict=False)}
    found = {"accuracy": accuracy, "task": run.config["needle"], "step": STEPS, "seed": run.seed}
    found |= {"run_dir": str(run.run_dir), "finetuned_from": str(run.parent.run_dir), "data": "data/shards/books"}
    found |= {"finetuned_from_step": run.parent.steps, "train": run.config["train"]}
    found = {key: value for key, value in (found | other).items() if value != "left out"}
    (run.parent.run_dir / "needle.json").write_text(json.dumps(found))


def needle_config(words: list[str]) -> Any:
    return OmegaConf.to_container(compose("needle", words))


def experiment(needle: tuple[str, ...] = WORDS) -> Experiment:
    return Experiment("table2", "Table 2", "t2", "t", (), {}, (0, 1), published=PUBLISHED, needle=needle)


@pytest.fixture
def copies(tmp_path: Path) -> list[NeedleRun]:
    train = {"steps": 5, "tokens_per_step": 100, "length": 4096}
    config = {"train": train, "model": {"name": "162m"}, "data": {"dir": "data/shards/books"}}
    parents = [
        Run(row, seed, {"position": row}, (), tmp_path / f"{row}-seed{seed}", config)
        for row in ("rope", "alibi", "scale_invariant_p_rope")
        for seed in (0, 1)
    ]
    copies = needle_runs(experiment(), parents, needle_config)
    for copy in copies:
        if means := FOUND.get((copy.row, copy.seed)):
            write_tested(copy, means)
    return copies


def test_a_copy_is_a_command_of_needle_with_its_run_s_seed_and_a_folder_beside_it(copies: list[NeedleRun]):
    second = copies[1]
    parent = second.parent.run_dir
    assert second.run_dir == parent.with_name("rope-seed1-needle-seed1")
    assert second.overrides == (*WORDS, f"run_dir={parent}", f"out_dir={second.run_dir}", "seed=1")
    assert (second.steps, second.lengths) == (STEPS, [4096, 16384])
    assert second.tokens == STEPS * 64 * 4096


def test_a_copy_is_finished_when_it_is_tested_as_asked(copies: list[NeedleRun]):
    copy = copies[-1]
    assert (copy.status, copy.can_start) == ("missing", False)
    write_tested(copy, [1.0, 0.5])
    assert (copy.status, copy.can_start) == ("finished", True)
    assert copy.accuracy == {"4096": entry(1.0), "16384": entry(0.5)}
    task = {**copy.config["needle"], "digits": 3}
    for otherwise in ({"samples": 2}, {"means": [1.0]}, {"task": task}, {"step": 9}, {"finetuned_from": None}):
        write_tested(copy, **{"means": [1.0, 0.5], **otherwise})  # pyright: ignore[reportArgumentType]
        assert (copy.status, copy.accuracy) == ("interrupted", {})


def test_another_test_of_the_same_run_is_not_taken_for_the_copy_s(copies: list[NeedleRun]):
    copy = copies[0]
    train = copy.config["train"]
    others: tuple[dict[str, Any], ...] = (
        {"run_dir": f"{copy.parent.run_dir}-needle-seed8"},
        {"finetuned_from": str(copies[1].parent.run_dir)},
        {"seed": 8},
        {"data": "data/shards/other"},
        {"data": "elsewhere/books"},
        {"finetuned_from_step": 4},
        {"train": {**train, "rows": 4}},
        {"train": {**train, "length": 512}},
        {"train": {**train, "warmup_fraction": 0.9}},
    )
    for otherwise in others:
        write_tested(copy, [1.0, 0.5], **otherwise)
        assert (copy.status, copy.accuracy) == ("interrupted", {}), otherwise


def test_what_does_not_change_the_result_may_differ(copies: list[NeedleRun]):
    copy = copies[0]
    train = copy.config["train"]
    others: tuple[dict[str, Any], ...] = (
        {"train": {**train, "checkpoint_every": 7}},
        {"train": {**train, "length": 4096}},
        {"run_dir": f"/moved/{copy.run_dir.name}"},
        {"data": str(Path("data/shards/books").resolve())},
        {"train": "left out", "finetuned_from_step": "left out"},  # of before these were recorded
    )
    for otherwise in others:
        write_tested(copy, [1.0, 0.5], **otherwise)
        assert copy.accuracy["4096"]["mean"] == 1.0, otherwise


def test_what_was_kept_of_a_run_is_enough_for_the_table(copies: list[NeedleRun], tmp_path: Path):
    copy = replace(copies[0], parent=replace(copies[0].parent, kept_dir=tmp_path / "kept"))
    copies[0].parent.run_dir.rename(tmp_path / "kept")
    shutil.rmtree(copy.run_dir)
    (tmp_path / "kept" / "config.yaml").write_text("")
    path = tmp_path / "kept" / "needle.json"
    path.write_text(json.dumps(portable({**json.loads(path.read_text()), "data": "/other/machine/books"})))
    assert (copy.status, copy.can_start) == ("finished", False)
    assert copy.accuracy["4096"]["mean"] == 1.0


def test_a_damaged_result_is_named(copies: list[NeedleRun]):
    path = copies[0].parent.run_dir / "needle.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"needle\.json is damaged .* delete it"):
            copies[0].status  # noqa: B018


def test_the_table_has_accuracies_with_errors_the_highest_in_bold_and_the_published_ones(copies: list[NeedleRun]):
    table = collect_needles(experiment(), copies, "make", "abc")
    header, _, rope, alibi, ours = to_markdown(table).splitlines()[4:9]
    assert header.startswith("|  | acc@4096 | acc@16384 | published acc@4096 (ours minus it) |")
    assert rope == "| RoPE | 0.750 ± 0.250 | **0.250 ± 0.000** | 0.962 ± 0.003 (-0.212) | 0.000 ± 0.000 (+0.250) |"
    assert alibi.startswith("| ALiBi (1 of 2 seeds) | **0.900** | 0.100 | 0.957 ± 0.002 (-0.057) |")
    assert ours.startswith("| Scale-invariant p-RoPE | missing | missing | 0.965 ± 0.000 | 0.969 ± 0.004 |")
    assert r"\textbf{0.900}" in to_latex(table)
    rows = json.loads(to_json(table))["rows"]
    assert rows["rope"]["seeds"] == [[1.0, 0.25], [0.5, 0.25]]
    assert rows["alibi"]["seeds"] == [[0.9, 0.1], [None, None]]


def test_the_caption_says_what_was_asked_and_what_fine_tuning_took(copies: list[NeedleRun]):
    caption = to_markdown(collect_needles(experiment(), copies, "make", None)).splitlines()[2]
    for part in ("3 of 7 digits", "3 samples", "10 steps", f"{STEPS * 64 * 4096:,} tokens"):
        assert part in caption


def test_depths_are_means_over_the_seeds_that_have_needles_there(copies: list[NeedleRun]):
    schemes = by_scheme(copies)
    assert list(schemes) == ["RoPE", "ALiBi"]
    rope = schemes["RoPE"]["4096"]
    assert rope["mean"] == 0.75
    assert [part["mean"] for part in rope["by_depth"]] == [0.75, None]


def test_accuracy_by_length_shows_every_scheme_between_0_and_1(copies: list[NeedleRun]):
    table = collect_needles(experiment(), copies, "make", None)
    (axes,) = accuracy_by_length(table).axes
    low, high = axes.get_ylim()
    assert low < 0 < 1 < high
    assert axes.get_ylabel() == "share of needles found"
    assert axes.containers[0].lines[0].get_ydata().tolist() == [0.75, 0.25]  # pyright: ignore[reportAttributeAccessIssue]


def test_heat_maps_have_a_panel_for_each_scheme(copies: list[NeedleRun]):
    figure = heat_maps(by_scheme(copies))
    assert [axes.get_title() for axes in figure.axes[:2]] == ["RoPE", "ALiBi"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.75", "0.25"]
    assert "no run" in heat_maps({}).axes[0].texts[0].get_text()


def test_an_experiment_that_does_not_say_how_to_fine_tune_is_refused():
    with pytest.raises(ValueError, match=r"experiment=table2 .* no key needle; .*scale=proxy"):
        needle_runs(experiment(needle=()), [], lambda words: {})
