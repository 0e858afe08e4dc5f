"""The arrangements that an SFT job may take: how documents become rows, micro-batches and optimizer steps.

Rules and their source: TRL 1.16 `sft_trainer.py`, transformers 5.22 `trainer.py` and `trainer_pt_utils.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from autotune.job import Job
from autotune.plan.data import Data
from autotune.plan.order import REBALANCE_SEED
from autotune.plan.packed_arrangements import divisors, other_packing
from autotune.plan.recipe import evaluates
from autotune.plan.space import Arrangement, Axis, Choice, Grade, Rejected, offered


def arrangement_axis(
    job: Job, data: Data, base: Arrangement, allowed: Collection[Grade], *, variable_lengths: Collection[str] = ()
) -> Axis:
    """`variable_lengths`: the attention backends here that compute rows of several documents one by one."""
    choices = [Choice(base, "exact", "as you gave it")]
    rejected: list[Rejected] = []
    for choice in (
        *_splits(job, data, base),
        *_rebalanced(job, data, base, rejected),
        *_other_padding(job, data, base, variable_lengths, rejected),
        *other_packing(job, data, base, rejected),
    ):
        if all(choice.value != known.value for known in choices):
            choices.append(choice)
    inside, outside = offered(choices, allowed=allowed)
    return Axis("arrangement", tuple(inside), (*rejected, *outside))


def _splits(job: Job, data: Data, base: Arrangement) -> Iterator[Choice]:
    """Other micro-batches at the same rows per optimizer step: the loss is summed over the step's tokens and divided
    once (`num_items_in_batch`), so the split changes nothing but rounding."""
    rows = base.micro_batch * base.accumulation
    for micro_batch in divisors(rows):
        if micro_batch == base.micro_batch:
            continue
        arrangement = msgspec.structs.replace(base, micro_batch=micro_batch, accumulation=rows // micro_batch)
        other = _other_epoch(job, data, base, arrangement)
        grade: Grade = "regrouped" if other else "exact"
        reason = f"{rows} rows per optimizer step as before, {micro_batch} at a time"
        yield Choice(arrangement, grade, f"{reason}; {other}" if other else reason)


def _other_epoch(job: Job, data: Data, base: Arrangement, other: Arrangement) -> str | None:
    """What two arrangements with the same order and rows per optimizer step do not have in common, or None.

    Of the rows of an epoch only its end can differ: `dataloader_drop_last` leaves out micro-batches, or whole steps
    with `batch_rebalance`, which otherwise fills a last step of too few rows by repeating some (transformers 5.22,
    `BatchRebalanceSampler`).
    """
    if data.split_matters is not None:
        return data.split_matters
    drops = bool(job.resolved["dataloader_drop_last"])
    if not drops and "batch_rebalance" not in (base.name, other.name):
        return None
    figures = data.figures(base)
    if not figures.exact and (base.packed or data.max_length is not None):
        return "a sample of the rows was measured, so an epoch may end in other rows than yours"
    yours, its = (_epoch_rows(one, figures.rows, drops=drops) for one in (base, other))
    return None if its == yours else f"an epoch passes over {its:,} rows where yours passes over {yours:,}"


def _epoch_rows(arrangement: Arrangement, rows: int, *, drops: bool) -> int:
    if arrangement.name != "batch_rebalance":
        return rows - rows % arrangement.micro_batch if drops else rows
    last = rows % (arrangement.micro_batch * arrangement.accumulation)
    if drops:
        return rows - last
    return rows + max(0, arrangement.accumulation - last) if last else rows


def _rebalanced(job: Job, data: Data, base: Arrangement, rejected: list[Rejected]) -> Iterator[Choice]:
    if base.packed or base.name == "batch_rebalance":
        return
    resolved = job.resolved
    sampling = resolved["train_sampling_strategy"]
    name = "batch_rebalance"
    if sampling != "random":
        rejected.append(Rejected(name, f"it shuffles, and your `train_sampling_strategy` is `{sampling}`"))
        return
    rows = base.micro_batch * base.accumulation
    if rows < 4:
        rejected.append(Rejected(name, f"{rows} rows per optimizer step leave nothing to balance"))
        return
    seed = resolved["data_seed"] if resolved.get("data_seed") is not None else resolved["seed"]
    for micro_batch in divisors(rows):
        accumulation = rows // micro_batch
        if micro_batch == 1 or accumulation == 1:
            continue  # one row each, or one group: nothing to balance
        arrangement = Arrangement("batch_rebalance", micro_batch, accumulation, padding_free=base.padding_free)
        fill = data.figures(arrangement).fill
        other = _other_epoch(job, data, base, arrangement)
        grade: Grade = "regrouped"
        if (resolved.get("accelerator_config") or {}).get("use_seedable_sampler") is False:
            why = "its order is seeded, and your `use_seedable_sampler` is false: same documents, another order"
        elif seed != REBALANCE_SEED:
            why = f"its order comes from seed {REBALANCE_SEED}, yours from {seed}: same documents, another order"
        elif other is not None:
            why = other
        else:
            grade, why = "exact", "same samples in every optimizer step"
        yield Choice(
            arrangement, grade, f"micro-batches of like lengths: {fill:.0%} of computed positions are tokens; {why}"
        )


def _other_padding(
    job: Job, data: Data, base: Arrangement, variable_lengths: Collection[str], rejected: list[Rejected]
) -> Iterator[Choice]:
    """The rows of a micro-batch laid end to end without padding, or padded again for a job that has them so."""
    if base.packed:
        return
    missing = None if base.padding_free else _why_padded(job, data, variable_lengths)
    if missing is not None:
        rejected.append(Rejected("padding_free", missing))
        return
    rows = base.micro_batch * base.accumulation
    for micro_batch in divisors(rows):
        if micro_batch == 1 and not base.padding_free:
            continue  # one row has no padding
        arrangement = Arrangement(base.name, micro_batch, rows // micro_batch, padding_free=not base.padding_free)
        other = _other_epoch(job, data, base, arrangement)
        grade: Grade = "regrouped" if other else "exact"
        how = "padded to the longest" if base.padding_free else "laid end to end without padding"
        reason = f"{rows} rows per optimizer step as before, {micro_batch} at a time, {how}"
        if not base.padding_free and data.max_length is not None:
            reason += "; `max_length` becomes null, which cuts off nothing here"
        yield Choice(arrangement, grade, f"{reason}; {other}" if other else reason)


def _why_padded(job: Job, data: Data, variable_lengths: Collection[str]) -> str | None:
    """Why the rows stay padded: TRL takes `padding_free` only without `max_length` (trl 1.16, `sft_trainer.py`)."""
    if job.resolved.get("neftune_noise_alpha"):
        return "the noise of NEFTune depends on the length of a row, and all of a micro-batch would be one"
    if job.resolved.get("pad_to_multiple_of"):
        return "TRL would count what your `pad_to_multiple_of` adds as tokens"  # 1.16, `sft_trainer.py`, compute_loss
    if data.truncates:
        return f"TRL takes it only without `max_length`, and yours of {data.max_length:,} cuts documents"
    if data.max_length is not None and data.lengths.rows > data.lengths.rows_measured:
        return "TRL takes it only without `max_length`, and rows that were not measured may be longer than yours"
    if data.max_length is not None and evaluates(job):
        return "TRL takes it only without `max_length`, and your evaluation has rows of its own that it may cut"
    if data.max_length is not None and 0 in data.lengths.loss_tokens:
        return "TRL takes it only without `max_length`, and then keeps the rows that have no loss token"
    if not variable_lengths:
        return (
            "no attention here computes documents one by one: the mask of all rows of a micro-batch laid end to end "
            "grows with the square of their tokens"
        )
    return None
