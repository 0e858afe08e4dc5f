"""The child's side of counting tokens in batches, with the result of TRL's own row by row preparation (1.16)."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from autotune.probe.formats import ONLINE, Method
from autotune.probe.rendering import Marked, Renderer, UnknownHereError, common_prefix, row_options
from autotune.probe.tokenizer import Tokenizer

# Every array that a method's rows are counted in; a row's place is the same in each
COUNTED: dict[Method, tuple[str, ...]] = {
    "sft": ("tokens", "first_loss", "last_loss", "loss_tokens"),
    "dpo": ("tokens", "prompt_tokens", "chosen_tokens", "rejected_tokens"),
    "reward": ("tokens", "chosen_tokens", "rejected_tokens"),
    "kto": ("tokens", "prompt_tokens", "completion_tokens", "desirable"),
    **dict.fromkeys(ONLINE, ("tokens", "prompt_tokens")),
}
UNPAIRED_ROWS = 1000  # `Dataset.map` unpairs so many rows at a time: their chosen ones first, then the rejected

Row = dict[str, Any]
Counts: TypeAlias = "dict[str, array[int]]"  # at run time an array takes no brackets in Python 3.11


class Preparing(NamedTuple):
    """What TRL would know when it prepares the rows: the options that matter, and the first row."""

    method: Method
    text_field: str
    completion_only: bool
    assistant_only: bool
    chat_template_kwargs: Mapping[str, Any]
    first: Row


def no_counts(method: Method) -> Counts:
    """Empty arrays for a method's counts."""
    return {name: array("i") for name in COUNTED[method]}


def counter(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Counts]:
    """The function that counts a batch of rows.

    It raises UnknownHereError where only TRL's preparation knows what to do, or what a row raises in TRL as well.
    """
    counted: Callable[[list[Row]], Iterable[tuple[int, ...]]]
    match preparing.method:
        case "sft":
            counted = _sft(preparing, tokenizer, renderer)
        case "dpo":
            counted = _dpo(preparing, tokenizer, renderer)
        case "reward":
            counted = _reward(preparing, tokenizer, renderer)
        case "kto":
            counted = _kto(preparing, tokenizer, renderer)
        case _:
            counted = _prompts(preparing, tokenizer, renderer)
    names = COUNTED[preparing.method]

    def count(rows: list[Row]) -> Counts:
        columns = zip(*counted(rows), strict=True)
        return {name: array("i", column) for name, column in zip(names, columns, strict=True)}

    return count


def unpaired(counts: Counts) -> Counts:
    """Counts of pairs, each half after the other, in the order that TRL unpairs them into."""
    ordered: Counts = {}
    for name, values in counts.items():
        ordered[name] = array("i")
        for start in range(0, len(values), 2 * UNPAIRED_ROWS):
            block = values[start : start + 2 * UNPAIRED_ROWS]
            ordered[name] += block[0::2] + block[1::2]
    return ordered


def as_rows(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """A batch of `datasets`, a list for each column, as a list of rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


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
                _end(
                    row, preparing.text_field if preparing.text_field in row else "completion", eos, or_completion=True
                )
                row.pop("messages", None)
        options = row_options(rows)
        found: list[tuple[int, int, int, int]] = [(0, -1, -1, 0)] * len(rows)
        for chats, places in _sorted_out(rows, is_conversational):
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


def _dpo(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import extract_prompt, is_conversational

    implicit = "prompt" not in preparing.first
    first = {**preparing.first, **extract_prompt(preparing.first)} if implicit else preparing.first
    chat = is_conversational(first)

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        for row in rows:
            if implicit:
                row.update(extract_prompt(row))
            if not chat:
                _end(row, "chosen", tokenizer.inner.eos_token)
                _end(row, "rejected", tokenizer.inner.eos_token)
        prompts, chosen, rejected = _completed(rows, ("chosen", "rejected"), renderer)
        for prompt, good, bad in zip(prompts, chosen, rejected, strict=True):
            start = min(common_prefix(prompt, good), common_prefix(prompt, bad))
            yield len(good) + len(bad), start, len(good) - start, len(bad) - start

    return counted


def _kto(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
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
                _end(row, "completion", tokenizer.inner.eos_token)
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


def _reward(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl.data_utils import is_conversational

    chat = is_conversational(preparing.first)
    prompted = "prompt" in preparing.first

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        for row in rows:
            if not chat:
                _end(row, "chosen", tokenizer.processing_class.eos_token)
                _end(row, "rejected", tokenizer.processing_class.eos_token)
            if prompted:
                row["chosen"] = row["prompt"] + row["chosen"]
                row["rejected"] = row["prompt"] + row["rejected"]
        good, bad = (
            _both_kinds(rows, column, renderer.lengths, renderer, is_conversational)
            for column in ("chosen", "rejected")
        )
        return ((one + other, one, other) for one, other in zip(good, bad, strict=True))

    return counted


def _prompts(preparing: Preparing, tokenizer: Tokenizer, renderer: Renderer) -> Callable[[list[Row]], Any]:
    from trl import maybe_apply_chat_template
    from trl.data_utils import is_conversational

    def counted(rows: list[Row]) -> Iterable[tuple[int, ...]]:
        if preparing.method == "online_dpo":
            texts = [maybe_apply_chat_template(row, tokenizer.processing_class)["prompt"] for row in rows]
            lengths = renderer.lengths(texts, special=False)
        else:
            # each row's own tools and options are the environment's, not the prompt's: the job's alone are used
            bare = [{"prompt": row["prompt"], "chat_template_kwargs": preparing.chat_template_kwargs} for row in rows]
            lengths = _both_kinds(bare, "prompt", renderer.lengths, renderer, is_conversational, generation=True)
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
        _both_kinds(rows, column, renderer.ids, renderer, is_conversational, generation=column == "prompt")
        for column in columns
    ]


def _both_kinds(
    rows: list[Row],
    column: str,
    encode: Callable[..., list[Any]],
    renderer: Renderer,
    is_chat: Callable[[Row], bool],
    *,
    generation: bool = False,
) -> list[Any]:
    """Encode a column, each row as a chat or as plain text by what it is."""
    options = row_options(rows)
    found: list[Any] = [None] * len(rows)
    for chats, places in _sorted_out(rows, is_chat):
        texts = [rows[place][column] for place in places]
        if chats:
            texts = renderer.texts(texts, [options[place] for place in places], add_generation_prompt=generation)
        for place, result in zip(places, encode(texts, special=not chats), strict=True):
            found[place] = result
    return found


def _sorted_out(rows: list[Row], is_chat: Callable[[Row], bool]) -> list[tuple[bool, list[int]]]:
    """The places of the rows that are chats, and of those that are not; only what there is."""
    kinds = [is_chat(row) for row in rows]
    both = [(kind, [place for place, own in enumerate(kinds) if own is kind]) for kind in (True, False)]
    return [(kind, places) for kind, places in both if places]


def _end(row: Row, column: str, eos: str, *, or_completion: bool = False) -> None:
    """End a text with the end-of-sequence token, where it does not yet.

    In SFT a text that has it already leaves the `completion` to be ended in its stead.
    """
    for name in (column, "completion") if or_completion else (column,):
        if name in row and not row[name].endswith(eos):
            row[name] = row[name] + eos
            return
