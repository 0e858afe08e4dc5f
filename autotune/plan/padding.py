"""Rows cut to `max_length` and padded to the longest of their micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import msgspec

from autotune.plan.figures import Figures, figures, loss_within, weight_of
from autotune.probe.lengths import Lengths

TruncationMode = Literal["keep_start", "keep_end"]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What padding keeps of the data: one entry per kept row, in the data's order."""

    row_numbers: tuple[int, ...]  # in the data, from 0
    tokens: tuple[int, ...]  # after truncation
    loss_tokens: tuple[int, ...]  # after truncation; an estimate in a row whose loss tokens have gaps and are cut
    dropped_tokens: int  # cut off, rows that are dropped whole included
    dropped_rows: int  # no token that bears loss was left
    weight: float = 1.0  # rows of the data that one row here stands for


def truncate(lengths: Lengths, max_length: int | None, truncation_mode: TruncationMode = "keep_start") -> Kept:
    """Cut rows to `max_length` tokens and drop those without a loss token left, as TRL does without packing.

    With `max_length` None nothing is cut and nothing dropped, not even rows without loss (TRL 1.16,
    `SFTTrainer._prepare_dataset`).
    """
    numbers = lengths.row_numbers or range(len(lengths.tokens))
    weight = weight_of(lengths)
    if max_length is None:
        return Kept(
            row_numbers=tuple(numbers),
            tokens=lengths.tokens,
            loss_tokens=lengths.loss_tokens,
            dropped_tokens=0,
            dropped_rows=0,
            weight=weight,
        )
    if lengths.all_bear_loss and 0 not in lengths.tokens:  # nothing is dropped whole
        tokens_kept = tuple(map(min, lengths.tokens, itertools.repeat(max_length)))
        return Kept(
            row_numbers=tuple(numbers),
            tokens=tokens_kept,
            loss_tokens=tokens_kept,
            dropped_tokens=sum(lengths.tokens) - sum(tokens_kept),
            dropped_rows=0,
            weight=weight,
        )
    kept_numbers: list[int] = []
    kept_tokens: list[int] = []
    kept_loss: list[int] = []
    for number, tokens, first, last, loss in zip(
        numbers, lengths.tokens, lengths.first_loss, lengths.last_loss, lengths.loss_tokens, strict=True
    ):
        start = max(0, tokens - max_length) if truncation_mode == "keep_end" else 0
        if loss == 0 or first >= start + max_length or last < start:
            continue
        kept_numbers.append(number)
        kept_tokens.append(min(tokens, max_length))
        kept_loss.append(loss_within(first, last, loss, start, start + max_length))
    return Kept(
        row_numbers=tuple(kept_numbers),
        tokens=tuple(kept_tokens),
        loss_tokens=tuple(kept_loss),
        dropped_tokens=sum(lengths.tokens) - sum(kept_tokens),
        dropped_rows=len(lengths.tokens) - len(kept_tokens),
        weight=weight,
    )


def padded(kept: Kept, micro_batch: int, *, order: Sequence[int] | None = None, pad_to_multiple_of: int = 1) -> Figures:
    """Rows padded to the longest of their micro-batch.

    Without `order` the positions are the expectation over random orders, by order statistics: the k-th smallest of n
    rows is the longest of b random ones with probability C(k-1, b-1) / C(n, b). With `order` (places in `kept`) they
    are those of that pass.
    """
    padded_lengths = [-(-tokens // pad_to_multiple_of) * pad_to_multiple_of for tokens in kept.tokens]
    rows = len(padded_lengths)
    largest_rows = min(micro_batch, rows)
    if order is None:
        positions = _expected_positions(padded_lengths, micro_batch)
        positions = max(positions, float(sum(kept.tokens)))  # a rounding error below it would fill more than is there
        largest_positions = largest_rows * max(padded_lengths, default=0)
    else:
        batches = [order[start : start + micro_batch] for start in range(0, rows, micro_batch)]
        sizes = [(len(batch) * max(padded_lengths[place] for place in batch), len(batch)) for batch in batches]
        positions = float(sum(size for size, _ in sizes))
        largest_positions, largest_rows = max(sizes, default=(0, 0))
    return figures(
        "padded",
        micro_batch,
        rows=rows,
        micro_batches=-(-rows // micro_batch),
        useful=sum(kept.tokens),
        loss=sum(kept.loss_tokens),
        positions=positions,
        dropped_tokens=kept.dropped_tokens,
        dropped_rows=kept.dropped_rows,
        largest=(largest_rows, largest_positions),
        weight=kept.weight,
    )


def mean_fill(tokens: Sequence[int], micro_batch: int) -> float:
    """The fill of rows padded in random micro-batches: tokens over the positions expected. There is a token."""
    return sum(tokens) / _expected_positions(tokens, micro_batch)


def _expected_positions(lengths: Sequence[int], micro_batch: int) -> float:
    full, rest = divmod(len(lengths), micro_batch)
    ascending = sorted(lengths)
    positions = full * micro_batch * _expected_longest(ascending, micro_batch) if full else 0.0
    return positions + (rest * _expected_longest(ascending, rest) if rest else 0.0)


def _expected_longest(ascending: Sequence[int], count: int) -> float:
    """The mean of the longest of `count` random rows."""
    rows = len(ascending)
    probability = count / rows  # that the longest row of all is among them
    expected = 0.0
    for place in range(rows, count - 1, -1):
        expected += probability * ascending[place - 1]
        if place == count:
            break
        probability *= (place - count) / (place - 1)
    return expected
