"""Micro-batches of preferences: DPO's and the reward trainer's pairs, KTO's completions.

Rules: TRL 1.16, `DataCollatorForPreference` of `dpo_trainer.py` and of `reward_trainer.py`, KTO's
`DataCollatorForUnpairedPreference` and `_prepare_dataset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autotune.plan.figures import Figures, figures, weight_of
from autotune.plan.padding import Kept, TruncationMode, mean_fill
from autotune.probe.lengths import Lengths, dropped_places


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that are trained on, in the data's order, and what each puts into a micro-batch.

    `sequences[i]` are the lengths of row i's sequences after truncation. All of a micro-batch are padded to the
    longest of them; KTO's mismatched ones (`mismatched`, none without a KL term) are a second batch, padded on its own.
    """

    kept: Kept  # `tokens`: of all of a row's sequences
    sequences: tuple[tuple[int, ...], ...]
    mismatched: tuple[int, ...] = ()


def sequences_of(
    lengths: Lengths,
    max_length: int | None,
    *,
    truncation_mode: TruncationMode = "keep_start",
    micro_batch: int,
    estimates_kl: bool = False,
) -> Sequences:
    """Drop and cut the rows of dpo, reward or kto as TRL does."""
    places = _kept_places(lengths, max_length, truncation_mode)
    numbers = lengths.row_numbers or range(len(lengths.tokens))
    prompts = lengths.prompt_tokens or (0,) * len(lengths.tokens)
    completions = _completions(lengths)
    sequences = [tuple(_cut(prompts[place] + each, max_length) for each in completions[place]) for place in places]
    loss = [
        sum(_loss(prompts[place], each, max_length, truncation_mode) for each in completions[place]) for place in places
    ]
    mismatched: list[int] = []
    if estimates_kl:
        for start in range(0, len(places), micro_batch):
            batch = places[start : start + micro_batch]
            # each prompt with the completion before it, the first with the last
            mismatched += [
                _cut(prompts[place] + completions[other][0], max_length)
                for place, other in zip(batch, (batch[-1], *batch[:-1]), strict=True)
            ]
    return Sequences(
        kept=Kept(
            row_numbers=tuple(numbers[place] for place in places),
            tokens=tuple(map(sum, sequences)),
            loss_tokens=tuple(loss),
            dropped_tokens=sum(lengths.tokens) - sum(map(sum, sequences)),
            dropped_rows=len(lengths.tokens) - len(places),
            weight=weight_of(lengths),
        ),
        sequences=tuple(sequences),
        mismatched=tuple(mismatched),
    )


def padded_sequences(
    data: Sequences,
    micro_batch: int,
    *,
    in_order: bool = False,
    pad_to_multiple_of: int = 1,
) -> Figures:
    """`micro_batch` rows at a time, every sequence padded to the longest of the micro-batch.

    `in_order` passes over the rows as they come, and is exact; otherwise the positions are the expectation over random
    orders, which is not.
    """
    kept = data.kept
    rows = len(kept.tokens)
    each = max(map(len, data.sequences), default=1)
    longest = [_up(max(row), pad_to_multiple_of) for row in data.sequences]
    mismatched = [_up(tokens, pad_to_multiple_of) for tokens in data.mismatched]
    useful = sum(kept.tokens) + sum(data.mismatched)
    batches = [range(start, min(start + micro_batch, rows)) for start in range(0, rows, micro_batch)]
    largest_rows = min(micro_batch, rows)
    if in_order or mismatched:
        sizes = [(each * len(batch) * max(longest[place] for place in batch), len(batch)) for batch in batches]
        positions = float(sum(size for size, _ in sizes))
        largest, largest_rows = max(sizes, default=(0, 0))
    else:
        positions = each * sum(longest) / mean_fill(longest, micro_batch) if sum(longest) else 0.0
        largest = each * largest_rows * max(longest, default=0)
    positions += sum(len(batch) * max(mismatched[place] for place in batch) for batch in batches if mismatched)
    return figures(
        "padded",
        micro_batch,
        rows=rows,
        micro_batches=len(batches),
        useful=useful,
        loss=sum(kept.loss_tokens),
        positions=max(positions, float(useful)),
        dropped_tokens=kept.dropped_tokens,
        dropped_rows=kept.dropped_rows,
        largest=(each * largest_rows, largest),
        weight=kept.weight,
        exact=in_order or bool(mismatched) or micro_batch == 1,
    )


def _kept_places(lengths: Lengths, max_length: int | None, truncation_mode: TruncationMode) -> list[int]:
    dropped = set(dropped_places(lengths, max_length, truncation_mode))
    return [place for place in range(len(lengths.tokens)) if place not in dropped]


def _completions(lengths: Lengths) -> Sequence[tuple[int, ...]]:
    """What follows the prompt in each of a row's sequences; the reward trainer's hold their prompt."""
    if lengths.method == "kto":
        return [(tokens,) for tokens in lengths.completion_tokens]
    return list(zip(lengths.chosen_tokens, lengths.rejected_tokens, strict=True))


def _cut(tokens: int, max_length: int | None) -> int:
    return tokens if max_length is None else min(tokens, max_length)


def _loss(prompt: int, completion: int, max_length: int | None, truncation_mode: TruncationMode) -> int:
    """The completion's tokens that truncation leaves."""
    if max_length is None:
        return completion
    return min(completion, max_length if truncation_mode == "keep_end" else max(0, max_length - prompt))


def _up(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
