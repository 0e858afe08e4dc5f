"""Packed rows for a job that pads, and padded rows for one that packs, at the same tokens per optimizer step.

Rules and their source: TRL 1.16 `sft_trainer.py` and `data_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from autotune.job import Job
from autotune.plan.data import Data
from autotune.plan.figures import Figures
from autotune.plan.recipe import evaluates
from autotune.plan.space import TOKENS_PER_STEP_TOLERANCE, Arrangement, Choice, Grade, Rejected

# Rows packed to lengths between the longest document and this many times it are worth trying where nothing is cut.
FREE_ROW_LENGTHS = (1, 2, 4)
FREE_ROWS = (1, 2, 4)  # per optimizer step, whose length follows from the baseline's tokens per step


def other_packing(job: Job, data: Data, base: Arrangement, rejected: list[Rejected]) -> Iterator[Choice]:
    resolved = job.resolved
    max_length = data.max_length
    if base.packed:
        yield from _unpacked(job, data, base, rejected)
        return
    if max_length is None:
        rejected.append(Rejected("packing", "TRL packs only with a `max_length`, and yours is null"))
        return
    if resolved.get("padding_free"):
        rejected.append(Rejected("packing", "your job is `padding_free`"))
        return
    target = data.tokens_per_step(base)
    for strategy in ("bfd", "bfd_split", "wrapped"):
        if strategy == "bfd_split" and not data.truncates:
            rejected.append(Rejected(strategy, "no document is longer than `max_length`: the same as `bfd`"))
            continue
        for length in _row_lengths(job, data, max_length, target) if strategy == "bfd" else [max_length]:
            yield from _packed(job, data, strategy, length, target)


def _row_lengths(job: Job, data: Data, max_length: int, target: float) -> list[int]:
    """`max_length` itself, and where `bfd` cuts nothing other lengths that hold the longest document as well: some
    a step of `target` tokens fits into one, two or four rows of, and some as short as can be.

    Not where rows that nobody measured could be cut: those of a larger data set, and those of the evaluation.
    """
    if data.truncates or data.lengths.rows > data.lengths.rows_measured or evaluates(job):
        return [max_length]
    free = {_next_multiple(data.longest * factor, 64) for factor in FREE_ROW_LENGTHS}
    free |= {_next_multiple(math.ceil(target / rows), 8) for rows in FREE_ROWS}
    return sorted({max_length, *(length for length in free if length >= data.longest and _fits(data, length, target))})


def _fits(data: Data, length: int, target: float) -> bool:
    """Whether whole rows of this length come near enough to the baseline's tokens per step."""
    figures = data.figures(Arrangement("bfd", 1, 1, length))
    return _near_enough(target, figures.useful_tokens / figures.rows)


