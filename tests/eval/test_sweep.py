"""Experiments and sweeps, with a small script in the place of train.py."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from eval.experiment import Run, expand, read_experiment, refuse_changed, select
from eval.sweep import launch, make_slots, status_table, torchrun

STEPS = 20
ONE_SLOT = [{"OMP_NUM_THREADS": "1"}]
# Does what its row says, as train.py would: appends metrics, saves the last checkpoint as its last act.
FAKE_TRAIN = """
    import json, os, sys, time
    from pathlib import Path
    run_dir, steps = Path(sys.argv[1]), int(sys.argv[2])
    row = run_dir.name.rpartition("-")[0]
    (run_dir / "starts").open("a").write("start\\n")
    (run_dir / "config.yaml").write_text("seed: 0\\n")
    if row == "fails":
        print(*[f"line {n}" for n in range(100)], "the reason", sep="\\n")
        print("E1130 12:00:00.123 77 /x/torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)")
        print(*["torchrun's own words"] * 40, sep="\\n")
        sys.exit(3)
    if row == "sleeps":
        (run_dir / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    if row in ("left", "right"):  # each waits until the other one is there too
        other = run_dir.parent / {"left": "right-seed0", "right": "left-seed0"}[row] / "starts"
        while not other.exists():
            time.sleep(0.01)
    with (run_dir / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            time.sleep(0.04 if row == "slow" else 0)
            print(json.dumps({"step": step, "tokens": 10 * step, "train/loss": 5 / step}), file=metrics, flush=True)
        print(json.dumps({"step": steps, "tokens": 10 * steps, "val/loss_256": 1.5}), file=metrics)
    if row != "forgets":
        (run_dir / "checkpoints" / f"step_{steps:06d}").mkdir(parents=True)
"""


@pytest.fixture
def runs_of(tmp_path, monkeypatch):
    """Makes runs with the given rows in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake_train.py").write_text(dedent(FAKE_TRAIN))
    config = {"train": {"steps": STEPS, "tokens_per_step": 10}, "validation": {"lengths": [256]}}

    def make(*rows: str) -> list[Run]:
        return [Run(row, 0, {"position": row}, (), Path("runs", f"{row}-seed0"), config) for row in rows]

    return make


def fake_train(run: Run) -> list[str]:
    return [sys.executable, "fake_train.py", str(run.run_dir), str(STEPS)]


def starts(run: Run) -> int:
    path = run.run_dir / "starts"
    return len(path.read_text().split()) if path.exists() else 0


def description(**changes) -> dict:
    experiment = {
        "name": "tiny",
        "title": "Tiny",
        "base": ["model=proxy"],
        "scales": {"full": {"arguments": ["train.steps=9"]}, "proxy": {"arguments": ["train.steps=3"]}},
        "axes": {"position": ["rope", "alibi"], "position.logits.tau": [1, 0.5]},
        "seeds": [0, 1],
        "fast": ["train.steps=1"],
    }
    settings = {"name": None, "scale": None, "fast": False, "overrides": []}
    experiment |= {key: value for key, value in changes.items() if key not in settings}
    return settings | {key: value for key, value in changes.items() if key in settings} | {"experiment": experiment}


def test_runs_are_the_product_of_the_axes_then_the_seeds():
    runs = expand(read_experiment(description()), lambda overrides: {"overrides": overrides})
    assert [run.id for run in runs[:3]] == ["rope-tau_1-seed0", "rope-tau_1-seed1", "rope-tau_0.5-seed0"]
    assert len(runs) == 8
    assert " ".join(runs[-1].overrides) == (
        "model=proxy train.steps=9 position=alibi position.logits.tau=0.5 seed=1 run_dir=runs/tiny/alibi-tau_0.5-seed1"
    )
    assert runs[-1].config["overrides"] == list(runs[-1].overrides)


@pytest.mark.parametrize(
    ("settings", "folder", "last_argument"),
    [
        ({}, "tiny", "train.steps=9"),
        ({"fast": True}, "tiny-fast", "train.steps=1"),
        ({"scale": "proxy"}, "proxy/tiny", "train.steps=3"),
        ({"name": "other", "overrides": ["model=162m"]}, "other", "model=162m"),
    ],
)
def test_scale_fast_and_name_choose_folder_and_arguments(settings, folder, last_argument):
    experiment = read_experiment(description(**settings))
    assert (experiment.folder, experiment.shared[-1]) == (folder, last_argument)
    assert experiment.results == Path("results", folder)


def test_experiments_may_share_their_runs_but_not_their_results_and_a_name_separates_both():
    shared = read_experiment(description(runs_in="common", scale="proxy"))
    assert (shared.runs_in, shared.results) == ("proxy/common", Path("results/proxy/tiny"))
    assert expand(shared, lambda _: {})[0].run_dir.parent == Path("runs/proxy/common")
    assert read_experiment(description(runs_in="common", name="other")).runs_in == "other"


def test_a_scale_brings_its_own_data_and_published_table():
    scales = {"full": {"arguments": [], "prepare": ["source=a"], "published": "table9"}, "proxy": {"arguments": []}}
    full, proxy = (read_experiment(description(scales=scales, scale=scale)) for scale in scales)
    assert (full.prepare, full.published, proxy.prepare, proxy.published) == (("source=a",), "table9", (), None)


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp", ".."])
def test_a_name_that_leaves_its_folder_is_refused(name):
    with pytest.raises(ValueError, match=r"name=.* must be the name of one folder"):
        read_experiment(description(name=name))


@pytest.mark.parametrize("word", ["seed=7", "position=nope", "+run_dir=x"])
def test_an_override_of_what_the_sweep_sets_is_refused(word):
    with pytest.raises(ValueError, match=r"overrides=.* the sweep itself sets "):
        read_experiment(description(overrides=[word]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1}, r"unknown key experiment\.colour"),
        ({"seeds": []}, r"experiment\.seeds is empty"),
        ({"scales": {"full": {"argument": []}}}, r"experiment\.scales\.full=.* must have arguments"),
        ({"scale": "huge"}, "scale=huge is not defined for experiment=tiny; choose one of: full, proxy"),
    ],
)
def test_a_wrong_experiment_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_experiment(description(**changes))


