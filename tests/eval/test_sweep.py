"""Experiments and sweeps, with a small script in the place of train.py."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from eval.child import locked_log, remembered_failure
from eval.experiment import Run, expand, read_experiment, refuse_changed, select
from eval.sweep import in_order, launch, make_slots, status_table, torchrun
from tests.fake_train import STEPS, fake_train, make_runs, starts, wait_for
from training.run_config import explicit, first_difference

ROOT = Path(__file__).parents[2]
ONE_SLOT = [{"OMP_NUM_THREADS": "1"}]


@pytest.fixture
def runs_of(tmp_path, monkeypatch):
    """Makes runs with the given rows in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return make_runs


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


@pytest.mark.parametrize("key", ["name", "runs_in"])
def test_an_experiment_whose_folder_lies_elsewhere_is_refused(key):
    with pytest.raises(ValueError, match=rf"experiment\.{key}=\.\./x must be the name of one folder"):
        read_experiment(description() | {"experiment": description()["experiment"] | {key: "../x"}})


def test_an_axis_may_have_lists_as_values_and_they_are_written_as_one_word_in_folders():
    axes = {"position": ["scale_invariant_p_rope"], "position.logits.tau": [[1, 10], [10, 1], 0.01]}
    mine = description(axes=axes, seeds=[0])
    rows = [f"scale_invariant_p_rope-tau_{tau}-seed0" for tau in ("1_10", "10_1", "0.01")]
    runs = expand(read_experiment(mine), lambda words: cast(Any, OmegaConf.to_container(compose("train", words))))
    assert [run.id for run in runs] == rows
    assert [run.config["position"]["logits"]["tau"] for run in runs] == axes["position.logits.tau"]
    assert runs[0].overrides[-1] == f"run_dir=runs/tiny/{rows[0]}"


@pytest.mark.parametrize("name", ["a b", "tau=10", "é", "it's", "a\\b", "a\\'b", "end\\", "[1, 10]", "{x}"])
def test_the_folder_of_a_run_reaches_train_py_as_it_is(name):
    run = expand(read_experiment(description(name=name)), lambda _: {})[0]
    assert compose("train", [run.overrides[-1]]).run_dir == str(run.run_dir)


def test_a_dry_run_is_no_sweep():
    with pytest.raises(ValueError, match="overrides=dry_run=true: a sweep trains; plan=true says what it would"):
        read_experiment(description(overrides=["dry_run=true"]))


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
        ({"scales": {"full": None}}, r"experiment\.scales\.full=null must be a mapping; leave it out"),
        (
            {"scales": {"full": {"arguments": 3}}},
            r"experiment\.scales\.full\.arguments=3 must be a list, such as .*=\[3\]",
        ),
        ({"seeds": 1}, r"experiment\.seeds=1 must be a list, such as experiment\.seeds=\[1\]"),
        ({"seeds": 0}, r"experiment\.seeds=0 must be a list, such as experiment\.seeds=\[0\]"),
        ({"seeds": [0, "a"]}, r"experiment\.seeds=\[0,a\]: a must be a whole number"),
        ({"seeds": [True]}, r"experiment\.seeds=\[true\]: true must be a whole number"),
        ({"base": None}, r"experiment\.base=null must be a list, such as experiment\.base=\[\]"),
        ({"base": [1]}, r"experiment\.base=\[1\]: 1 must be an argument"),
        ({"fast_needle": 5}, r"experiment\.fast_needle=5 must be a list"),
        ({"axes": None}, r"experiment\.axes=null must be a mapping"),
        ({"axes": {"position": None}}, r"experiment\.axes\.position=null must be a list, such as .*position=\[rope\]"),
        ({"axes": {"position": "rope"}}, r"experiment\.axes\.position=rope must be a list, such as .*=\[rope\]"),
        ({"axes": {"position": []}}, r"experiment\.axes\.position is empty"),
        ({"same_runs": 3}, r"experiment\.same_runs=3 must be a mapping"),
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


