"""What TRL's preparation of rows comes to, in numbers, and what its methods have in common (TRL 1.16)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from autotune.probe.formats import ONLINE, Method
from autotune.probe.rendering import Renderer, row_options

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


def both_kinds(
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
    for chats, places in sorted_out(rows, is_chat):
        texts = [rows[place][column] for place in places]
        if chats:
            texts = renderer.texts(texts, [options[place] for place in places], add_generation_prompt=generation)
        for place, result in zip(places, encode(texts, special=not chats), strict=True):
            found[place] = result
    return found


def sorted_out(rows: list[Row], is_chat: Callable[[Row], bool]) -> list[tuple[bool, list[int]]]:
    """The places of the rows that are chats, and of those that are not; only what there is."""
    kinds = [is_chat(row) for row in rows]
    both = [(kind, [place for place, own in enumerate(kinds) if own is kind]) for kind in (True, False)]
    return [(kind, places) for kind, places in both if places]


def end_text(row: Row, column: str, eos: str, *, or_completion: bool = False) -> None:
    """End a text with the end-of-sequence token, where it does not yet.

    In SFT a text that has it already leaves the `completion` to be ended in its stead.
    """
    for name in (column, "completion") if or_completion else (column,):
        if name in row and not row[name].endswith(eos):
            row[name] = row[name] + eos
            return
