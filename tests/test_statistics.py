"""Rates and their uncertainty, held against simulated measurements whose truth is known."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.events import Step
from autotune.search.statistics import (
    PASS_NOISE,
    STUDENT_T,
    Estimate,
    StepCost,
    cannot_reach,
    correction,
    fit_step_cost,
    independent,
    rate_of,
    ratio_of,
    student_t,
    with_spells,
)
from autotune.trial.result import Pass, passes_of

COSTS = st.floats(0.0, 1.0)
SIZES = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 5000)), min_size=2, max_size=30)


def step(
    *,
    seconds: float,
    useful_tokens: int,
    padding_tokens: int = 0,
    micro_batches: int = 1,
    pass_index: int = 1,
    number: int = 0,
) -> Step:
    return Step(
        pass_index=pass_index,
        step=number,
        seconds=seconds,
        micro_batches=micro_batches,
        useful_tokens=useful_tokens,
        padding_tokens=padding_tokens,
        loss=1.0,
    )


def a_pass(*, seconds: float, useful_tokens: int = 1000, index: int = 1) -> Pass:
    return Pass(index=index, steps=4, seconds=seconds, useful_tokens=useful_tokens, padding_tokens=0, micro_batches=4)


def steps_costing(cost: StepCost, sizes: Sequence[tuple[int, int]]) -> list[Step]:
    """Steps of these micro-batches and positions, a third of which are padding, without noise."""
    return [
        step(
            seconds=cost.seconds(micro_batches=micro_batches, positions=positions),
            useful_tokens=positions - positions // 3,
            padding_tokens=positions // 3,
            micro_batches=micro_batches,
        )
        for micro_batches, positions in sizes
    ]


# --- what a step costs -------------------------------------------------------------------------------------------


@given(per_micro_batch=COSTS, per_position=COSTS, sizes=SIZES)
def test_known_costs_are_recovered_or_explain_the_steps_as_well(
    per_micro_batch: float, per_position: float, sizes: list[tuple[int, int]]
) -> None:
    true = StepCost(per_micro_batch, per_position)
    steps = steps_costing(true, sizes)
    found = fit_step_cost(steps)
    assert found.per_micro_batch >= 0
    assert found.per_position >= 0
    if len({positions / micro_batches for micro_batches, positions in sizes}) == 1:
        assert found.per_micro_batch == 0.0
    if not all(one.seconds > 1e-6 for one in steps):
        return
    for one in steps:
        predicted = found.seconds(micro_batches=one.micro_batches, positions=one.useful_tokens + one.padding_tokens)
        assert predicted == pytest.approx(one.seconds, rel=1e-3)


def test_costs_are_recovered_from_noisy_steps() -> None:
    generator = random.Random(0)
    true = StepCost(0.02, 1e-4)
    sizes = [(generator.randint(1, 8), generator.randint(100, 3000)) for _ in range(200)]
    noisy = [
        step(
            seconds=one.seconds * generator.lognormvariate(0, 0.03),
            useful_tokens=one.useful_tokens,
            padding_tokens=one.padding_tokens,
            micro_batches=one.micro_batches,
        )
        for one in steps_costing(true, sizes)
    ]
    found = fit_step_cost(noisy)
    assert found.per_micro_batch == pytest.approx(true.per_micro_batch, rel=0.1)
    assert found.per_position == pytest.approx(true.per_position, rel=0.05)


def test_steps_of_one_shape_put_all_cost_on_the_positions() -> None:
    found = fit_step_cost([step(seconds=0.5, useful_tokens=1000, micro_batches=2)] * 5)
    assert found == StepCost(0.0, 0.5 / 1000)


def test_a_cost_below_zero_is_none() -> None:
    """Long steps that took no longer than short ones: the length cost nothing, and may not have saved anything."""
    steps = [
        step(seconds=0.50, useful_tokens=100, micro_batches=2),
        step(seconds=0.48, useful_tokens=1000, micro_batches=2),
    ]
    found = fit_step_cost(steps)
    assert found.per_micro_batch == pytest.approx(0.245)
    assert found.per_position == 0.0


def test_no_steps_cost_nothing() -> None:
    assert fit_step_cost([]) == StepCost(0.0, 0.0)


# --- from the sample to the whole data ---------------------------------------------------------------------------


@given(per_micro_batch=COSTS, per_position=COSTS, micro_batches=st.floats(1e-4, 1.0), positions=st.floats(1.0, 10.0))
def test_a_sample_filled_as_the_whole_data_needs_no_correction(
    per_micro_batch: float, per_position: float, micro_batches: float, positions: float
) -> None:
    size = (micro_batches, positions)
    assert correction(StepCost(per_micro_batch, per_position), sample=size, whole=size) == 1.0


def test_data_with_less_padding_than_the_sample_is_faster_by_the_positions_it_saves() -> None:
    cost = StepCost(0.0, 1e-4)
    assert correction(cost, sample=(0.01, 2.0), whole=(0.01, 1.6)) == pytest.approx(1.25)
    assert correction(cost, sample=(0.01, 1.6), whole=(0.01, 2.0)) == pytest.approx(0.8)


def test_data_in_fewer_micro_batches_than_the_sample_is_faster_where_these_cost_something() -> None:
    sample, whole = (0.02, 1.0), (0.01, 1.0)
    assert correction(StepCost(0.1, 0.0), sample=sample, whole=whole) == pytest.approx(2.0)
    assert correction(StepCost(0.1, 1e-3), sample=sample, whole=whole) == pytest.approx(0.003 / 0.002)
    assert correction(StepCost(0.0, 1e-3), sample=sample, whole=whole) == 1.0


def test_steps_without_cost_are_not_corrected() -> None:
    assert correction(StepCost(0.0, 0.0), sample=(1.0, 2.0), whole=(1.0, 1.0)) == 1.0


# --- rates ---------------------------------------------------------------------------------------------------------


def test_a_rate_is_all_tokens_over_all_seconds() -> None:
    """Not the mean or the median of the passes' rates, here 5500 and 1000 to 10000."""
    passes = [a_pass(seconds=1.0, useful_tokens=1000), a_pass(seconds=3.0, useful_tokens=30_000, index=2)]
    assert rate_of(passes, []).value == 31_000 / 4.0


