"""`train_sampling_strategy: batch_rebalance`: micro-batches of even cost within each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.plan.figures import Figures, figures
from autotune.plan.order import REBALANCE_SEED, random_order
from autotune.plan.padding import Kept

# transformers `BatchRebalanceSampler.QUADRATIC_COST_COEF`: cost = rows * longest + 0.001 * rows * longest^2
QUADRATIC_COST = 0.001


def rebalanced(
    kept: Kept, micro_batch: int, accumulation: int, *, processes: int = 1, order: Sequence[int] | None = None
) -> Figures:
    """`train_sampling_strategy: batch_rebalance`: each optimizer step's rows, sorted by length, in groups of even cost.

    `order` defaults to the sampler's own in the first pass. The groups are the split into contiguous ones whose
    largest cost is least, a long row that no split can relieve set apart; transformers comes near it by moving rows
    one at a time.
    """
    groups = accumulation * processes
    step_rows = micro_batch * groups
    rows = len(kept.tokens)
    visit = random_order(rows, REBALANCE_SEED) if order is None else order
    positions = micro_batches = 0
    largest = (0, 0)
    for start in range(0, rows, step_rows):
        step = [kept.tokens[place] for place in visit[start : start + step_rows]]
        for place in range(groups - len(step)):  # a last step too small for its groups repeats the pass's first rows
            step.append(kept.tokens[visit[place % rows]])
        step.sort(reverse=True)
        for size, longest in even_groups(step, groups):
            positions += size * longest
            micro_batches += 1
            if size * longest > largest[1]:
                largest = (size, size * longest)
    return figures(
        "rebalanced",
        micro_batch,
        rows=rows,
        micro_batches=micro_batches,
        useful=sum(kept.tokens),
        loss=sum(kept.loss_tokens),
        positions=float(positions),
        dropped_tokens=kept.dropped_tokens,
        dropped_rows=kept.dropped_rows,
        largest=largest,
        weight=kept.weight,
    )


def even_groups(descending: Sequence[int], groups: int) -> Iterator[tuple[int, int]]:
    """Split lengths sorted in descending order into `groups` contiguous groups of even cost: (rows, longest) of each.

    There are at least as many lengths as groups.
    """
    costs = [length * (1.0 + QUADRATIC_COST * length) for length in descending]
    rows = len(costs)
    start = 0
    mean = sum(costs) / groups
    while groups > 1 and costs[start] >= mean and _group_sizes(costs, start, groups, costs[start]) is not None:
        yield 1, descending[start]  # it costs more than an even share, alone as it is
        start += 1
        groups -= 1
        mean = sum(costs[start:]) / groups
    low = max(mean, costs[start])
    high = costs[start] * -(-(rows - start) // groups) * (1.0 + 1e-9)  # enough for an even split by number
    sizes = _group_sizes(costs, start, groups, high)
    while high - low > 0.002 * low:
        middle = (low + high) / 2
        fitting = _group_sizes(costs, start, groups, middle)
        if fitting is None:
            low = middle
        else:
            high, sizes = middle, fitting
    assert sizes is not None
    for size in sizes:
        yield size, descending[start]
        start += size


def _group_sizes(costs: Sequence[float], start: int, groups: int, most: float) -> list[int] | None:
    """Sizes of contiguous groups that cost `most` at most each, or None where that takes more than `groups`."""
    rows = len(costs)
    sizes = []
    for left in range(groups - 1, -1, -1):
        size = min(int(most / costs[start]) if costs[start] else rows, rows - start - left)
        if size < 1:
            return None
        sizes.append(size)
        start += size
    return sizes if start == rows else None