def test_a_row_may_take_the_runs_of_another_experiment_s_row():
    axes = {"position": ["rope"], "position.logits.tau": [1, 2]}
    mine = description(runs_in="common", axes=axes, seeds=[0], same_runs={"rope-tau_1": "rope"})
    same, own = expand(read_experiment(mine), lambda _: {})
    assert (same.row, same.run_dir) == ("rope-tau_1", Path("runs/common/rope-seed0"))
    assert (own.row, own.run_dir) == ("rope-tau_2", Path("runs/common/rope-tau_2-seed0"))
    assert same.kept_dir == Path("results/runs/common/rope-seed0")


@pytest.mark.parametrize("scale", ["full", "proxy"])
def test_the_experiments_agree_on_the_runs_that_they_have_in_common(scale: str):
    arguments: dict[Path, set[tuple[str, ...]]] = {}
    for path in sorted((ROOT / "configs" / "experiment").glob("*.yaml")):
        experiment: Any = OmegaConf.load(path)
        if scale in experiment.get("scales", {}) and "axes" in experiment:
            settings = {"experiment": experiment, "scale": scale, "fast": False, "name": None, "overrides": []}
            for run in expand(read_experiment(settings), lambda _: {}):
                if run.seed == 0:
                    arguments.setdefault(run.run_dir, set()).add(run.overrides)
    shared = {folder: words for folder, words in arguments.items() if len(words) > 1}
    assert any("tau" in word for words in shared.values() for one in words for word in one)  # fig5's
    for folder, words in shared.items():
        first, *others = (explicit(compose("train", list(one))) for one in sorted(words))
        assert [first_difference(first, other) for other in others] == [None] * len(others), folder


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
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    first = rf"fails-seed0 failed with exit code 3 at {when}; the end of runs/fails-seed0/child\.log:"
    assert re.fullmatch(first, lines[0])
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
    with locked_log(taken), pytest.raises(ValueError, match="taken-seed0 is being trained by another process"):
        launch(runs, fake_train, ONE_SLOT)
    assert starts(free) == 0


