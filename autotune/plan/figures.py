"""The figures of one arrangement of the data."""

from __future__ import annotations

from typing import Literal

import msgspec

from autotune.probe.lengths import Lengths

Arrangement = Literal["padded", "rebalanced", "bfd", "bfd_split", "wrapped"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the data in one arrangement.

    For packed arrangements `computed_positions` is the room in the rows, `rows * max_length`. TRL 1.16 feeds `bfd`
    and `bfd_split` rows without padding, so the room left in them costs nothing but the row's place in the batch.
    """

    arrangement: Arrangement
    micro_batch: int  # rows per process and forward pass, on average for `rebalanced`
    rows: int  # what the trainer iterates over
    micro_batches: int
    useful_tokens: int
    loss_tokens: int
    computed_positions: int
    fill: float  # useful_tokens / computed_positions
    dropped_tokens: int
    dropped_rows: int = 0
    split_rows: int = 0  # documents cut into several pieces
    kept_without_loss: int = 0  # documents trained on though no token of theirs bears loss; padding drops them
    largest_rows: int = 0  # of the micro-batch with the most positions
    largest_positions: int = 0
    exact: bool = True  # False: extrapolated from a sample of the rows, or from one random order


def figures(
    arrangement: Arrangement,
    micro_batch: int,
    *,
    rows: int,
    micro_batches: int,
    useful: int,
    loss: int,
    positions: float,
    dropped_tokens: int,
    largest: tuple[int, int],
    weight: float,
    dropped_rows: int = 0,
    split_rows: int = 0,
    kept_without_loss: int = 0,
    exact: bool = True,
) -> Figures:
    """Figures of the whole data from counts over the rows at hand, each of which stands for `weight` rows."""
    return Figures(
        arrangement=arrangement,
        micro_batch=micro_batch,
        rows=round(rows * weight),
        micro_batches=round(micro_batches * weight),
        useful_tokens=round(useful * weight),
        loss_tokens=round(loss * weight),
        computed_positions=round(positions * weight),
        fill=useful / positions if positions else 0.0,
        dropped_tokens=round(dropped_tokens * weight),
        dropped_rows=round(dropped_rows * weight),
        split_rows=round(split_rows * weight),
        kept_without_loss=round(kept_without_loss * weight),
        largest_rows=largest[0],
        largest_positions=largest[1],
        exact=exact and weight == 1.0,
    )


def weight_of(lengths: Lengths) -> float:
    """How many rows of the data each measured row stands for."""
    return lengths.rows / len(lengths.tokens) if lengths.tokens else 1.0


def loss_within(first: int, last: int, loss_tokens: int, start: int, end: int) -> int:
    """How many of a row's loss tokens lie in positions `start` to `end`, `end` left out.

    Exact where the loss tokens have no gaps or all of them are inside; otherwise in proportion, and at least one
    where one is known to be inside.
    """
    span = min(last + 1, end) - max(first, start)
    if loss_tokens == 0 or span <= 0:
        return 0
    return max(1, round(loss_tokens * span / (last + 1 - first)))
