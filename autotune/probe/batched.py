"""The child's side of counting tokens in batches, with the result of TRL's own row by row preparation (1.16)."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autotune.probe import preferences
from autotune.probe.counts import COUNTED, Counts, Preparing, Row, end_text, sorted_out
from autotune.probe.rendering import Marked, Renderer, UnknownHereError, common_prefix, row_options
from autotune.probe.tokenizer import Tokenizer


def counter(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Counts]:
    """The function that counts a batch of rows.

    It raises UnknownHereError where only TRL's preparation knows what to do, or what a row raises in TRL as well.
    """
    counted: Callable[[list[Row]], Iterable[tuple[int, ...]]]
    match preparing.method:
        case "sft":
            counted = _sft(preparing, tokenizer, renderer)
        case "dpo":
            counted = preferences.dpo(preparing, tokenizer, renderer)
        case "reward":
            counted = preferences.reward(preparing, tokenizer, renderer)
        case "kto":
            counted = preferences.kto(preparing, tokenizer, renderer)
        case _:
            counted = preferences.prompts(preparing, tokenizer, renderer)
    names = COUNTED[preparing.method]

    def count(rows: list[Row]) -> Counts:
        columns = zip(*counted(rows), strict=True)
        return {name: array("i", column) for name, column in zip(names, columns, strict=True)}

    return count


def _sft(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import is_conversational, is_conversational_from_value, maybe_convert_to_chatml

    if {"labels", "completion_mask", "assistant_masks"} & set(preparing.first):
        raise UnknownHereError("labels or masks without `input_ids`")
    first = copy.deepcopy(preparing.first)  # TRL converts in place
    from_value = is_conversational_from_value(first)
    chat = is_conversational(maybe_convert_to_chatml(first) if from_value else first)
    eos = tokenizer.inner.eos_token

    def counted(rows: list[Row]) -> list[tuple[int, int, int, int]]:
        if from_value:
            rows = [maybe_convert_to_chatml(row) for row in rows]
        if not chat:
            for row in rows:
                end_text(
                    row, preparing.text_field if preparing.text_field in row else "completion", eos, or_completion=True
                )
                row.pop("messages", None)
        options = row_options(rows)
        found: list[tuple[int, int, int, int]] = [(0, -1, -1, 0)] * len(rows)
        for chats, places in sorted_out(rows, is_conversational):
            part = [rows[place] for place in places]
            if preparing.assistant_only and not chats:
                raise UnknownHereError("`assistant_only_loss` on rows that are no chats")
            results = _sft_part(part, [options[place] for place in places], preparing, renderer, chats=chats)
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    return counted


def _sft_part(
    rows: list[Row], options: list[Row], preparing: Preparing, renderer: Renderer, *, chats: bool
) -> list[tuple[int, int, int, int]]:
    """Rows that are all chats, or all plain: tokens, and where those that bear loss lie."""
    prompted = "prompt" in rows[0]
    whole = [row["prompt"] + row["completion"] for row in rows] if prompted else None
    starts = [0] * len(rows)
    if chats and preparing.assistant_only:
        marked = renderer.marked(whole or [row["messages"] for row in rows], options)
        if whole and preparing.completion_only:
            prompts = renderer.texts([row["prompt"] for row in rows], options, add_generation_prompt=True)
            starts = _starts(renderer.ids(prompts, special=False), [each.ids for each in marked])
        return [_among(each, start) for each, start in zip(marked, starts, strict=True)]
    texts: Sequence[str]
    if chats:
        texts = renderer.texts(whole or [row["messages"] for row in rows], options)
    else:
        texts = whole or [row[preparing.text_field] for row in rows]
    if not prompted or not preparing.completion_only:
        return [_from(0, tokens) for tokens in renderer.lengths(texts, special=not chats)]
    prompts = [row["prompt"] for row in rows]
    if chats:
        prompts = renderer.texts(prompts, options, add_generation_prompt=True)
    ids = renderer.ids(texts, special=not chats)
    starts = _starts(renderer.ids(prompts, special=not chats), ids)
    return [_from(start, len(own)) for start, own in zip(starts, ids, strict=True)]


def _starts(prompts: list[list[int]], wholes: list[list[int]]) -> list[int]:
    return [common_prefix(prompt, whole) for prompt, whole in zip(prompts, wholes, strict=True)]


def _from(start: int, tokens: int) -> tuple[int, int, int, int]:
    """Every token from `start` on bears loss."""
    return (tokens, start, tokens - 1, tokens - start) if tokens > start else (tokens, -1, -1, 0)


def _among(marked: Marked, start: int) -> tuple[int, int, int, int]:
    """The tokens that are marked bear loss, from `start` on."""
    if 1 not in marked.said:
        raise UnknownHereError("a chat without a word of the assistant, which TRL refuses")
    bearing = [place for place, said in enumerate(marked.said) if said and place >= start]
    return (len(marked.ids), bearing[0], bearing[-1], len(bearing)) if bearing else (len(marked.ids), -1, -1, 0)
