"""What is kept of runs, from run folders that were made by hand."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from configs.command import compose
from eval import kept
from eval.experiment import Run, refuse_changed
from eval.kept import keep, portable, thinned
from eval.sweep import status_table
from tests.tiny_run import listing
from training.run_config import write_config

STEPS = 400


def make_run(folder: Path, *words: str, finished: bool = True) -> Run:
    """A run of the proxy with all that may lie in its folder."""
    run_dir = folder / "runs" / "rope-seed0"
    config = compose("train", ["experiment=proxy", f"run_dir={run_dir}", *words])
    container = plain(config)
    write_config(run_dir, config)
    lines = [{"step": step, "tokens": 8192 * step, "train/loss": 1 / step} for step in range(1, STEPS + 1)]
    lines += [{"step": step, "tokens": 8192 * step, "val/loss_256": 2.5} for step in (0, 200, STEPS)]
    lines.sort(key=lambda line: line["step"])
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "eval.json").write_text(json.dumps({"data": "/home/someone/data/tiny", "loss": {"256": 1.5}}))
    (run_dir / "log.txt").write_text("not kept")
    if finished:
        (run_dir / "checkpoints" / f"step_{STEPS:06d}").mkdir(parents=True)
    return Run("rope", 0, {"position": "rope"}, (), run_dir, container, folder / "results" / "runs" / "rope-seed0")


def plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config))


def only_kept(run: Run) -> Run:
    """The same run on another machine."""
    run.run_dir.rename(run.run_dir.with_name("moved"))
    return run


def test_config_metrics_and_measurements_are_kept_and_nothing_else(tmp_path: Path):
    run = make_run(tmp_path)
    (run.run_dir / "needle.json").write_text('{"accuracy": 1}')
    assert keep(run) == run.kept_dir
    assert set(listing(tmp_path / "results")) == {
        f"runs/rope-seed0/{name}" for name in ("config.yaml", "metrics.jsonl", "eval.json", "needle.json")
    }


def test_a_run_that_is_not_finished_or_is_a_trial_is_not_kept(tmp_path: Path):
    run = make_run(tmp_path, finished=False)
    assert keep(run) is None
    trial = Run("rope", 0, {}, (), make_run(tmp_path).run_dir, run.config)
    assert trial.status == "finished"
    assert keep(trial) is None
    assert not (tmp_path / "results").exists()


def test_a_kept_run_is_finished_and_is_read_where_it_is_kept(tmp_path: Path):
    run = make_run(tmp_path)
    keep(run)
    assert run.record == run.run_dir
    assert only_kept(run).record == run.kept_dir
    assert run.status == "finished"
    table = status_table([run], {})
    assert table[["status", "step", "val/loss_256"]].to_numpy().tolist() == [["finished", "400/400", 2.5]]
    assert keep(run) is None


def test_a_run_that_was_begun_again_is_taken_from_its_own_folder(tmp_path: Path):
    run = make_run(tmp_path)
    keep(run)
    (run.run_dir / "checkpoints" / f"step_{STEPS:06d}").rmdir()
    assert (run.record, run.status) == (run.run_dir, "interrupted")


def test_metrics_are_thinned_to_all_validations_and_about_fifty_training_steps(tmp_path: Path):
    lines = [json.loads(line) for line in (make_run(tmp_path).run_dir / "metrics.jsonl").read_text().splitlines()]
    few = thinned(lines)
    assert [line["step"] for line in few if "val/loss_256" in line] == [0, 200, 400]
    training = [line["step"] for line in few if "train/loss" in line]
    assert training == list(range(8, 401, 8))
    assert thinned(few) == few
    assert thinned([]) == []


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("/home/someone/data/tiny", "tiny"),
        ("/data/tiny/", "tiny"),
        ("python x.py run_dir=/a/b/NAME out='/c/d' tokens=5", "python x.py run_dir=NAME out='d' tokens=5"),
        ("data/shards/tiny", "data/shards/tiny"),
        ("./runs/a and ../b/c", "./runs/a and ../b/c"),
        ("https://example.org/a/b at 5 tokens/s, 1 / 2", "https://example.org/a/b at 5 tokens/s, 1 / 2"),
    ],
)
def test_absolute_paths_lose_all_but_their_last_name(text: str, without: str):
    assert portable({"a": [text, 1, None]}) == {"a": [without, 1, None]}


def test_nothing_that_is_kept_names_a_place_on_the_machine(tmp_path: Path):
    run = make_run(tmp_path, f"data.dir={tmp_path}/tiny")
    keep(run)
    everything = b"".join(listing(tmp_path / "results").values())
    assert str(tmp_path).encode() not in everything
    assert b"/home" not in everything


def test_a_kept_run_of_another_configuration_is_refused_but_not_one_whose_data_lie_elsewhere(tmp_path: Path):
    run = make_run(tmp_path, f"data.dir={tmp_path}/tiny")
    keep(run)
    only_kept(run)
    refuse_changed([run])

    def now(*words: str) -> Run:
        config = plain(compose("train", ["experiment=proxy", f"run_dir={run.run_dir}", *words]))
        return Run("rope", 0, {}, (), run.run_dir, config, run.kept_dir)

    refuse_changed([now("data.dir=data/tiny")])
    with pytest.raises(
        ValueError, match=r"results/runs/rope-seed0 was made with data\.dir=tiny, .* with data\.dir=other"
    ):
        refuse_changed([now("data.dir=data/other")])
    with pytest.raises(ValueError, match=r"train\.steps=400, but .* train\.steps=7; choose another name="):
        refuse_changed([now("data.dir=tiny", "train.steps=7")])


def test_a_kept_run_is_replaced_when_there_is_more_and_left_alone_when_there_is_not(tmp_path: Path):
    run = make_run(tmp_path)
    folder = keep(run)
    assert folder
    before = folder.stat().st_ino
    keep(run)
    assert folder.stat().st_ino == before
    (run.run_dir / "needle.json").write_text("{}")
    keep(run)
    assert (folder / "needle.json").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_run_trained_again_keeps_what_was_not_measured_again_unless_its_config_is_another(tmp_path: Path):
    run = make_run(tmp_path)
    (run.run_dir / "needle.json").write_text("{}")
    folder = keep(run)
    assert folder
    (run.run_dir / "needle.json").unlink()
    (run.run_dir / "eval.json").write_text('{"loss": 2}')
    keep(run)
    assert json.loads((folder / "eval.json").read_text()) == {"loss": 2}
    assert (folder / "needle.json").read_text() == "{}\n"
    run.run_dir.rename(run.run_dir.with_name("moved"))
    make_run(tmp_path, "train.tokens_per_step=4096", "train.micro_batch_tokens=4096")
    keep(run)
    assert not (folder / "needle.json").exists()


def test_a_kill_while_keeping_leaves_no_part_that_looks_like_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path)
    files = {name: text for name, text in kept.kept_files(run.run_dir).items() if name != "eval.json"}
    monkeypatch.setattr(kept, "kept_files", lambda _: files | {"eval.json": None})  # can't be written
    with pytest.raises(TypeError):
        keep(run)
    assert run.kept_dir
    assert not run.kept_dir.exists()
    monkeypatch.undo()
    keep(run)
    assert [path.name for path in run.kept_dir.parent.iterdir()] == ["rope-seed0"]
