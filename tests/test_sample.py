"""The sample that trials train on has the lengths of the whole data."""

from __future__ import annotations

import pytest

from autotune.plan.order import random_order
from autotune.plan.padding import Kept, padded
from autotune.plan.sample import draw_sample
from tests import tiny


def kept_of(tokens: list[int], *, first_number: int = 0) -> Kept:
    numbers = tuple(range(first_number, first_number + len(tokens)))
    return Kept(row_numbers=numbers, tokens=tuple(tokens), loss_tokens=tuple(tokens), dropped_tokens=0, dropped_rows=0)


@pytest.mark.parametrize("seed", [0, 42, 7])
@pytest.mark.parametrize(("rows", "micro_batch", "effective_batch"), [(96, 8, 8), (100, 4, 16), (256, 8, 32)])
@pytest.mark.parametrize(("median", "longest"), [(40, 512), (300, 4096)])
def test_a_sample_keeps_the_mean_length_within_1_percent_and_the_fill_within_2(
    seed: int, rows: int, micro_batch: int, effective_batch: int, median: int, longest: int
) -> None:
    kept = kept_of(tiny.lengths(4000, seed=9, median=median, longest=longest))
    numbers = draw_sample(kept, rows=rows, seed=seed, micro_batch=micro_batch, effective_batch=effective_batch)
    tokens = [kept.tokens[number] for number in numbers]
    assert sum(tokens) / len(tokens) == pytest.approx(sum(kept.tokens) / len(kept.tokens), rel=0.01)
    visited = padded(kept_of(tokens), micro_batch, order=random_order(len(tokens), seed))
    assert visited.fill == pytest.approx(padded(kept, micro_batch).fill, rel=0.02)


def test_a_sample_has_different_rows_in_whole_steps() -> None:
    kept = kept_of(tiny.lengths(500, seed=1))
    numbers = draw_sample(kept, rows=50, seed=0, micro_batch=4, effective_batch=16)
    assert len(numbers) == 64
    assert len(set(numbers)) == 64


def test_a_sample_is_the_same_when_drawn_again_and_another_with_another_seed() -> None:
    kept = kept_of(tiny.lengths(500, seed=1))
    drawn = [draw_sample(kept, rows=48, seed=seed, micro_batch=4, effective_batch=8) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_small_data_is_taken_whole_in_its_order() -> None:
    kept = kept_of([5, 3, 9], first_number=7)
    assert draw_sample(kept, rows=2, seed=0, micro_batch=2, effective_batch=4) == (7, 8, 9)


def test_rows_are_named_by_their_number_in_the_data() -> None:
    kept = kept_of([4] * 100, first_number=1000)
    numbers = draw_sample(kept, rows=8, seed=0, micro_batch=2, effective_batch=4)
    assert all(1000 <= number < 1100 for number in numbers)
