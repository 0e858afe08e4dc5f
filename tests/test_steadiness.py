"""First steps that are still warming up."""

from __future__ import annotations

import random

import pytest

from autotune.events import Step
from autotune.search.statistics import rate_of
from autotune.search.steadiness import FEWEST_STEPS, steady, warming_up
from autotune.trial.result import passes_of


def steps_of(factors: list[float], *, pass_index: int = 1, noise: float = 0.02, seed: int = 0) -> list[Step]:
    """Steps of many sizes; each takes its size's time, times its factor."""
    chance = random.Random(seed)
    found = []
    for number, factor in enumerate(factors):
        tokens, padding = chance.randint(500, 4000), chance.randint(0, 2000)
        found.append(
            Step(
                pass_index=pass_index,
                step=number,
                seconds=factor * (0.01 * 4 + 1e-4 * (tokens + padding)) * chance.lognormvariate(0.0, noise),
                micro_batches=4,
                useful_tokens=tokens,
                padding_tokens=padding,
                loss=1.0,
            )
        )
    return found


@pytest.mark.parametrize("slow", [[], [3.0], [2.5, 1.6], [4.0, 2.0, 1.5, 1.3]])
def test_slow_first_steps_are_found_whatever_their_size(slow: list[float]) -> None:
    for seed in range(10):
        assert warming_up(steps_of([*slow, *[1.0] * (12 - len(slow))], seed=seed)) == len(slow)


def test_steady_steps_are_all_kept_however_noisy() -> None:
    for seed in range(50):
        assert warming_up(steps_of([1.0] * 12, noise=0.1, seed=seed)) <= 1
    assert sum(warming_up(steps_of([1.0] * 12, noise=0.1, seed=seed)) for seed in range(50)) < 5


def test_a_slow_step_among_others_is_noise_and_stays() -> None:
    assert warming_up(steps_of([1.0, 3.0, *[1.0] * 10])) == 0


def test_of_few_steps_nothing_is_said() -> None:
    assert warming_up(steps_of([5.0, *[1.0] * (FEWEST_STEPS - 2)])) == 0


def test_half_a_pass_is_left_out_at_most() -> None:
    assert warming_up(steps_of([2.0] * 11 + [1.0])) <= 6


def test_a_pass_keeps_its_documents_and_loses_the_time_that_warming_up_took() -> None:
    slow = [*steps_of([3.0, 2.0, *[1.0] * 10]), *steps_of([1.0] * 12, pass_index=2, seed=1)]
    fast = [*steps_of([1.0] * 12), *steps_of([1.0] * 12, pass_index=2, seed=1)]
    passes, steps = steady(passes_of(slow, {1, 2}), slow)
    expected = passes_of(fast, {1, 2})
    assert len(steps) == 22
    assert [(one.steps, one.useful_tokens) for one in passes] == [(one.steps, one.useful_tokens) for one in expected]
    assert passes[0].seconds == pytest.approx(expected[0].seconds, rel=0.02)
    assert passes[1] == expected[1]
    assert rate_of(passes, steps).value == pytest.approx(rate_of(expected, fast).value, rel=0.02)
    assert rate_of(passes_of(slow, {1, 2}), slow).value < 0.95 * rate_of(expected, fast).value


def test_what_is_steady_stays_as_it_is() -> None:
    steps = steps_of([1.0] * 12)
    assert steady(passes_of(steps, {1}), steps) == (passes_of(steps, {1}), steps)