def test_a_single_pass_is_trusted_to_the_noise_of_a_host_and_four_to_half_of_it() -> None:
    assert rate_of([a_pass(seconds=1.0)], []).half_width == pytest.approx(PASS_NOISE)
    four = [a_pass(seconds=1.0, index=index) for index in range(1, 5)]
    assert rate_of(four, []).half_width == pytest.approx(PASS_NOISE / 2)


def test_passes_that_differ_widen_the_interval() -> None:
    passes = [a_pass(seconds=1.0), a_pass(seconds=1.2, index=2), a_pass(seconds=0.8, index=3)]
    assert rate_of(passes, []).half_width > 0.3


def test_an_interval_never_reaches_zero() -> None:
    estimate = rate_of([a_pass(seconds=1.0), a_pass(seconds=9.0, index=2)], [])
    assert estimate.half_width == pytest.approx(0.9)
    assert estimate.low > 0


def test_steps_of_unlike_lengths_are_no_noise() -> None:
    """Long and short steps at one cost: what their size explains does not widen the interval."""
    sizes = [(1, 100), (1, 4000), (1, 900), (2, 2500), (1, 50), (3, 1200)]
    steps = steps_costing(StepCost(0.01, 1e-4), sizes)
    [one] = passes_of(steps, {1})
    assert rate_of([one], steps).half_width == pytest.approx(PASS_NOISE)


def test_warm_up_steps_do_not_count() -> None:
    slow_start = [step(seconds=50.0, useful_tokens=10, pass_index=0, number=number) for number in range(5)]
    steps = steps_costing(StepCost(0.0, 1e-3), [(1, 1000)] * 5)
    estimate = rate_of(passes_of(steps, {1}), slow_start + steps)
    assert estimate.half_width == pytest.approx(PASS_NOISE)
    assert passes_of(slow_start + steps, {0, 1}) == passes_of(steps, {1})


def test_the_interval_of_noisy_steps_holds_the_true_rate() -> None:
    generator = random.Random(1)
    true = StepCost(0.01, 1e-4)
    sizes = [(generator.randint(1, 4), generator.randint(200, 3000)) for _ in range(12)]
    clean = steps_costing(true, sizes)
    rate = sum(one.useful_tokens for one in clean) / sum(one.seconds for one in clean)
    held = 0
    for _ in range(400):
        steps = [
            step(
                seconds=one.seconds * max(0.1, generator.gauss(1, 0.2)),
                useful_tokens=one.useful_tokens,
                padding_tokens=one.padding_tokens,
                micro_batches=one.micro_batches,
            )
            for one in clean
        ]
        estimate = rate_of(passes_of(steps, {1}), steps)
        held += estimate.low <= rate <= estimate.high
    assert held >= 0.90 * 400


