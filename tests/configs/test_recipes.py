"""The recipes of the paper (section 5 of its facts), as numbers written out here once more."""

import pytest
from omegaconf import OmegaConf

from configs.command import compose
from training.schedule import learning_rate_factor

# model, length, sequences a step, steps, Muon's rate, validation interval
RECIPES = {
    "162m_4k": ("162m", 4096, 128, 4578, 0.02, 125),
    "162m_16k": ("162m", 16384, 32, 4578, 0.02, 125),
    "162m_64k": ("162m", 65536, 8, 4578, 0.02, 125),
    "304m_4k": ("304m", 4096, 224, 10_900, 0.015, 250),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_published_one(name: str):
    model, length, sequences, steps, muon_lr, every = RECIPES[name]
    config = compose("train", [f"experiment={name}"])
    assert (config.model.name, config.train.length, config.train.steps) == (model, length, steps)
    assert config.train.tokens_per_step == sequences * length
    assert config.optimizer == {
        "muon_lr": muon_lr,
        "muon_momentum": 0.95,
        "newton_schulz_steps": 5,
        "embedding_lr": 0.3,
        "output_lr": 0.002,
        "position_lr": 0.002,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    }
    assert config.validation == {"lengths": [4096, 16384, 65536], "tokens": 10_485_760, "every": every}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("162m")])
def test_the_162m_recipes_cool_down_over_the_last_1308_steps(name: str):
    schedule = compose("train", [f"experiment={name}"]).schedule
    factors = [learning_rate_factor(step, 4578, schedule.kind, schedule.cooldown_fraction) for step in range(4578)]
    assert factors[:3270] == [1.0] * 3270
    assert factors[3270:] == pytest.approx([(4578 - step) / 1308 for step in range(3270, 4578)])


def test_the_304m_recipe_follows_a_cosine():
    schedule = compose("train", ["experiment=304m_4k"]).schedule
    factors = [learning_rate_factor(step, 10_900, schedule.kind, schedule.cooldown_fraction) for step in (0, 5450)]
    assert factors == pytest.approx([1.0, 0.5])


def test_a_recipe_leaves_the_scheme_and_the_seed_to_the_command_line():
    config = compose("train", ["experiment=162m_16k", "position=alibi", "seed=2"])
    assert (config.position.name, config.seed) == ("alibi", 2)
    assert OmegaConf.select(config, "run_dir") == "runs/162m-alibi-16384-seed2"
