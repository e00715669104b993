"""What the report says of run directories, and what it makes of missing, broken and hostile ones.

How the page looks and works in a browser is tested in test_report_in_browser.py.
"""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from configs.command import CONFIGS
from eval.figures import STYLES
from eval.kept import thinned
from eval.report import find_run_dirs, read_run, read_runs
from eval.report_page import POINTS, charts, name_groups, render, styles, thin_out, write_page
from eval.report_tables import Grid, differences, environments, losses_by_length, needle_map, seeds, summary
from eval.runs import run_status
from eval.tables import scheme_name
from scripts import evaluate, needle, report
from tests.report_runs import composed, png, write_evaluation, write_needles, write_report_run
from tests.tiny_run import listing, refusal, run, tiny_words, write_tiny_data
from training.log import read_metrics_lines

SCALE_INVARIANT = "position=scale_invariant_p_rope"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one scheme, the last unfinished, and one of another with everything; tests leave them so."""
    folder = tmp_path_factory.mktemp("report")
    for seed, (loss, steps) in enumerate([(2.0, 40), (2.2, 40), (1.0, 20)]):
        write_report_run(folder / f"rope-seed{seed}", {32: loss, 64: 2 * loss}, "position=rope", seed=seed, steps=steps)
    whole = write_report_run(folder / "si", {32: 1.9, 64: 4.5}, SCALE_INVARIANT)
    write_evaluation(whole, {32: 1.9, 128: 6.0})
    write_needles(whole, {32: 0.75, 64: 0.5})
    (whole / "attention.json").write_text('{"total": 1}')
    (whole / "attention_total.png").write_bytes(png())
    (whole / "samples.txt").write_text("Fellow citizens")
    return folder


def texts(grid: Grid | None) -> dict[str, dict[str, str]]:
    """A table's texts by row and column; the best ones in stars."""
    assert grid is not None
    return {
        row[0].text: {
            column.replace("\N{NO-BREAK SPACE}", " "): f"*{cell.text}*" if cell.best else cell.text
            for column, cell in zip(grid.columns[1:], row[1:], strict=True)
        }
        for row in grid.rows
    }


def written(folder: Path, *words: str) -> str:
    """The page about the runs of a folder."""
    out = folder.parent / f"{folder.name}.html"
    assert run(report.main, [f"run_dirs=[{folder}/*]", f"out={out}", *words]) == 0
    return out.read_text()


def test_a_run_has_a_row_with_its_last_validation(folder: Path):
    rows = texts(summary(read_runs(find_run_dirs([f"{folder}/*"]))))
    assert list(rows) == ["rope-seed0", "rope-seed1", "rope-seed2", "si"]
    row = rows["rope-seed0"]
    assert (row["Scheme"], row["Seed"], row["Model"], row["Trained at"]) == ("RoPE", "0", "proxy", "32")
    assert (row["Steps"], row["Status"]) == ("40 / 40", "finished")
    assert (row["Loss at 64"], row["Loss at 128"], row["Needles at 32"]) == ("*4.000*", "–", "–")
    assert row["Tokens/s"] == "1,020"  # the median of 1001 to 1040 is 1020.5
    assert row["Memory"] == "2.00 GB"
    assert (rows["si"]["Scheme"], rows["si"]["Needles at 32"]) == ("Scale-invariant p-RoPE", "0.750")


def test_the_best_is_one_of_the_finished(folder: Path):
    rows = texts(summary(read_runs(find_run_dirs([f"{folder}/*"]))))
    assert [row["Loss at 32"] for row in rows.values()] == ["2.000", "2.200", "(1.000)", "*1.900*"]
    assert rows["rope-seed2"]["Status"] == "interrupted"
    assert rows["rope-seed2"]["Steps"] == "20 / 40"


