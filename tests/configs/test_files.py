"""Every file under configs/ can be used as it stands."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.command import CONFIGS, compose
from configs.schema import check


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def is_recipe_of_train(name: str) -> bool:
    """Experiments are of two kinds: recipes of train.py, and lists of runs for sweep.py and reproduce.py."""
    return (CONFIGS / "experiment" / f"{name}.yaml").read_text().startswith("# @package _global_")


RECIPES = [name for name in names("experiment") if is_recipe_of_train(name)]
SWEEPS = [name for name in names("experiment") if not is_recipe_of_train(name)]


@pytest.mark.parametrize("group", ["model", "position", "data", "schedule"])
def test_every_file_of_a_group_composes_to_a_valid_training_run_under_its_own_name(group: str):
    for name in names(group):
        config = compose("train", [f"{group}={name}", "data.dir=somewhere"])
        check(config)
        assert group == "schedule" or config[group].name == name


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_to_a_valid_training_run(name: str):
    check(compose("train", [f"experiment={name}"]))


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_every_sweep_composes(name: str, command: str):
    assert compose(command, [f"experiment={name}"]).experiment.name == name


def test_every_command_config_belongs_to_a_command():
    for path in CONFIGS.glob("*.yaml"):
        keys = set(OmegaConf.load(path)) - {"defaults"}
        assert keys, path
        name = "bench" if path.stem.startswith("bench_") else path.stem  # bench.py has a config for each kind
        script = CONFIGS.parent / ("train.py" if name == "train" else f"scripts/{name}.py")
        assert script.exists(), path


@pytest.mark.parametrize("position", names("position"))
def test_every_position_file_says_what_it_is(position: str):
    path = CONFIGS / "position" / f"{position}.yaml"
    assert path.read_text().startswith("# ")
    assert OmegaConf.load(path).keys() >= {"name", "rotary", "query_scale", "logits"}


def test_the_position_schemes_of_the_paper_are_there():
    published = {
        *("nope", "rope", "p_rope", "rope_ntk", "yarn", "logn_rope", "logn_p_rope", "logn_ntk", "alibi"),
        *("scale_invariant_p_rope", "scale_invariant_rope", "scale_invariant_nope"),
    }
    assert published <= set(names("position"))


def test_no_config_names_a_path_of_one_machine():
    for path in Path(CONFIGS).rglob("*.yaml"):
        assert ": /" not in path.read_text(), path
