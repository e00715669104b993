"""The plan of a sweep: its tokens and hours, and the refusal of runs that can't be built."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from eval.experiment import Run
from eval.sweep_plan import check_buildable, describe_plan, expected_speed, plan_table
from training.estimate import describe_run, run_flops
from training.state import build_model

SMALL = ("experiment=proxy", "model.n_layer=1", "train.steps=10", "validation.every=5")


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(row: str, *words: str, seed: int = 0) -> Run:
        config = OmegaConf.to_container(compose("train", [*SMALL, f"position={row}", f"seed={seed}", *words]))
        return Run(row, seed, {}, (), Path("runs", f"{row}-seed{seed}"), config)  # pyright: ignore[reportArgumentType]

    return make


def measured(run: Run, tokens_per_second: list[float]) -> Run:
    """Gives the run the first steps of its training."""
    run.run_dir.mkdir(parents=True)
    lines = [
        {"step": step, "tokens": step * run.config["train"]["tokens_per_step"], "train/tokens_per_second": rate}
        for step, rate in enumerate(tokens_per_second, start=1)
    ]
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.run_dir / "config.yaml").write_text("seed: 0\n")
    return run


def test_hours_on_gpus_are_those_of_the_dry_run_but_for_the_parameters_of_the_position_scheme(run_of):
    run = run_of("rope", "estimate.peak_tflops=1e-3", "estimate.devices=2", "estimate.utilisation=0.5")
    speed = expected_speed([run], devices=2, on_gpus=True)
    (hours,) = plan_table([run], speed, {})["hours"]
    (line,) = [line for line in describe_run(OmegaConf.create(dict(run.config))).splitlines() if "hours" in line]
    assert line.split()[1] == f"{hours:.2f}"
    assert hours > 0.1
    assert "at 50% of 0.001 TFLOP/s on each of 2 GPUs" in speed.basis


def test_hours_follow_the_median_speed_that_a_scheme_measured_and_others_the_mean(run_of):
    rope, alibi, nope = run_of("rope"), run_of("alibi"), run_of("nope")
    other_seed = run_of("rope", seed=1)
    measured(rope, [1.0, 1000.0, 1000.0, 1000.0])
    measured(alibi, [3000.0] * 5)
    speed = expected_speed([rope, other_seed, alibi, nope], devices=1, on_gpus=True)
    assert speed.basis == "at the tokens/s that 2 of these runs measured"
    table = plan_table([rope, other_seed, alibi, nope], speed, {}).set_index("run")
    assert list(table["left"]) == [6 * 8192, 10 * 8192, 5 * 8192, 10 * 8192]
    model = build_model(OmegaConf.create(dict(rope.config)))
    training, validating = run_flops(OmegaConf.create(dict(rope.config)), model)
    whole = (1 + validating / training) * 10 * 8192 / 3600  # hours at one token a second
    expected = [0.6 * whole / 1000, whole / 1000, 0.5 * whole / 3000, whole / 2000]
    assert list(table["hours"]) == pytest.approx(expected, rel=1e-6)


def test_on_a_cpu_without_measurements_the_hours_are_unknown_and_said_to_be(run_of):
    run = run_of("rope")
    speed = expected_speed([run], devices=1, on_gpus=False)
    text = describe_plan(plan_table([run], speed, {}), speed, devices=1, at_once=1)
    assert text.splitlines()[-1] == "hours: unknown, on a CPU they are estimated once a run has measured its tokens/s"


def test_the_sums_count_devices_and_what_runs_side_by_side(run_of):
    runs = [measured(run_of("rope"), [2000.0] * 5), run_of("rope", seed=1), run_of("rope", seed=2)]
    (runs[0].run_dir / "checkpoints" / "step_000010").mkdir(parents=True)
    speed = expected_speed(runs, devices=4, on_gpus=True)
    table = plan_table(runs, speed, {})
    one = float(table["hours"].iloc[1])
    lines = describe_plan(table.assign(hours=[0.0, 1.0, 1.0]), speed, devices=4, at_once=8).splitlines()
    assert one > 0
    assert list(table["status"]) == ["finished", "missing", "missing"]
    assert list(table["hours"]) == [0, one, one]
    assert lines[-2] == "3 runs, 2 to train; 245,760 tokens, 163,840 left"
    assert lines[-1].startswith(
        "2.00 hours of one run after the other (8.00 of a device), about 1.00 with 2 at a time;"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["position.logits.tau=-1"], r"scale_invariant_p_rope-seed0: .*tau"),
        (["position.rotary.kind=what"], r"scale_invariant_p_rope-seed0: position\.rotary\.kind=what is unknown"),
        (["attention=magic"], "scale_invariant_p_rope-seed0: .*magic"),
        (["position.core.kind=what"], "scale_invariant_p_rope-seed0: .*kind=what"),
    ],
    ids=str,
)
def test_a_run_whose_model_cannot_be_built_is_refused_by_name(run_of, words, message):
    good = run_of("rope")
    with pytest.raises(ValueError, match=message):
        check_buildable([good, run_of("scale_invariant_p_rope", *words)])


def test_runs_that_can_be_built_are_not_refused(run_of):
    check_buildable([run_of(row) for row in ("rope", "alibi", "logn_p_rope", "infini_rope")])
