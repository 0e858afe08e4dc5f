"""Which rows the trials train on: few, and with the lengths of the whole data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from autotune.plan.order import random_order
from autotune.plan.padding import Kept, mean_fill, padded

DRAWS = 64
# Against one for the distance in tokens and in fill: those two move a measured rate, these two its noise
LONGEST_WEIGHT = 0.1
SPREAD_WEIGHT = 0.1


def draw_sample(kept: Kept, *, rows: int, seed: int, micro_batch: int, effective_batch: int) -> tuple[int, ...]:
    """Choose rows of the data, by number, in the order they are to be written.

    `rows` is rounded up to whole optimizer steps of `effective_batch` rows; if the data has no more, all of it is
    taken. One row is drawn from each of as many equal slices of the rows sorted by length, 64 times, and the draw
    nearest to the data in tokens per row, in fill when padded in random micro-batches of `micro_batch`, and in its
    longest row is taken. Of 64 orders of it, the one is taken whose fill, visited by a random sampler seeded with
    `seed`, is nearest to the data's, and whose steps are even.
    """
    available = len(kept.tokens)
    wanted = -(-rows // effective_batch) * effective_batch
    if wanted >= available:
        return kept.row_numbers
    ascending = sorted(range(available), key=kept.tokens.__getitem__)
    mean = sum(kept.tokens) / available
    fill = padded(kept, micro_batch).fill
    longest = kept.tokens[ascending[-1]]
    visit = random_order(wanted, seed)
    generator = random.Random(seed)

    def distance_of_rows(places: list[int]) -> float:
        tokens = [kept.tokens[place] for place in places]
        of_mean = abs(sum(tokens) / wanted / mean - 1.0)
        of_fill = abs(mean_fill(tokens, micro_batch) / fill - 1.0)
        return of_mean + of_fill + LONGEST_WEIGHT * (1.0 - max(tokens) / longest)

    def distance_of_order(places: list[int]) -> float:
        visited = [kept.tokens[places[place]] for place in visit]
        of_fill = abs(_fill(visited, micro_batch) / fill - 1.0)
        return of_fill + SPREAD_WEIGHT * _step_spread(visited, effective_batch)

    chosen = min((_draw(ascending, wanted, generator) for _ in range(DRAWS)), key=distance_of_rows)
    orders = (generator.sample(chosen, wanted) for _ in range(DRAWS))
    return tuple(kept.row_numbers[place] for place in min(orders, key=distance_of_order))


def _draw(ascending: Sequence[int], wanted: int, generator: random.Random) -> list[int]:
    bounds = [slice_ * len(ascending) // wanted for slice_ in range(wanted + 1)]
    return [ascending[generator.randrange(start, end)] for start, end in itertools.pairwise(bounds)]


def _fill(tokens: Sequence[int], micro_batch: int) -> float:
    batches = [tokens[start : start + micro_batch] for start in range(0, len(tokens), micro_batch)]
    return sum(tokens) / sum(len(batch) * max(batch) for batch in batches)


def _step_spread(tokens: Sequence[int], effective_batch: int) -> float:
    """The mean distance of a step's tokens from the mean step, as a share of it."""
    steps = [sum(tokens[start : start + effective_batch]) for start in range(0, len(tokens), effective_batch)]
    mean = sum(steps) / len(steps)
    return sum(abs(step - mean) for step in steps) / len(steps) / mean