def test_the_interval_of_a_pass_holds_the_true_rate_though_slow_spells_last_over_several_steps() -> None:
    """Steps in two states, each lasting several: intervals that took steps as independent held the rate less often."""
    held = naive = 0
    for seed in range(300):
        generator = random.Random(seed)
        slow, steps = generator.random() < 0.5, []
        for number in range(24):
            slow = slow if generator.random() < 0.75 else not slow
            seconds = (1.25 if slow else 1.0) * math.exp(generator.gauss(0.0, 0.02))
            steps.append(step(seconds=seconds, useful_tokens=1000, number=number))
        estimate = rate_of(passes_of(steps, {1}), steps)
        held += estimate.low <= 1000 / 1.125 <= estimate.high
        times = [one.seconds for one in steps]
        spread = statistics.stdev(times) * student_t(23) / math.sqrt(24)
        naive += abs(statistics.mean(times) - 1.125) <= spread
    assert held > naive + 30
    assert held / 300 > 0.75


# --- ratios --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2, 4, 8])
@pytest.mark.parametrize("true_ratio", [1.0, 2.5])
def test_the_interval_of_a_ratio_holds_the_true_one_in_95_of_100_simulations(rounds: int, true_ratio: float) -> None:
    """Both passes of a pair share a host's slow spell, and each has noise of its own."""
    generator = random.Random(rounds)
    simulations = 3000
    held = 0
    for _ in range(simulations):
        pairs = []
        for _ in range(rounds):
            spell = generator.lognormvariate(0, 0.2)
            first = a_pass(seconds=spell * generator.lognormvariate(0, 0.03))
            second = a_pass(seconds=spell / true_ratio * generator.lognormvariate(0, 0.03))
            pairs.append((first, second))
        estimate = ratio_of(pairs)
        held += estimate.low <= true_ratio <= estimate.high
    assert held / simulations == pytest.approx(0.95, abs=0.015)


def test_a_ratio_is_the_geometric_mean_over_the_pairs() -> None:
    pairs = [(a_pass(seconds=1.0), a_pass(seconds=0.5)), (a_pass(seconds=1.0), a_pass(seconds=0.125))]
    estimate = ratio_of(pairs)
    assert estimate.value == pytest.approx(4.0)
    assert estimate.low < 2.0
    assert estimate.high > 8.0


def test_a_slow_spell_that_both_passes_share_does_not_move_the_ratio() -> None:
    estimate = ratio_of([(a_pass(seconds=spell), a_pass(seconds=spell / 2)) for spell in (1.0, 3.0, 1.5)])
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_pair_is_trusted_to_the_noise_of_two_passes() -> None:
    estimate = ratio_of([(a_pass(seconds=1.0), a_pass(seconds=0.5))])
    noise = math.exp(2 * PASS_NOISE)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0 / noise, 2.0, 2.0 * noise))


# --- when to stop --------------------------------------------------------------------------------------------------


@given(
    rates=st.lists(st.floats(10.0, 1e5), min_size=1, max_size=40),
    steps_per_pass=st.integers(1, 40),
    headroom=st.floats(1.0, 3.0),
)
def test_one_that_is_as_fast_as_the_best_within_the_margin_is_never_stopped(
    rates: list[float], steps_per_pass: int, headroom: float
) -> None:
    steps = [step(seconds=1000 / rate, useful_tokens=1000) for rate in rates]
    so_far = 1000 * len(steps) / sum(one.seconds for one in steps)
    done = min(1.0, len(steps) / steps_per_pass)
    margin = 0.6 if done <= 0.1 else 0.06 / done  # 60 % after a tenth, 12 % after a half, 6 % at the end
    assert not cannot_reach(steps, steps_per_pass=steps_per_pass, best_low=so_far * (1 + margin) / headroom * 0.999)


@pytest.mark.parametrize(("done", "margin"), [(2, 0.6), (10, 0.12), (20, 0.06)])
def test_the_margin_narrows_as_a_pass_goes_on(done: int, margin: float) -> None:
    steps = [step(seconds=1.0, useful_tokens=1000)] * done
    assert not cannot_reach(steps, steps_per_pass=20, best_low=1000 * (1 + margin) * 0.999)
    assert cannot_reach(steps, steps_per_pass=20, best_low=1000 * (1 + margin) * 1.001)


@given(seconds=st.floats(1e-3, 100.0), done=st.integers(2, 50), steps_per_pass=st.integers(1, 50))
def test_one_that_is_half_as_fast_is_stopped_from_its_second_step(
    seconds: float, done: int, steps_per_pass: int
) -> None:
    steps = [step(seconds=seconds, useful_tokens=1000)] * done
    assert cannot_reach(steps, steps_per_pass=steps_per_pass, best_low=2 * 1000 / seconds)


def test_one_step_tells_nothing() -> None:
    assert not cannot_reach([step(seconds=100.0, useful_tokens=1)], steps_per_pass=10, best_low=1e6)


