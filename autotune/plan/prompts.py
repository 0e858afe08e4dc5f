"""Prompts of the online methods: what they are padded to, and how long they are with what is generated.

Rules: TRL 1.16, `_generate_and_score_completions` and `RepeatSampler` of `grpo_trainer.py` and `rloo_trainer.py`;
`experimental/online_dpo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from autotune.plan.figures import Figures, figures, weight_of
from autotune.plan.padding import mean_fill
from autotune.probe.facts import Problem
from autotune.probe.lengths import Lengths


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """How a job generates, per process."""

    prompts: int  # that are padded together
    completions: int  # of each prompt
    completion_limit: int | None  # tokens
    limit_option: str  # which option that is
    context: int | None  # tokens of prompt and completion together that the generation engine takes
    context_option: str
    total: int | None  # online DPO: tokens of both that are trained on


def generation_of(method: str, resolved: Mapping[str, Any], *, processes: int = 1) -> Generation:
    """What the job's options, as TRL's parser made them, say of it."""
    if method == "online_dpo":  # every prompt is answered twice, to have a pair to judge
        return Generation(
            prompts=resolved["per_device_train_batch_size"],
            completions=2,
            completion_limit=resolved["max_new_tokens"],
            limit_option="max_new_tokens",
            context=None,
            context_option="",
            total=resolved["max_length"],
        )
    completions = resolved["num_generations"]
    return Generation(
        prompts=max(1, resolved["generation_batch_size"] // processes // completions),
        completions=completions,
        completion_limit=resolved["max_completion_length"],
        limit_option="max_completion_length",
        context=resolved["vllm_max_model_length"] if resolved["use_vllm"] else None,
        context_option="vllm_max_model_length",
        total=None,
    )


def steps_per_epoch(method: str, resolved: Mapping[str, Any], prompts: int, *, processes: int = 1) -> int:
    """Optimizer steps of one pass over the prompts; GRPO and RLOO leave out a last batch that is not full."""
    accumulation: int = resolved["gradient_accumulation_steps"]
    if method == "online_dpo":
        micro_batch: int = resolved["per_device_train_batch_size"]
        return -(-prompts // (micro_batch * accumulation * processes))
    generations = prompts // max(1, resolved["generation_batch_size"] // resolved["num_generations"])
    micro_steps: int = generations * resolved["steps_per_generation"] * resolved["num_iterations"]
    return -(-micro_steps // accumulation)


def padded_prompts(lengths: Lengths, generation: Generation, *, pad_to_multiple_of: int = 1) -> Figures:
    """Prompts padded on the left to the longest of those that are generated for together; nothing cuts them."""
    multiple = pad_to_multiple_of
    tokens = [-(-each // multiple) * multiple for each in lengths.tokens]
    together = generation.prompts
    positions = sum(tokens) / mean_fill(tokens, together) if sum(tokens) else 0.0
    largest_rows = min(together, len(tokens)) * generation.completions
    return figures(
        "padded",
        together,
        rows=len(tokens),
        micro_batches=-(-len(tokens) // together),
        useful=sum(lengths.tokens),
        loss=0,
        positions=max(positions, float(sum(lengths.tokens))),
        dropped_tokens=0,
        largest=(largest_rows, largest_rows * max(tokens, default=0)),
        weight=weight_of(lengths),
        exact=together == 1,  # else the mean over random orders
    )


def sentences(lengths: Lengths, padded: Figures, generation: Generation) -> Iterator[str]:
    if generation.prompts > 1:
        of = f"the longest of {generation.prompts}"
        yield f"{1 - padded.fill:.0%} of prompt positions are padding: prompts are padded on the left to {of}"
    else:
        yield "no prompt is padded: a process answers one at a time"
    yield f"each prompt is answered {generation.completions} times"
    if generation.completion_limit is not None and lengths.tokens:
        longest = max(lengths.tokens)
        yield (
            f"prompt and completion hold at most {longest + generation.completion_limit:,} tokens "
            f"(`{generation.limit_option}` {generation.completion_limit:,})"
        )


def warnings(lengths: Lengths, generation: Generation, position_limit: int | None) -> Iterator[Problem]:
    """What prompts are too long for; no method cuts them."""
    limit = generation.completion_limit or 0
    beyond = f" with `{generation.limit_option}` {limit:,}" if limit else ""
    if position_limit is not None:
        count = _beyond(lengths, position_limit - limit)
        if count:
            yield Problem(
                what=f"{count}{beyond} are longer than the {position_limit:,} positions the model was made for",
                hint=_remedy(generation, position_limit),
            )
    if generation.context is not None:
        count = _beyond(lengths, generation.context - limit)
        if count:
            yield Problem(
                what=f"{count}{beyond} do not fit into `{generation.context_option}` {generation.context:,}",
                hint=f"raise `{generation.context_option}` to {max(lengths.tokens) + limit}, or leave out those rows",
            )
    if generation.total is not None:
        count = _beyond(lengths, generation.total - limit)
        if count:
            yield Problem(
                what=f"{count}{beyond} are longer than `max_length` {generation.total:,}, and TRL cuts their start off",
                hint=f"raise `max_length` to {max(lengths.tokens) + limit}, or leave out those rows",
            )


def _beyond(lengths: Lengths, most: int) -> str:
    """`3 of 100 prompts`, those with more than `most` tokens; empty where there are none."""
    count = sum(tokens > most for tokens in lengths.tokens)
    rows = max(1, round(count * weight_of(lengths)))
    return f"{rows:,} of {lengths.rows:,} prompts" if count else ""


def _remedy(generation: Generation, limit: int) -> str:
    return f"lower `{generation.limit_option}`, or leave out the rows whose prompt does not leave room in {limit:,}"