def test_a_recipe_of_train_py_is_not_an_experiment():
    with pytest.raises(ValueError, match="has no key axes"):
        read_experiment(description() | {"experiment": {"name": "proxy"}})


def test_two_runs_in_one_folder_are_refused():
    with pytest.raises(ValueError, match="the run rope-seed0 twice"):
        expand(read_experiment(description(axes={"position": ["rope", "rope"]}, seeds=[0])), lambda _: {})


def test_a_reference_that_is_no_row_is_refused_before_anything_starts():
    known = description(axes={"position": ["rope", "alibi"]}, reference="alibi")
    assert read_experiment(known).reference == "alibi"
    with pytest.raises(ValueError, match=r"experiment\.reference=yarn is no row of .*; choose one of: rope, alibi"):
        expand(read_experiment(description(axes={"position": ["rope", "alibi"]}, reference="yarn")), lambda _: {})


def test_what_is_measured_is_kept_by_scale_and_of_trials_not_at_all():
    assert read_experiment(description(runs_in="4k")).kept_in == Path("results/runs/4k")
    small = read_experiment(description(runs_in="4k", scale="proxy"))
    assert small.kept_in == Path("results/proxy/runs/4k")
    assert expand(small, lambda _: {})[0].kept_dir == Path("results/proxy/runs/4k/rope-tau_1-seed0")
    for trial in ({"fast": True}, {"name": "mine"}):
        assert expand(read_experiment(description(**trial)), lambda _: {})[0].kept_dir is None


def test_only_selects_by_axis_value_or_run_id_and_refuses_the_unknown():
    runs = expand(read_experiment(description()), lambda _: {})
    assert {run.axes["position"] for run in select(runs, ["rope"])} == {"rope"}
    assert [run.id for run in select(runs, ["alibi-tau_1-seed1"])] == ["alibi-tau_1-seed1"]
    assert select(runs, []) == runs
    with pytest.raises(ValueError, match="only=yarn matches no run"):
        select(runs, ["yarn"])


def test_a_folder_of_another_configuration_is_refused_but_not_one_that_is_only_watched_differently(tmp_path):
    from training.run_config import write_config

    def run(*overrides: str) -> Run:
        config = compose("train", ["experiment=proxy", f"run_dir={tmp_path}", *overrides])
        return Run("rope", 0, {}, (), tmp_path, OmegaConf.to_container(config))  # pyright: ignore[reportArgumentType]

    write_config(tmp_path, OmegaConf.create(dict(run("train.steps=5").config)))
    refuse_changed([run("train.steps=5"), run("train.steps=5", "wandb.mode=offline", "train.checkpoint_every=7")])
    with pytest.raises(ValueError, match=r"made with train\.steps=5, .* with train\.steps=6; .*delete that directory"):
        refuse_changed([run("train.steps=6")])


def test_a_sweep_trains_what_is_missing_and_resumes_what_was_interrupted_and_skips_what_is_finished(runs_of, capfd):
    finished, interrupted, _ = runs = runs_of("finished", "interrupted", "missing")
    (finished.run_dir / "checkpoints" / f"step_{STEPS:06d}").mkdir(parents=True)
    interrupted.run_dir.mkdir()
    (interrupted.run_dir / "config.yaml").write_text("seed: 0\n")
    assert launch(runs, fake_train, ONE_SLOT) == []
    assert [run.status for run in runs] == ["finished"] * 3
    assert [starts(run) for run in runs] == [0, 1, 1]
    said = capfd.readouterr().err
    assert "interrupted-seed0: resumes" in said
    assert "missing-seed0: starts" in said


