"""Which rows the trials train on: few, and with the lengths of the whole data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from autotune.plan.order import random_order
from autotune.plan.padding import Kept, padded

DRAWS = 64
# How much a draw's distance from the data counts: the first two move the measured rate, the others its noise
LONGEST_WEIGHT = 0.1
SPREAD_WEIGHT = 0.1


def draw_sample(kept: Kept, *, rows: int, seed: int, micro_batch: int, effective_batch: int) -> tuple[int, ...]:
    """Choose rows of the data, by number, in the order they are to be written.

    `rows` is rounded up to whole optimizer steps of `effective_batch` rows; if the data has no more, all of it is
    taken. One row is drawn from each of as many equal slices of the rows sorted by length, 64 times, and the draw is
    taken that comes nearest to the data in tokens per row, in fill when padded in micro-batches of `micro_batch` in
    the order that a random sampler seeded with `seed` takes, in its longest row and in evenness of the steps.
    """
    available = len(kept.tokens)
    wanted = -(-rows // effective_batch) * effective_batch
    if wanted >= available:
        return kept.row_numbers
    ascending = sorted(range(available), key=kept.tokens.__getitem__)
    order = random_order(wanted, seed)
    mean = sum(kept.tokens) / available
    fill = padded(kept, micro_batch).fill
    longest = kept.tokens[ascending[-1]]
    best: tuple[float, list[int]] | None = None
    for attempt in range(DRAWS):
        places = _draw(ascending, wanted, random.Random(seed * DRAWS + attempt))
        tokens = [kept.tokens[place] for place in places]
        distance = (
            abs(sum(tokens) / wanted / mean - 1.0)
            + abs(_fill(tokens, order, micro_batch) / fill - 1.0)
            + LONGEST_WEIGHT * (1.0 - max(tokens) / longest)
            + SPREAD_WEIGHT * _step_spread(tokens, order, effective_batch)
        )
        if best is None or distance < best[0]:
            best = distance, places
    assert best is not None
    return tuple(kept.row_numbers[place] for place in best[1])


def _draw(ascending: Sequence[int], wanted: int, generator: random.Random) -> list[int]:
    rows = len(ascending)
    bounds = [slice_ * rows // wanted for slice_ in range(wanted + 1)]
    places = [ascending[generator.randrange(start, end)] for start, end in itertools.pairwise(bounds)]
    generator.shuffle(places)
    return places


def _fill(tokens: Sequence[int], order: Sequence[int], micro_batch: int) -> float:
    positions = 0
    for start in range(0, len(order), micro_batch):
        batch = [tokens[place] for place in order[start : start + micro_batch]]
        positions += len(batch) * max(batch)
    return sum(tokens) / positions if positions else 1.0


def _step_spread(tokens: Sequence[int], order: Sequence[int], effective_batch: int) -> float:
    """The mean distance of a step's tokens from the mean step, as a share of it."""
    steps = [
        sum(tokens[place] for place in order[start : start + effective_batch])
        for start in range(0, len(order), effective_batch)
    ]
    mean = sum(steps) / len(steps)
    return sum(abs(step - mean) for step in steps) / len(steps) / mean if mean else 0.0