# --- Student's t -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", range(1, len(STUDENT_T) + 1))
def test_students_t_leaves_five_in_a_hundred_outside(degrees: int) -> None:
    assert inside(student_t(degrees), degrees) == pytest.approx(0.95, abs=1e-4)


def test_beyond_the_table_the_normal_distribution_stands_for_students() -> None:
    assert student_t(31) == student_t(1000) == 1.96
    assert inside(1.96, 1000) == pytest.approx(0.95, abs=1e-3)


def inside(quantile: float, degrees: int) -> float:
    """The probability of Student's t within +-quantile, by Simpson's rule on x = sqrt(degrees) * tan(angle)."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    end = math.atan(quantile / math.sqrt(degrees))
    pieces = 2000
    values = [math.cos(end * place / pieces) ** (degrees - 1) for place in range(pieces + 1)]
    weights = [1, *([4, 2] * (pieces // 2))[:-1], 1]
    return 2 * scale * end / pieces / 3 * sum(weight * value for weight, value in zip(weights, values, strict=True))


def test_estimates_overlap_where_their_intervals_touch() -> None:
    assert Estimate(1.0, 0.9, 1.1).overlaps(Estimate(1.2, 1.1, 1.3))
    assert not Estimate(1.0, 0.9, 1.1).overlaps(Estimate(1.3, 1.2, 1.4))
    assert Estimate(0.0, 0.0, 1.0).half_width == math.inf


def test_turns_that_resemble_their_neighbours_are_worth_fewer() -> None:
    scattered = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    spells = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert independent(scattered) == 8
    assert independent(spells) == pytest.approx(8 * (1 - 0.625) / (1 + 0.625))
    assert independent([1.0] * 8) == 8


def test_a_few_turns_are_taken_as_independent() -> None:
    assert independent([0.0, 0.0, 1.0, 1.0]) == 4


def test_the_interval_of_a_ratio_covers_the_truth_though_the_host_has_slow_spells() -> None:
    """Ratios in two states, each lasting several turns: 95 % intervals that took turns as independent held the mean
    in 62 % of runs."""
    held = naive = 0
    for seed in range(400):
        generator = random.Random(seed)
        slow, pairs = generator.random() < 0.5, []
        for _ in range(12):
            slow = slow if generator.random() < 0.75 else not slow
            rate = (3.9 if slow else 4.7) * math.exp(generator.gauss(0.0, 0.03))
            pairs.append((a_pass(seconds=1.0), a_pass(seconds=1.0 / rate)))
        ratio = ratio_of(pairs)
        truth = math.sqrt(3.9 * 4.7)
        held += ratio.low <= truth <= ratio.high
        logarithms = [math.log(one.rate / base.rate) for base, one in pairs]
        spread = statistics.stdev(logarithms) * student_t(11) / math.sqrt(12)
        naive += abs(statistics.mean(logarithms) - math.log(truth)) <= spread
    assert held > naive
    assert held / 400 > 0.8


def around(value: float, share: float) -> Estimate:
    return Estimate(value, value * math.exp(-share), value * math.exp(share))


def test_two_looks_that_agree_leave_the_interval_as_it_is() -> None:
    assert with_spells(around(4.0, 0.02), around(4.1, 0.05), seconds=30) == around(4.0, 0.02)


def test_two_looks_that_disagree_widen_the_interval_and_longer_turns_less() -> None:
    ratio, earlier = around(3.67, 0.02), around(4.49, 0.05)
    short, long = (with_spells(ratio, earlier, seconds=seconds) for seconds in (27, 300))
    assert short.value == long.value == 3.67
    assert short.low < 3.0
    assert short.high > 4.49
    assert ratio.half_width < long.half_width < short.half_width / 2


def test_an_earlier_look_without_a_known_interval_says_nothing() -> None:
    assert with_spells(around(4.0, 0.02), Estimate(2.0, 0.0, 9.0), seconds=30) == around(4.0, 0.02)


def test_slow_spells_as_long_as_the_turns_are_seen_by_the_earlier_look() -> None:
    """A spell moves each look by 7 %: the turns' own intervals held the truth in one of four runs."""
    held = alone = 0
    generator = random.Random(1)
    for _ in range(1000):
        ratio = around(math.exp(generator.gauss(0, 0.07)), 0.02)
        earlier = around(math.exp(generator.gauss(0, 0.07)), 0.06)
        wide = with_spells(ratio, earlier, seconds=27)
        held += wide.low <= 1.0 <= wide.high
        alone += ratio.low <= 1.0 <= ratio.high
    assert alone / 1000 < 0.3
    assert held / 1000 > 0.65