def _packed(job: Job, data: Data, strategy: Any, length: int, target: float) -> Iterator[Choice]:
    one_row = Arrangement(strategy, 1, 1, length)
    figures = data.figures(one_row)
    per_row = figures.useful_tokens / figures.rows
    fit = _fit(_rows(job), target, per_row, your_rows="documents")
    grade, why = _packing_grade(job, data, strategy, figures)
    parts = [f"{figures.fill:.0%} of row positions are tokens", fit.equation]
    parts.insert(0 if grade == "changed" else len(parts), why)  # what is learnt comes before what it is good for
    if fit.misses is not None:
        parts = [part for part in parts if part != why or grade == "changed"] + [fit.misses]
        grade = "changed"
    for micro_batch in divisors(fit.rows):
        yield Choice(Arrangement(strategy, micro_batch, fit.rows // micro_batch, length), grade, "; ".join(parts))


def _packing_grade(job: Job, data: Data, strategy: str, figures: Figures) -> tuple[Grade, str]:
    if strategy == "wrapped":
        return "changed", "documents attend to their neighbours in the row"
    if strategy == "bfd_split":
        return "changed", f"{figures.split_rows:,} documents are cut into pieces that do not see each other"
    if data.truncates and job.resolved["truncation_mode"] == "keep_end":
        return "changed", "it keeps the start of long documents, and your `truncation_mode` keeps the end"
    if figures.dropped_tokens > data.kept.dropped_tokens:
        return "changed", "it cuts off more tokens than padding does"
    if figures.kept_without_loss:
        return "changed", f"it keeps {figures.kept_without_loss:,} documents whose loss tokens are all cut off"
    return "regrouped", "nothing split, cut off where padding cuts it; the same documents in other groups"


def _unpacked(job: Job, data: Data, base: Arrangement, rejected: list[Rejected]) -> Iterator[Choice]:
    """Padded rows for a job that packs: as many documents per step as a packed step holds on average."""
    resolved = job.resolved
    name = "padded"
    if resolved.get("padding_free"):
        rejected.append(Rejected(name, "your job is `padding_free`: TRL then wants packing or no `max_length`"))
        return
    if base.name == "wrapped" or (base.name == "bfd_split" and data.truncates):
        rejected.append(Rejected(name, f"another training: your `{base.name}` rows hold pieces of documents"))
        return
    if evaluates(job) and resolved.get("eval_packing"):
        rejected.append(Rejected(name, "`eval_packing` without `packing` lets the documents of a row see each other"))
        return
    target = data.tokens_per_step(base)
    kept = data.kept
    per_document = sum(kept.tokens) / max(1, len(kept.tokens))
    fit = _fit(_rows(job), target, per_document, your_rows="packed rows")
    if fit.misses is not None:
        grade: Grade = "changed"
        why = fit.misses
    elif data.truncates and resolved["truncation_mode"] == "keep_end":
        grade, why = "changed", "it keeps the end of long documents, and your packed rows the start"
    elif data.figures(base).kept_without_loss:
        grade, why = "changed", "it drops the documents whose loss tokens are all cut off"
    else:
        grade, why = "regrouped", "the same documents in other groups"
    for micro_batch in divisors(fit.rows):
        yield Choice(Arrangement("padded", micro_batch, fit.rows // micro_batch), grade, f"{fit.equation}; {why}")


class _Fit(msgspec.Struct, frozen=True):
    """The whole number of rows whose tokens come nearest to a step of the job's, and why that is not near enough."""

    rows: int
    equation: str
    misses: str | None


def _fit(yours: int, target: float, per_row: float, *, your_rows: str) -> _Fit:
    """`target` tokens a step, which `yours` of `your_rows` hold, in rows of `per_row` tokens."""
    rows = _whole(target, per_row)
    off = rows * per_row / target - 1
    equation = f"{rows} x {per_row:,.0f} tokens is {off:+.1%} of your {target:,.0f} a step"
    if _near_enough(target, per_row):
        return _Fit(rows, equation, None)
    fitting = _fitting_batch(yours, target, per_row)
    return _Fit(
        rows,
        equation,
        f"with {fitting} {your_rows} a step instead of your {yours} it would be within {TOKENS_PER_STEP_TOLERANCE:.0%}",
    )


def _fitting_batch(rows: int, target: float, per_row: float) -> int:
    """The batch nearest to `rows` documents whose tokens are near enough to a whole number of packed rows."""
    per_document = target / rows

    # at ten packed rows any number is near enough to a whole one
    batches = range(1, rows + round(10 * per_row / per_document) + 2)
    fitting = (batch for batch in batches if _near_enough(batch * per_document, per_row))
    return min(fitting, key=lambda batch: abs(batch - rows))


def _whole(target: float, per_row: float) -> int:
    """Rows of `per_row` tokens whose sum comes nearest to `target`; at least one."""
    return max(1, round(target / per_row))


def _near_enough(target: float, per_row: float) -> bool:
    return abs(_whole(target, per_row) * per_row / target - 1) <= TOKENS_PER_STEP_TOLERANCE


def _rows(job: Job) -> int:
    return int(job.resolved["per_device_train_batch_size"] * job.resolved["gradient_accumulation_steps"])


def divisors(number: int) -> list[int]:
    """In ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