def test_a_kept_run_is_finished_if_its_metrics_are(folder: Path, tmp_path: Path):
    for name, steps in (("rope-seed0", 40), ("rope-seed1", 40), ("rope-seed2", 20)):
        kept = Path(shutil.copytree(folder / name, tmp_path / name))
        shutil.rmtree(kept / "checkpoints")
        assert run_status(kept, 40) == "interrupted", "a sweep trains it again"
        lines = read_metrics_lines(kept / "metrics.jsonl")
        (kept / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in thinned(lines)))
        assert read_run(kept, name).status == ("finished" if steps == 40 else "interrupted")
    (row,) = texts(seeds(name_groups(read_runs(find_run_dirs([f"{tmp_path}/*"]))))).values()
    assert (row["Seeds"], row["Loss at 32"]) == ("2 of 3", "2.100 ± 0.100")
    (tmp_path / "rope-seed1" / "checkpoints").mkdir()
    assert read_run(tmp_path / "rope-seed1", "not kept").status == "interrupted"


def test_a_kept_run_that_diverged_is_finished(folder: Path, tmp_path: Path):
    kept = Path(shutil.copytree(folder / "si", tmp_path / "kept"))
    shutil.rmtree(kept / "checkpoints")
    lines = read_metrics_lines(kept / "metrics.jsonl")
    lines[-1] |= {"val/loss_32": float("nan")}
    (kept / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(kept, "kept").status == "finished"
    del lines[-1]["val/loss_64"]
    (kept / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(kept, "kept").status == "interrupted"


def test_broken_metrics_of_a_kept_run_are_named_once(folder: Path, tmp_path: Path):
    kept = Path(shutil.copytree(folder / "si", tmp_path / "kept"))
    shutil.rmtree(kept / "checkpoints")
    (kept / "metrics.jsonl").write_text("not JSON\n")
    (line,) = read_run(kept, "kept").broken
    assert line.startswith("metrics.jsonl: ")


def test_lengths_that_were_not_validated_come_from_eval_json(folder: Path):
    runs = read_runs([folder / "si"])
    assert texts(summary(runs))["si"]["Loss at 128"] == "6.000"
    assert texts(losses_by_length(runs))["si"] == {
        "Data": "–",
        "Step": "40",
        "Tokens": "1,024",
        "Loss at 32": "1.900",
        "Loss at 128": "6.000",
    }


def test_seeds_of_one_setting_are_averaged_over_the_finished(folder: Path):
    rows = texts(seeds(name_groups(read_runs(find_run_dirs([f"{folder}/*"])))))
    error = statistics.stdev([2.0, 2.2]) / 2**0.5
    assert rows["RoPE"]["Loss at 32"] == f"{statistics.mean([2.0, 2.2]):.3f} ± {error:.3f}"
    assert rows["RoPE"]["Seeds"] == "2 of 3"
    assert rows["Scale-invariant p-RoPE"]["Loss at 32"] == "*1.900*"
    assert seeds(name_groups(read_runs([folder / "si", folder / "rope-seed0"]))) is None


def test_a_seed_counts_once_and_its_copies_are_named(tmp_path: Path):
    same = {32: 2.0}
    write_report_run(tmp_path / "begun", same, "position=rope", steps=20)
    write_report_run(tmp_path / "first", same, "position=rope")
    write_report_run(tmp_path / "other", {32: 3.0}, "position=rope", seed=1)
    write_report_run(tmp_path / "resumed", same, "position=rope", "train.micro_batch_tokens=64", device="cuda")
    grid = seeds(name_groups(read_runs(find_run_dirs([f"{tmp_path}/*"]))))
    assert texts(grid)["RoPE"] == {"Seeds": "2", "Loss at 32": "2.500 ± 0.500"}
    assert grid is not None
    assert grid.caption.endswith("Not counted again: begun (the seed of first), resumed (the seed of first).")
    alone = seeds(name_groups(read_runs([tmp_path / "first", tmp_path / "resumed"])))
    assert texts(alone)["RoPE"] == {"Seeds": "1", "Loss at 32": "2.000"}


def test_fine_tunings_count_by_their_own_seed_and_the_run_they_start_from(tmp_path: Path):
    for seed, parent in ((0, "a"), (1, "a"), (0, "b")):
        needle = {"needles": 1, "seed": seed, "parent": {"run_dir": parent, "step": 40}}
        write_report_run(tmp_path / f"{parent}{seed}", {32: 0.1}, "position=rope", needle=needle)
    shutil.copytree(tmp_path / "a0", tmp_path / "copy")
    grid = seeds(name_groups(read_runs(find_run_dirs([f"{tmp_path}/*"]))))
    assert texts(grid)["RoPE, fine-tuned on needles"]["Seeds"] == "3"


def write_evaluation_of(run_dir: Path, losses: dict[int, float], **differing: Any) -> None:
    """eval.json with other data or another step than the run's own."""
    write_evaluation(run_dir, losses)
    path = run_dir / "eval.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | differing))


@pytest.mark.parametrize("differing", [{"data": "other"}, {"step": 4}], ids=["other data", "another checkpoint"])
def test_an_evaluation_elsewhere_neither_competes_nor_is_averaged(differing: dict[str, Any], tmp_path: Path):
    for seed, loss in ((0, 5.0), (1, 6.0), (2, 1.0)):
        run_dir = write_report_run(tmp_path / "runs" / str(seed), {32: 2.0}, "position=rope", seed=seed)
        write_evaluation_of(
            run_dir, {128: loss}, **(differing if seed == 2 else {"data": str(composed()["data"]["dir"])})
        )
    runs = read_runs(find_run_dirs([f"{tmp_path}/runs/*"]))
    assert [row["Loss at 128"] for row in texts(summary(runs)).values()] == ["*5.000*", "6.000", "(1.000)"]
    assert texts(seeds(name_groups(runs)))["RoPE"]["Loss at 128"] == "5.500 ± 0.500"
    assert [row["Loss at 128"] for row in texts(losses_by_length(runs)).values()] == ["*5.000*", "6.000", "1.000"]
    sections = {section["title"]: section["charts"] for section in charts(runs)}
    assert [series["x"] for series in sections["Loss by length"][0]["series"]] == [[32, 128], [32, 128], [32]]
    own, elsewhere = sections["Loss by position"]
    assert [series["run"] for series in own["series"]] == [0, 1]
    assert [series["run"] for series in elsewhere["series"]] == [2]
    assert elsewhere["title"] == f"Sequences of 128 tokens ({'other' if 'data' in differing else 'step 4'})"


def test_evaluations_on_the_same_other_data_compete_with_each_other(tmp_path: Path):
    for seed, (loss, data) in enumerate([(5.0, "other"), (6.0, "other"), (1.0, "third")]):
        run_dir = write_report_run(tmp_path / "runs" / str(seed), {32: 2.0}, "position=rope", seed=seed)
        write_evaluation_of(run_dir, {128: loss}, data=data)
    rows = texts(losses_by_length(read_runs(find_run_dirs([f"{tmp_path}/runs/*"]))))
    assert [row["Data"] for row in rows.values()] == ["other", "other", "third"]
    assert [row["Loss at 128"] for row in rows.values()] == ["*5.000*", "6.000", "1.000"]
    assert ">third<" in written(tmp_path / "runs")


def test_the_data_of_an_evaluation_are_known_by_any_name_of_their_folder(tmp_path: Path):
    run_dir = write_report_run(tmp_path / "run", {32: 2.0}, "position=rope", data={"name": "x", "dir": "data/x"})
    for data in ("data/x/", "./data/x", str(Path.cwd() / "data" / "x")):
        write_evaluation_of(run_dir, {128: 3.0}, data=data)
        assert read_run(run_dir, "run").evaluated_elsewhere == ""
    write_evaluation_of(run_dir, {128: 3.0}, data="x")
    assert read_run(run_dir, "run").evaluated_elsewhere == "x"
    shutil.rmtree(run_dir / "checkpoints")  # a kept run has the last name alone of an absolute path
    assert read_run(run_dir, "run").evaluated_elsewhere == ""


def test_losses_on_different_validation_data_do_not_compete(tmp_path: Path):
    for name, loss, data in (("a", 1.0, "one"), ("b", 2.0, "two"), ("c", 3.0, "two")):
        write_report_run(tmp_path / name, {32: loss}, "position=rope", data={"name": "x", "dir": data})
    rows = texts(summary(read_runs(find_run_dirs([f"{tmp_path}/*"]))))
    assert [row["Loss at 32"] for row in rows.values()] == ["1.000", "*2.000*", "3.000"]


def test_a_fine_tuned_run_evaluated_elsewhere_has_the_table_without_a_chart(tmp_path: Path):
    needle = {"needles": 1, "seed": 0}
    run_dir = write_report_run(tmp_path / "runs" / "tuned", {32: 0.1}, "position=rope", needle=needle)
    write_evaluation_of(run_dir, {128: 3.25}, data="other")
    assert written(tmp_path / "runs").count(">3.250<") == 1


def test_settings_of_one_scheme_are_named_by_what_differs(tmp_path: Path):
    for tau in (1, 100):
        for seed in (0, 1):
            name = tmp_path / f"tau{tau}-{seed}"
            write_report_run(name, {32: 2.0}, SCALE_INVARIANT, f"position.logits.tau={tau}", seed=seed)
    runs = read_runs(find_run_dirs([f"{tmp_path}/*"]))
    groups = name_groups(runs)
    assert {name: [run.name for run in group] for name, group in groups.items()} == {
        "Scale-invariant p-RoPE, tau = 1": ["tau1-0", "tau1-1"],
        "Scale-invariant p-RoPE, tau = 100": ["tau100-0", "tau100-1"],
    }
    colors = [style["color"] for style in styles(runs, groups)]
    assert colors[0] == colors[1] != colors[2] == colors[3]


def test_a_scheme_with_other_slots_says_so(tmp_path: Path):
    words = ["position.rotary.kind=ntk", "position.logits.kind=alibi"]
    write_report_run(tmp_path / "changed", {32: 2.0}, "position=rope", *words)
    write_report_run(tmp_path / "core", {32: 2.0}, "position=rope", "position.core.kind=infini")
    write_report_run(tmp_path / "mine", {32: 2.0}, "position=rope", "position.name=mine", *words)
    write_report_run(tmp_path / "plain", {32: 2.0}, "position=infini_p_rope", "position.rotary.base=2048")
    write_report_run(tmp_path / "tuned", {32: 2.0}, "position=rope", *words, needle={"needles": 1, "seed": 0})
    runs = read_runs(find_run_dirs([f"{tmp_path}/*"]))
    assert {name: row["Scheme"] for name, row in texts(summary(runs)).items()} == {
        "changed": "RoPE, rotary=ntk, logits=alibi",
        "core": "RoPE, core=infini",
        "mine": "mine",
        "plain": "Infini-attention, p-RoPE",
        "tuned": "RoPE, rotary=ntk, logits=alibi, fine-tuned on needles",
    }
    assert list(name_groups(runs[:2])) == ["RoPE, rotary=ntk, logits=alibi", "RoPE, core=infini"]


@pytest.mark.parametrize("scheme", [path.stem for path in (CONFIGS / "position").glob("*.yaml")])
def test_a_scheme_as_configured_goes_by_its_name_alone(scheme: str, tmp_path: Path):
    run_dir = write_report_run(tmp_path / "run", {32: 2.0}, f"position={scheme}")
    assert texts(summary(read_runs([run_dir])))["run"]["Scheme"] == scheme_name(scheme)


def test_schemes_have_the_colours_of_the_figures(folder: Path, tmp_path: Path):
    runs = read_runs([folder / "rope-seed0", folder / "rope-seed1", folder / "si"])
    drawn = styles(runs, name_groups(runs))
    assert [style["color"] for style in drawn] == [STYLES[s][0] for s in ("rope", "rope", "scale_invariant_p_rope")]
    assert [style["dash"] for style in drawn] == [""] * 3
    longer = write_report_run(tmp_path / "longer", {32: 2.0}, "position=rope", "train.length=64")
    runs = read_runs([folder / "rope-seed0", folder / "si", longer])
    first, _, other = styles(runs, name_groups(runs))
    assert first["color"] == other["color"]
    assert first["dash"] != other["dash"]


def test_a_fine_tuned_run_s_losses_stand_apart(folder: Path, tmp_path: Path):
    tuned = write_report_run(tmp_path / "tuned", {32: 0.1}, "position=rope", needle={"needles": 1, "seed": 0})
    runs = read_runs([folder / "rope-seed0", folder / "si", tuned])
    row = texts(summary(runs))["tuned"]
    assert (row["Scheme"], row["Loss at 32"]) == ("RoPE, fine-tuned on needles", "–")
    drawn = {section["title"]: section["charts"][0]["series"] for section in charts(runs)}
    assert [series["run"] for series in drawn["Validation loss"]] == [0, 1]
    assert [series["run"] for series in drawn["Fine-tuning on needles"]] == [2]


def test_only_the_settings_that_differ_and_matter_are_listed(folder: Path):
    runs = read_runs([folder / "rope-seed0", folder / "rope-seed1"])
    assert texts(differences(runs)) == {"rope-seed0": {"seed": "0"}, "rope-seed1": {"seed": "1"}}
    assert differences(runs[:1]) is None


def test_the_environment_is_read_from_the_log(folder: Path):
    row = texts(environments(read_runs([folder / "si"])))["si"]
    assert (row["Started"], row["Parameters"]) == ("2026-01-02 03:04:05", "1,234")
    assert (row["Devices"], row["Precision"], row["Passes a step"], row["Starts"]) == ("2 x cuda", "bf16", "3", "1")
    assert row["Last line of log.txt"] == "2026-01-02 03:05:06 step 40/40"
    assert row["Checkpoints at step"] == "40"
    assert row["Machine and code"] == "A GPU, 8 cores, 4 threads of AVX2, torch 2.13.0, Python 3.11.7, commit abc"


def test_needles_are_mapped_by_depth_and_length(folder: Path):
    grid = needle_map(read_run(folder / "si", "si"))
    assert grid is not None
    rows = texts(grid)
    assert grid.caption == "si"
    assert list(rows) == ["all depths", *(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10))]
    assert rows["all depths"] == {"32": "0.75", "64": "0.50"}
    assert rows["0.4 to 0.5"] == {"32": "1.00", "64": "1.00"}
    assert rows["0.9 to 1.0"] == {"32": "–", "64": "–"}


@pytest.mark.parametrize("count", [0, 1, POINTS, POINTS + 1, 10 * POINTS, 10 * POINTS + 3])
def test_a_long_curve_is_thinned_to_means_of_its_steps(count: int):
    values = np.random.default_rng(0).normal(size=count)
    steps, means = thin_out(np.arange(1, count + 1), values)
    assert len(steps) == len(means) <= POINTS
    assert steps[-1:] == [count][: len(steps)]
    sizes = np.diff([0, *steps])
    assert (sizes @ np.array(means)) == pytest.approx(values.sum(), abs=1e-8)
    if 0 < count <= POINTS:
        assert means == values.tolist()


def test_steps_without_a_value_are_no_points():
    steps, means = thin_out(np.arange(5.0), np.array([1.0, np.nan, np.inf, 4.0, np.nan]))
    assert (steps, means) == ([0, 3], [1.0, 4.0])


def test_charts_hold_the_numbers_of_the_files(folder: Path):
    sections = {section["title"]: section["charts"] for section in charts(read_runs([folder / "si"]))}
    by_length = {chart["title"]: chart["series"][0] for chart in sections["Validation loss"]}
    assert by_length["Evaluated at 64 tokens"] == {"run": 0, "x": [0, 10, 20, 30, 40], "y": [8.5, 7.5, 6.5, 5.5, 4.5]}
    assert sections["Loss by length"][0]["series"] == [{"run": 0, "x": [32, 64, 128], "y": [1.9, 4.5, 6.0]}]
    position = sections["Loss by position"][0]["series"][0]
    assert position == {"run": 0, "x": [1, 2, 4, 8, 16, 32], "y": pytest.approx([1.9, 1.8, 1.7, 1.6, 1.5, 1.4])}
    speed, memory = sections["Speed and memory"]
    assert speed["series"][0]["y"][-1] == 1040
    assert set(memory["series"][0]["y"]) == {2.0}


def test_a_real_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_tiny_data(tmp_path / "data")
    assert run(train.main, tiny_words(tmp_path)) == 0
    words = [f"run_dir={tmp_path / 'run'}", "device=cpu", "precision=fp32"]
    assert run(evaluate.main, [*words, "lengths=[16,32]"]) == 0
    task = ["needle.needles=1", "needle.digits=2", "lengths=[160]", "samples=2", "tokenizer=bytes", "finetune=false"]
    assert run(needle.main, [*words, *task]) == 0
    capsys.readouterr()
    out = tmp_path / "pages" / "report.html"
    assert run(report.main, [f"run_dirs=[{tmp_path / 'run'}]", f"out={out}"]) == 0
    assert capsys.readouterr() == (f"1 training run, {out.stat().st_size / 1e6:.2f} MB: written to {out}\n", "")
    page = out.read_text()
    losses = json.loads((tmp_path / "run" / "eval.json").read_text())["loss"]
    assert f">{losses['16']['mean']:.3f}<" in page
    assert ">1 x cpu<" in page
    assert listing(out.parent).keys() == {"report.html"}


def test_missing_files_are_one_line_each(folder: Path):
    page = written(folder)
    assert "eval.json (written by scripts/evaluate.py): rope-seed0, rope-seed1, rope-seed2" in page
    assert "metrics.jsonl (written by" not in page
    assert "Broken files" not in page


def test_a_run_that_has_not_started_is_in_the_table(folder: Path, tmp_path: Path):
    (tmp_path / "waiting").mkdir()
    rows = texts(summary(read_runs([folder / "si", tmp_path / "waiting"])))
    assert rows["waiting"]["Status"] == "not started"
    assert rows["waiting"]["Loss at 32"] == "–"


BROKEN: list[tuple[str, Any]] = [
    ("config.yaml", "{"),
    ("config.yaml", "- 1"),
    ("config.yaml", "model: {}\nposition: rope\ntrain: {steps: many}\ndata: 3"),
    ("metrics.jsonl", "not JSON\n"),
    ("metrics.jsonl", '{"step": 1, "train/loss": "<b>"}\n'),
    ("metrics.jsonl", '{"step": 1, "train/loss": [1]}\n'),
    ("eval.json", "{"),
    ("eval.json", "[]"),
    ("eval.json", '{"loss": {"32": 1}}'),
    ("eval.json", '{"loss": {"short": {"mean": 1, "tokens": 2}}}'),
    ("eval.json", '{"loss": {}, "by_position": {"32": {"edges": [0, 1], "mean": [1, 2]}}}'),
    ("needle.json", '{"accuracy": null}'),
    ("needle.json", '{"accuracy": {"32": {"mean": null, "needles": 1}}}'),
    ("needle.json", b"\xff\xfe\xff"),
    ("needle.json", "[" * 100_000),
    ("attention.json", "nothing"),
    ("attention_total.png", "<svg onload=alert(1)>"),
]


@pytest.mark.parametrize(("name", "content"), BROKEN, ids=[f"{name}-{str(of)[:24]}" for name, of in BROKEN])
def test_a_broken_file_is_named_and_the_rest_reported(folder: Path, name: str, content: str | bytes, tmp_path: Path):
    broken = Path(shutil.copytree(folder / "si", tmp_path / "broken"))
    (broken / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    runs = read_runs([broken, folder / "rope-seed1"])
    (line,) = runs[0].broken
    assert line.startswith(f"{name}: ") or (name == "config.yaml" and line.startswith("checkpoints: "))
    page = render(runs, "title", {})
    assert f"<li>{broken}/" in page
    assert ">2.200<" in page


def test_the_command_names_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    broken = write_report_run(tmp_path / "runs" / "a", {32: 3.0}, "position=rope")
    (broken / "eval.json").write_text("{")
    written(tmp_path / "runs")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"broken: {broken}/eval.json: ")


def test_a_loss_that_is_not_finite_is_called_diverged(tmp_path: Path):
    for name, loss in (("a", float("nan")), ("b", 2.0), ("c", 3.0)):
        write_evaluation(write_report_run(tmp_path / "runs" / name, {64: 2.0}, "position=rope"), {32: loss})
    rows = texts(summary(read_runs(find_run_dirs([f"{tmp_path}/runs/*"]))))
    assert [row["Loss at 32"] for row in rows.values()] == ["diverged", "*2.000*", "3.000"]
    written(tmp_path / "runs")


def test_runs_of_one_name_are_told_apart_by_their_path(tmp_path: Path):
    folders = [write_report_run(tmp_path / name / "run", {32: 2.0}, "position=rope") for name in "ab"]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_each_run_is_reported_once_in_the_order_asked_for(folder: Path):
    found = find_run_dirs([str(folder / "si"), f"{folder}/*"])
    assert [path.name for path in found] == ["si", "rope-seed0", "rope-seed1", "rope-seed2"]


def test_a_folder_may_have_a_name_that_looks_like_a_pattern(folder: Path, tmp_path: Path):
    odd = write_report_run(tmp_path / "run[1]", {32: 2.0}, "position=rope")
    assert find_run_dirs([str(odd)]) == [odd]


def test_pictures_can_be_left_out(folder: Path):
    assert "data:image/png;base64,iVBORw0KGgo" in written(folder)
    assert "data:image/png" not in written(folder, "pictures=false")


def test_different_validation_data_are_pointed_out(folder: Path, tmp_path: Path):
    write_report_run(tmp_path / "runs" / "a", {32: 2.0}, "position=rope", data={"name": "x", "dir": "data/one"})
    write_report_run(tmp_path / "runs" / "b", {32: 2.0}, "position=rope", data={"name": "x", "dir": "data/two"})
    assert "different data: data/one (1024 tokens), data/two (1024 tokens)." in written(tmp_path / "runs")
    assert "validated on different data" not in written(folder)


def test_the_title_is_free_text_and_the_command_is_told(folder: Path):
    page = written(folder, "title=[a, b] = {1}: <what>?")
    assert "<title>[a, b] = {1}: &lt;what&gt;?</title>" in page
    assert "python scripts/report.py" in page
    assert "<title>4 training runs</title>" in written(folder)


def test_the_old_page_stays_when_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_page(tmp_path / "a.html", "old")

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(tmp_path / "a.html", "new")
    assert (tmp_path / "a.html").read_text() == "old"


def test_a_name_that_is_no_utf_8_is_written(tmp_path: Path):
    write_page(tmp_path / "a.html", "a\udcffb")
    assert (tmp_path / "a.html").read_text() == "a?b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run_dirs=[nowhere]"], "run_dirs=nowhere is no folder; give run directories"),
        (["run_dirs=[{folder}/x*]"], "run_dirs={folder}/x* is no folder"),
        (["run_dirs=[{folder}/si/checkpoints]"], "holds no run with a config.yaml; give folders that train.py made"),
        (["run_dirs=[]"], "run_dirs=[] holds no run"),
        (["run_dirs={folder}"], "run_dirs={folder} must be a list, such as run_dirs=[{folder}]"),
        (["run_dirs=[{folder}/si]", "out={folder}"], "out={folder} must be the name of a page"),
        (["run_dirs=[{folder}/si]", "out=report.pdf"], "out=report.pdf must be the name of a page, such as"),
        (["run_dirs=[{folder}/si]", "pictures=some"], "pictures"),
        ([], "run_dirs is not set"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture):
    line = refusal(report.main, [word.format(folder=folder) for word in words], capsys)
    assert message.format(folder=folder) in line