def test_a_failing_run_is_named_with_the_last_lines_of_its_log_while_the_others_go_on(runs_of):
    failing, other = runs = runs_of("fails", "works")
    (failure,) = launch(runs, fake_train, ONE_SLOT)
    assert (failure.run, failure.returncode, other.status) == (failing, 3, "finished")
    lines = str(failure).splitlines()
    assert lines[0] == "fails-seed0 failed with exit code 3; the end of runs/fails-seed0/child.log:"
    assert lines[1:] == [f"line {n}" for n in range(86, 100)] + ["the reason"]  # without torchrun's own report


def test_a_child_that_ends_well_without_its_last_checkpoint_has_failed(runs_of):
    (failure,) = launch(runs_of("forgets"), fake_train, ONE_SLOT)
    assert failure.returncode == 0


def test_as_many_runs_are_under_way_as_there_are_slots(runs_of):
    runs = runs_of("left", "right")  # neither ends unless both run
    assert launch(runs, fake_train, ONE_SLOT * 2) == []


def test_without_a_terminal_progress_is_a_few_plain_lines_with_rate_and_remaining_time(runs_of, capfd):
    launch(runs_of("slow"), fake_train, ONE_SLOT)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "slow-seed0: starts"
    assert re.search(r"^\d+% of 200 tokens, \d+ tok/s, \d\d:\d\d left; slow-seed0 \(\d\.\d{3}\)$", lines[1])
    assert len(lines) <= 12
    assert lines[-1] == "slow-seed0: finished (256: 1.500)"


def test_a_run_that_another_process_trains_is_refused_before_anything_starts(runs_of):
    free, taken = runs = runs_of("free", "taken")
    taken.run_dir.mkdir(parents=True)
    with (taken.run_dir / "child.log").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="taken-seed0 is being trained by another process"):
            launch(runs, fake_train, ONE_SLOT)
    assert starts(free) == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_children_and_leaves_the_run_resumable(runs_of, tmp_path, signum, code):
    (run,) = runs_of("sleeps")
    driver = f"""
        import signal, sys
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the test itself runs in the background
        from eval.experiment import Run
        from eval.sweep import launch
        config = {dict(run.config)}
        run = Run("sleeps", 0, {{}}, (), Path("runs/sleeps-seed0"), config)
        launch([run], lambda run: [sys.executable, "fake_train.py", str(run.run_dir), "{STEPS}"], [{{}}])
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    sweep = subprocess.Popen(
        [sys.executable, "-c", dedent(driver)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    pid_file = run.run_dir / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    sweep.send_signal(signum)
    _, said = sweep.communicate(timeout=10)
    assert sweep.returncode == code
    assert "the same command goes on" in said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert run.status == "interrupted"


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in 20 s"
        time.sleep(0.02)


def test_the_status_table_has_step_and_last_losses(runs_of):
    done, _ = runs = runs_of("done", "missing")
    launch([done], fake_train, ONE_SLOT)
    table = status_table(runs)
    assert list(table["status"]) == ["finished", "missing"]
    assert list(table["step"]) == ["20/20", "0/20"]
    assert next(iter(table["train/loss"])) == pytest.approx(0.25)


def test_slots_share_gpus_or_cores():
    assert make_slots(2, "auto", ["0", "1", "5", "7", "8"], cores=64, n_runs=9) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "5,7"},
    ]
    assert make_slots(1, "auto", [], cores=8, n_runs=1) == [{"OMP_NUM_THREADS": "8"}]
    assert make_slots(1, "auto", [], cores=8, n_runs=3) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert make_slots(1, "auto", [], cores=2, n_runs=6) == [{"OMP_NUM_THREADS": "1"}] * 2
    assert make_slots(2, 2, [], cores=8, n_runs=6) == [{"OMP_NUM_THREADS": "2"}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "auto", []), "gpus_per_run=0"),
        ((1, 0, []), "runs_at_once=0"),
        ((1, "many", []), "runs_at_once=many"),
        ((4, "auto", ["0"]), "gpus_per_run=4, but there are 1 GPUs"),
        ((1, 3, ["0", "1"]), "needs 3 GPUs, but there are 2"),
    ],
)
def test_impossible_slots_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_slots(*arguments, cores=2, n_runs=6)


def test_a_run_is_train_py_under_torchrun(runs_of):
    (run,) = runs_of("rope")
    words = torchrun(4)(run)
    assert words[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "train.py"]
