import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import train
from configs.command import NEED_EXPERIMENT, command, compose
from tests.tiny_run import ROOT, refusal, run

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("model=gigantic", ["model=gigantic", "162m, 304m", "proxy"]),
        ("position=rotary", ["position=rotary", "scale_invariant_p_rope", "alibi"]),
        ("data=c4", ["data=c4", "fineweb10b"]),
        ("schedule=linear", ["schedule=linear", "constant_then_linear, cosine"]),
        ("experiment=nothing", ["experiment=nothing", "proxy"]),
        ("train.lenght=10", ["train.lenght=10", "did you mean train.length?"]),
        ("model.n_layers=3", ["model.n_layers=3", "did you mean model.n_layer?"]),
        ("length=10", ["length=10", "did you mean"]),
        ("train.steps=many", ["train.steps", "many", "Integer"]),
        ("optimizer.muon_lr=fast", ["optimizer.muon_lr", "fast"]),
        ("data.repeat=perhaps", ["data.repeat", "perhaps"]),
        ("validation.lengths=[32,long]", ["validation.lengths", "long"]),
        ("validation.lengths=64", ["validation.lengths", "64"]),
        ("+train.extra=1", ["train.extra"]),
        ("train.length", ["can't read train.length; a setting is KEY=VALUE"]),
        ("--fast", ["can't read --fast; a setting is KEY=VALUE"]),
        ("run_dir=runs/tau=10", ["can't read run_dir=runs/tau=10; quote", """'run_dir="runs/tau=10"'"""]),
        ("position=[infini_rope,rope]", ["position=[infini_rope,rope]: a group takes one name"]),
        ("schedule=[cosine,constant_then_linear]", ["schedule=[cosine,constant_then_linear]: a group takes one name"]),
        ("+position= [rope]", ["+position= [rope]: a group takes one name, such as position=alibi"]),
        ("seed=99999999999999999999", ["seed=99999999999999999999 is too large", "at most 9223372036854775807"]),
        ("data.shuffle_seed=99999999999999999999", ["data.shuffle_seed=99999999999999999999 is too large"]),
        ("validation.lengths=[64,99999999999999999999]", ["validation.lengths=99999999999999999999 is too large"]),
    ],
)
def test_a_mistyped_word_is_refused_in_one_line(word: str, parts: list[str], capsys: pytest.CaptureFixture):
    line = refusal(train.main, [word], capsys)
    for part in parts:
        assert part in line


def test_a_value_that_must_be_given_is_named(capsys: pytest.CaptureFixture):
    line = refusal(train.main, ["data=custom"], capsys)
    assert "data.dir is not set; add data.dir=... to the command" in line


def test_a_slot_key_needs_no_plus_sign():
    config = compose("train", ["position.logits.tau=100", "position.rotary.base=500"])
    assert config.position.logits == {"kind": "scale_invariant", "tau": 100}
    assert config.position.rotary == {"kind": "p_rope", "base": 500}


def test_the_composed_config_is_resolved():
    config = compose("train", ["model=proxy", "position=rope", "train.length=64", "seed=3"])
    assert config.run_dir == "runs/proxy-rope-64-seed3"
    assert OmegaConf.to_container(config) == OmegaConf.to_container(config, resolve=True)


def test_recipes_may_be_laid_over_each_other_but_sweeps_may_not():
    assert compose("train", ["experiment=[proxy]"]).train.length == 256
    with pytest.raises(ValueError, match=r"experiment=\[quickstart,table1\]: a group takes one name"):
        compose("sweep", ["experiment=[quickstart,table1]"])


def test_the_largest_seed_that_64_bits_hold_is_taken():
    assert compose("train", [f"seed={2**63 - 1}"]).seed == 2**63 - 1


def test_the_nearest_key_is_looked_for_in_the_experiment_that_was_chosen():
    with pytest.raises(
        ValueError, match=r"experiment\.seeds=\[1\]: there is no such key; did you mean experiment\.seed\?"
    ):
        compose("reproduce", ["experiment=fig2", "experiment.seeds=[1]"])


def test_later_words_win_over_an_experiment():
    config = compose("train", ["experiment=proxy", "train.steps=7"])
    assert (config.model.name, config.train.length, config.train.steps) == ("proxy", 256, 7)


def write_nothing(config: object) -> None:
    raise OSError(28, "No space left on device", "runs/a")


def have_a_bug(config: object) -> None:
    raise KeyError("a bug\nof ours")


def test_a_full_disk_ends_in_one_line(capsys: pytest.CaptureFixture):
    assert "No space left on device: 'runs/a'" in refusal(command("train")(write_nothing), [], capsys)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError, match="a bug"):
        run(command("train")(have_a_bug), [])


def test_full_errors_on_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(OSError, match="No space left"):
        run(command("train")(write_nothing), [])


def test_only_the_first_of_several_processes_reports_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("RANK", "1")
    assert run(train.main, ["model=gigantic"]) == 2
    assert capsys.readouterr().err == ""


def test_train_helps_with_its_keys_and_the_choices_of_each_group(capsys: pytest.CaptureFixture):
    assert run(train.main, ["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Trains one model")
    for part in ("tokens_per_step", "micro_batch_tokens", "model: 162m, 304m", "position: alibi,", "wandb:", "seed:"):
        assert part in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_helps_and_shows_its_keys(script: str, capsys: pytest.CaptureFixture):
    main = importlib.import_module(f"scripts.{script}").main
    for path in (ROOT / "configs").glob(f"{script}*.yaml"):
        kind = path.stem.removeprefix(script).split("_")[1:]  # bench.py has a config for each kind
        assert run(main, [*kind, "--help"]) == 0
        text = capsys.readouterr().out
        for key in OmegaConf.load(path):
            assert key == "defaults" or f"{key}:" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_refuses_an_unknown_key(script: str, capsys: pytest.CaptureFixture):
    main = importlib.import_module(f"scripts.{script}").main
    chosen = ["experiment=quickstart"] if script in NEED_EXPERIMENT else []
    assert "no_such_key=1" in refusal(main, [*chosen, "no_such_key=1"], capsys)


@pytest.mark.parametrize("words", [[], ["name=trial"], ["experiment="], ["experiment=null"]], ids=str)
@pytest.mark.parametrize("script", NEED_EXPERIMENT)
def test_a_sweep_must_be_chosen_out_of_those_that_its_command_can_use(
    script: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    line = refusal(importlib.import_module(f"scripts.{script}").main, words, capsys)
    assert "experiment is not set; add experiment=NAME, one of: fig1, " in line
    names = line.split("one of: ")[1].strip().split(", ")
    assert {"quickstart", "table1"} < set(names)
    assert not {"proxy", "162m_4k"} & set(names)
    assert ("fig2" in names, "fig6" in names) == (script == "reproduce",) * 2
    assert list(tmp_path.iterdir()) == []


def test_a_script_runs_from_any_folder_without_being_installed(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "evaluate.py"), "-h"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "run_dir: ???" in done.stdout
    assert list(tmp_path.iterdir()) == []
