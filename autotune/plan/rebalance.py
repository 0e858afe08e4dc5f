"""`train_sampling_strategy: batch_rebalance`: micro-batches of even cost within each optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autotune.plan.figures import Figures, figures
from autotune.plan.order import REBALANCE_SEED, random_order
from autotune.plan.padding import Kept

# transformers `BatchRebalanceSampler.QUADRATIC_COST_COEF`: cost = rows * longest + 0.001 * rows * longest^2
QUADRATIC_COST = 0.001


def rebalanced(
    kept: Kept, micro_batch: int, accumulation: int, *, processes: int = 1, order: Sequence[int] | None = None
) -> Figures:
    """`train_sampling_strategy: batch_rebalance`: each optimizer step's rows, sorted by length, in groups of even cost.

    `order` defaults to the sampler's own in the first pass; the micro-batches are then those of the real one.
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
        place = 0
        for size in even_groups(step, groups, processes=processes, patience=step_rows):
            longest = step[place]
            place += size
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


class _Split:
    """Lengths in descending order, cut into contiguous groups; changed by moving one row from group to group."""

    def __init__(self, descending: Sequence[int], groups: int) -> None:
        whole, rest = divmod(len(descending), groups)
        self.descending = descending
        self.counts = [whole + (group < rest) for group in range(groups)]
        self.starts = [0, *itertools.accumulate(self.counts[:-1])]
        self.costs = [self.cost(group, count) for group, count in enumerate(self.counts)]

    def cost(self, group: int, count: int) -> float:
        """What the group would cost with `count` rows from its first, longest row on."""
        longest = self.descending[self.starts[group]]
        return count * longest + QUADRATIC_COST * count * longest * longest

    def move(self, giver: int, taker: int) -> None:
        self.counts[giver] -= 1
        self.counts[taker] += 1
        for group in range(min(giver, taker), max(giver, taker) + 1):
            if group:
                self.starts[group] = self.starts[group - 1] + self.counts[group - 1]
            self.costs[group] = self.cost(group, self.counts[group])


def even_groups(descending: Sequence[int], groups: int, *, processes: int = 1, patience: int = 0) -> list[int]:
    """Sizes of contiguous groups of near-even cost of a step's lengths, sorted in descending order.

    There are at least as many lengths as groups. The rule is `BatchRebalanceSampler`'s (transformers 5.22): from even
    numbers of rows, one row at a time goes from the dearest group to the cheapest; the split with the least spread of
    costs wins. A dearest group of one row is as it is: the groups it would run beside, one per process, are filled up
    to its cost and set apart with it. `patience` is the least number of moves tried, 30 per group or more.
    """
    split = _Split(descending, groups)
    active = list(range(groups))
    seen: set[tuple[int, ...]] = set()
    best, best_spread = tuple(split.counts), float("inf")
    for _ in range(max(30 * groups, patience)):
        counts = tuple(split.counts)
        if counts in seen or len(active) < 2:
            break
        seen.add(counts)
        dearest = max(active, key=split.costs.__getitem__)
        cheapest = min(active, key=split.costs.__getitem__)
        spread = split.costs[dearest] - split.costs[cheapest]
        if spread < best_spread:
            best, best_spread = counts, spread
        if spread == 0:
            break
        if split.counts[dearest] > 1:
            split.move(dearest, cheapest)
            continue
        beside = _beside(split, dearest, processes)
        _fill_up(split, beside, dearest, active)
        active = [group for group in active if group not in beside]
    return list(best)


def _beside(split: _Split, dearest: int, processes: int) -> list[int]:
    """The groups that run at the same time as `dearest`: groups are dealt to the processes by falling cost."""
    ranked = sorted(range(len(split.costs)), key=split.costs.__getitem__, reverse=True)
    first = ranked.index(dearest) // processes * processes
    return sorted(ranked[first : first + processes])


def _fill_up(split: _Split, beside: Sequence[int], dearest: int, active: Sequence[int]) -> None:
    """Let groups that run beside `dearest` take rows from cheaper ones, as long as they cost no more than it does."""
    limit = split.costs[dearest]
    for group in beside:
        if group == dearest or group not in active:
            continue
        while split.cost(group, split.counts[group] + 1) <= limit:
            givers = [other for other in active if other not in beside and split.counts[other] > 1]
            if not givers:
                break
            split.move(min(givers, key=split.costs.__getitem__), group)
