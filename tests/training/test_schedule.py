import math

import pytest

from configs.command import compose
from training.schedule import learning_rate_factor

COOLDOWN = compose("train", []).schedule.cooldown_fraction


@pytest.mark.parametrize("step", [0, 1, 1000, 3269])
def test_the_162m_recipe_keeps_its_peak_for_3270_steps(step: int):
    assert learning_rate_factor(step, 4578, "constant_then_linear", COOLDOWN) == 1.0


@pytest.mark.parametrize("step", [3270, 3271, 4000, 4577])
def test_the_162m_recipe_then_falls_linearly_over_1308_steps(step: int):
    assert learning_rate_factor(step, 4578, "constant_then_linear", COOLDOWN) == pytest.approx((4578 - step) / 1308)


def test_cosine_falls_from_one_through_a_half_towards_zero():
    factors = [learning_rate_factor(step, 10_900, "cosine") for step in range(10_900)]
    assert factors[0] == 1.0
    assert factors[5450] == pytest.approx(0.5)
    assert factors[2725] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert 0 < factors[-1] < 1e-7
    assert factors == sorted(factors, reverse=True)


def test_without_a_cooldown_the_rate_stays_at_its_peak():
    assert {learning_rate_factor(step, 10, "constant_then_linear", 0.0) for step in range(10)} == {1.0}


def test_a_cooldown_of_the_whole_run_falls_from_the_first_step_on():
    factors = [learning_rate_factor(step, 4, "constant_then_linear", 1.0) for step in range(4)]
    assert factors == [1.0, 0.75, 0.5, 0.25]


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match=r"schedule\.kind=warmup.*constant_then_linear or cosine"):
        learning_rate_factor(0, 10, "warmup")


def test_the_needle_recipe_rises_for_100_steps_stays_for_100_and_falls_for_100():
    factors = [learning_rate_factor(step, 300, "constant_then_linear", 1 / 3, 1 / 3) for step in range(300)]
    assert factors[:100] == [(step + 1) / 100 for step in range(100)]
    assert factors[100:200] == [1.0] * 100
    assert factors[200:] == [(300 - step) / 100 for step in range(200, 300)]


def test_a_warm_up_also_goes_before_a_cosine():
    plain, warm = ([learning_rate_factor(s, 40, "cosine", None, part) for s in range(40)] for part in (None, 0.25))
    assert warm[:10] == pytest.approx([(step + 1) / 10 * plain[step] for step in range(10)])
    assert warm[10:] == plain[10:]
