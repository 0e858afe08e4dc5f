"""The child's side of counting preferences and prompts in batches, with the result of TRL's preparation (1.16)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autotune.probe.counts import Preparing, Row, both_kinds, end_text
from autotune.probe.rendering import Renderer, common_prefix
from autotune.probe.tokenizer import Tokenizer


def dpo(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import extract_prompt, is_conversational

    implicit = "prompt" not in preparing.first
    first = {**preparing.first, **extract_prompt(preparing.first)} if implicit else preparing.first
    chat = is_conversational(first)

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        for row in rows:
            if implicit:
                row.update(extract_prompt(row))
            if not chat:
                end_text(row, "chosen", tokenizer.inner.eos_token)
                end_text(row, "rejected", tokenizer.inner.eos_token)
        prompts, chosen, rejected = _completed(rows, ("chosen", "rejected"), renderer)
        for prompt, good, bad in zip(prompts, chosen, rejected, strict=True):
            start = min(common_prefix(prompt, good), common_prefix(prompt, bad))
            yield len(good) + len(bad), start, len(good) - start, len(bad) - start

    return counted


def kto(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import extract_prompt, is_conversational

    implicit = "prompt" not in preparing.first
    first = {**preparing.first, **extract_prompt(preparing.first)} if implicit else preparing.first
    paired = "chosen" in first and "rejected" in first
    if paired:
        first = _halves(first)[0]
    chat = is_conversational(first)

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        if implicit:
            rows = [{**row, **extract_prompt(row)} for row in rows]
        if paired:
            rows = [half for row in rows for half in _halves(row)]
        if not chat:
            for row in rows:
                end_text(row, "completion", tokenizer.inner.eos_token)
        prompts, completed = _completed(rows, ("completion",), renderer)
        for row, prompt, whole in zip(rows, prompts, completed, strict=True):
            start = common_prefix(prompt, whole)
            yield len(whole), start, len(whole) - start, int(bool(row["label"]))

    return counted


def _halves(row: Row) -> tuple[Row, Row]:
    """A pair as the two rows that `trl.data_utils._unpair_row` makes of it."""
    shared = {name: value for name, value in row.items() if name not in {"chosen", "rejected"}}
    good = {**shared, "completion": row["chosen"], "label": True}
    return good, {**shared, "completion": row["rejected"], "label": False}


def reward(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import is_conversational

    chat = is_conversational(preparing.first)
    prompted = "prompt" in preparing.first

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        for row in rows:
            if not chat:
                end_text(row, "chosen", tokenizer.processing_class.eos_token)
                end_text(row, "rejected", tokenizer.processing_class.eos_token)
            if prompted:
                row["chosen"] = row["prompt"] + row["chosen"]
                row["rejected"] = row["prompt"] + row["rejected"]
        good, bad = (
            both_kinds(rows, column, renderer.lengths, renderer, is_conversational) for column in ("chosen", "rejected")
        )
        return ((one + other, one, other) for one, other in zip(good, bad, strict=True))

    return counted


def prompts(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl import maybe_apply_chat_template
    from trl.data_utils import is_conversational

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        if preparing.method == "online_dpo":
            texts = [maybe_apply_chat_template(row, tokenizer.processing_class)["prompt"] for row in rows]
            lengths = renderer.lengths(texts, special=False)
        else:
            # each row's own tools and options are the environment's, not the prompt's: the job's alone are used
            bare = [{"prompt": row["prompt"], "chat_template_kwargs": preparing.chat_template_kwargs} for row in rows]
            lengths = both_kinds(bare, "prompt", renderer.lengths, renderer, is_conversational, generation=True)
        return ((tokens, tokens) for tokens in lengths)

    return counted


def _completed(rows: list[Row], endings: Sequence[str], renderer: Renderer) -> list[list[list[int]]]:
    """The tokens of each row's prompt, and of its prompt with each ending."""
    from trl.data_utils import is_conversational

    for row in rows:
        for ending in endings:
            row[f"prompt and {ending}"] = row["prompt"] + row[ending]
    columns = ["prompt", *(f"prompt and {ending}" for ending in endings)]
    return [
        both_kinds(rows, column, renderer.ids, renderer, is_conversational, generation=column == "prompt")
        for column in columns
    ]