def start_sweep(run: Run, folder: Path) -> subprocess.Popen:
    """A sweep of one run in a process of its own, once its child is at work."""
    driver = f"""
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the test itself runs in the background
        from eval.sweep import launch
        from tests.fake_train import fake_train, make_runs
        launch(make_runs("{run.row}"), fake_train, [{{}}])
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    sweep = subprocess.Popen(
        [sys.executable, "-c", dedent(driver)], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (run.run_dir / "pid").exists() and (run.run_dir / "pid").read_text())
    return sweep


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_children_and_leaves_the_run_resumable(runs_of, tmp_path, signum, code):
    (run,) = runs_of("sleeps")
    sweep = start_sweep(run, tmp_path)
    sweep.send_signal(signum)
    _, said = sweep.communicate(timeout=240)
    assert sweep.returncode == code
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert not is_alive(int((run.run_dir / "pid").read_text()))
    assert run.status == "interrupted"
    assert remembered_failure(run) is None


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs util-linux")
def test_a_child_does_not_outlive_a_sweep_that_is_killed_outright(runs_of, tmp_path):
    (run,) = runs_of("sleeps")
    sweep = start_sweep(run, tmp_path)
    sweep.kill()
    sweep.communicate(timeout=240)
    wait_for(lambda: not is_alive(int((run.run_dir / "pid").read_text())))


def test_a_child_that_did_outlive_its_sweep_keeps_others_out(runs_of, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no setpriv
    (run,) = runs_of("sleeps")
    sweep = start_sweep(run, tmp_path)
    sweep.kill()
    sweep.communicate(timeout=240)
    pid = int((run.run_dir / "pid").read_text())
    assert is_alive(pid)
    assert list(status_table([run], {})["status"]) == ["running"]
    with pytest.raises(ValueError, match="sleeps-seed0 is being trained by another process"):
        launch([run], fake_train, ONE_SLOT)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: list(status_table([run], {})["status"]) == ["interrupted"])


def test_a_failed_run_stays_failed_until_it_is_asked_to_be_retried(runs_of, capfd):
    failing, other = runs = runs_of("fails", "works")
    launch(runs, fake_train, ONE_SLOT)
    assert list(status_table(runs, {})["status"]) == ["failed", "finished"]
    (failure,) = launch(runs, fake_train, ONE_SLOT)
    assert (failure.run, failure.returncode, starts(failing), starts(other)) == (failing, 3, 1, 1)
    assert str(failure).endswith("\nthe reason")
    assert "starts" not in capfd.readouterr().err.split("FAILED")[1].replace("works-seed0: starts", "")
    launch(runs, fake_train, ONE_SLOT, retry_failed=1)
    assert starts(failing) == 2


def test_a_run_that_fails_once_is_finished_by_one_retry_after_the_others(runs_of, capfd):
    runs = runs_of("fails_once", "works")
    assert launch(runs, fake_train, ONE_SLOT, retry_failed=1) == []
    assert [run.status for run in runs] == ["finished", "finished"]
    said = capfd.readouterr().err.splitlines()
    order = [line for line in said if "starts" in line or "resumes" in line]
    assert order == ["fails_once-seed0: starts", "works-seed0: starts", "fails_once-seed0: resumes"]
    assert list(status_table(runs, {})["status"]) == ["finished", "finished"]


def test_a_run_that_keeps_failing_is_started_as_often_as_asked_and_named_once(runs_of):
    (failing,) = runs_of("fails")
    assert len(launch([failing], fake_train, ONE_SLOT, retry_failed=2)) == 1
    assert starts(failing) == 3


def test_a_failed_run_that_was_trained_further_by_hand_is_no_longer_failed(runs_of):
    (failing,) = runs_of("fails")
    launch([failing], fake_train, ONE_SLOT)
    (failing.run_dir / "log.txt").write_text("steps 0 to 20")
    later = (failing.run_dir / "failure.json").stat().st_mtime + 10
    os.utime(failing.run_dir / "log.txt", (later, later))
    assert list(status_table([failing], {})["status"]) == ["interrupted"]


def test_a_damaged_record_of_a_failure_is_named(runs_of):
    (run,) = runs_of("rope")
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "failure.json").write_text("{")
    with pytest.raises(ValueError, match=r"rope-seed0/failure\.json is damaged .*delete it"):
        launch([run], fake_train, ONE_SLOT)


def test_a_negative_number_of_retries_is_refused(runs_of):
    with pytest.raises(ValueError, match="retry_failed=-1 must be at least 0"):
        launch(runs_of("rope"), fake_train, ONE_SLOT, retry_failed=-1)


def test_runs_start_seed_by_seed_or_as_the_axes_say():
    runs = expand(read_experiment(description(axes={"position": ["rope", "alibi"]}, seeds=[1, 0])), lambda _: {})
    by_seed = ["rope-seed1", "alibi-seed1", "rope-seed0", "alibi-seed0"]
    assert [run.id for run in in_order(runs, "seeds")] == by_seed
    assert [run.id for run in in_order(runs, "axes")] == ["rope-seed1", "rope-seed0", "alibi-seed1", "alibi-seed0"]
    with pytest.raises(ValueError, match="order=size is unknown; choose one of: seeds, axes"):
        in_order(runs, "size")


def test_the_status_table_has_step_and_last_losses(runs_of):
    done, _, queued = runs = runs_of("done", "missing", "queued")
    launch([done], fake_train, ONE_SLOT)
    table = status_table(runs, {queued: "pending (job 7)"})
    assert list(table["status"]) == ["finished", "missing", "pending (job 7)"]
    assert list(table["step"]) == ["20/20", "0/20", "0/20"]
    assert next(iter(table["train/loss"])) == pytest.approx(0.25)


def threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": f"{count}", "THREADS_PER_PROCESS": f"{count}"}


def test_slots_share_gpus_or_cores():
    assert make_slots(2, "auto", ["0", "1", "5", "7", "8"], cores=64, n_runs=9) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "5,7"},
    ]
    assert make_slots(1, "auto", [], cores=8, n_runs=1) == [threads(8)]
    assert make_slots(1, "auto", [], cores=8, n_runs=3) == [threads(2)] * 3
    assert make_slots(1, "auto", [], cores=2, n_runs=6) == [threads(1)] * 2
    assert make_slots(2, 2, [], cores=8, n_runs=6) == [threads(2)] * 2


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
