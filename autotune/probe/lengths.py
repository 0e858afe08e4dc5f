"""Token lengths of the data as TRL will see them."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from autotune.demo import cache_folder
from autotune.probe import lengths_file
from autotune.probe.formats import Method

if TYPE_CHECKING:
    from autotune.children import Children

DEADLINE_SECONDS = 3600.0  # a first load may have to download the data

# The bar that `datasets` draws while TRL tokenizes, in the child's log
PROGRESS = re.compile(r"Tokenizing \w+ dataset[^|]*\|[^|]*\| (\d+)/(\d+) ")


# The options that the data and its tokens depend on
READ_OPTIONS = (
    "model_name_or_path",
    "model_revision",
    "model_init_kwargs",
    "trust_remote_code",
    "eos_token",
    "chat_template_path",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "eval_strategy",
    "dataset_streaming",
    "datasets",
    "streaming",
    "test_split_size",
    "dataset_text_field",
    "dataset_kwargs",
    "dataset_num_proc",
    "assistant_only_loss",
    "completion_only_loss",
    "chat_template_kwargs",
)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Every row's length before truncation, in the data's order, and where its loss tokens lie.

    `tokens[i]` is row i's length. In SFT `first_loss[i]` and `last_loss[i]` are the positions of its first and last
    token that bears loss (-1 where none does), `loss_tokens[i]` their number. In other methods these are empty and
    `tokens[i]` is what the row's sequences hold together:

    * dpo: prompt and chosen, prompt and rejected: 2 `prompt_tokens` + `chosen_tokens` + `rejected_tokens`
    * reward: `chosen_tokens` + `rejected_tokens`, each with its prompt
    * kto: `prompt_tokens` + `completion_tokens`; a pair is two rows, in the order that TRL unpairs them
    * grpo, rloo, online_dpo: `prompt_tokens`; what is generated is not known
    """

    rows: int  # of the data; in kto a pair counts as the two rows that TRL makes of it
    tokens: tuple[int, ...]  # of the rows measured
    first_loss: tuple[int, ...] = ()
    last_loss: tuple[int, ...] = ()
    loss_tokens: tuple[int, ...] = ()
    format: str  # text | prompt-completion | messages | ...
    columns: tuple[str, ...]
    seconds: float
    row_numbers: tuple[int, ...] = ()  # in the data, from 0, of the rows measured; empty when all were
    rows_known: bool = True  # False: a stream, of which the first rows were read; `rows` counts those
    method: Method = "sft"
    prompt_tokens: tuple[int, ...] = ()
    chosen_tokens: tuple[int, ...] = ()
    rejected_tokens: tuple[int, ...] = ()
    completion_tokens: tuple[int, ...] = ()
    desirable: tuple[int, ...] = ()  # kto: 1 where the label is true
    text_bytes: tuple[int, ...] = ()  # of the rows measured, where they are a sample: it was drawn by these
    by: Literal["batched", "TRL"] = "TRL"  # which preparation: ours in batches, which gives the same, or TRL's own
    by_reason: str = ""
    cached: bool = False  # read from an earlier look at the same data

    @property
    def rows_measured(self) -> int:
        return len(self.tokens)

    @property
    def all_bear_loss(self) -> bool:
        """Whether every token of every row bears loss, as in plain text."""
        return self.loss_tokens == self.tokens


def measure_lengths(
    job_resolved: Mapping[str, Any],
    *,
    folder: Path,
    children: Children,
    progress: Callable[[int, int], None] | None = None,
    method: Method = "sft",
    all_rows: bool = False,
    cache: Path | None = None,
) -> Lengths:
    """Measure the training rows of a job in a child, with the result of TRL's own preparation.

    `job_resolved` holds every field of TRL's dataclasses, `folder` is where its relative paths mean what they meant,
    `progress` is told rows done and rows in all. Up to 200,000 rows all are measured (20,000 where only TRL's own
    preparation will do), else a sample that `autotune.probe.intervals` gives the intervals of; `all_rows` measures
    them all. `cache` is a folder in which lengths are kept for the next look at the same data. Raises AutotuneError
    where the data, the tokenizer or one row cannot be used, ChildError where the child dies.
    """
    told = (0, 0)

    def tell(child_folder: Path) -> None:
        nonlocal told
        state = _progress(child_folder)
        if progress is not None and state is not None and state != told:
            told = state
            progress(*state)

    measured: list[tuple[dict[str, Any], dict[str, Any]]] = []
    children.call(
        "autotune.probe.measuring:measure",
        {
            "job": _plain(job_resolved),
            "method": method,
            "all_rows": all_rows,
            "cache": None if cache is None else str(cache.absolute()),
        },
        deadline_seconds=DEADLINE_SECONDS,
        working_folder=folder,
        while_waiting=tell,
        collect=lambda child_folder: measured.append(lengths_file.read(child_folder / lengths_file.NAME)),
    )
    ((facts, counts),) = measured
    objects: dict[int, int] = {}
    return msgspec.convert({**facts, **{name: _shared(values, objects) for name, values in counts.items()}}, Lengths)


def kept_lengths() -> Path | None:
    """The folder of this user in which lengths are kept; None for a user without a home."""
    try:
        return cache_folder() / "lengths"
    except RuntimeError:
        return None


def dropped_places(lengths: Lengths, max_length: int | None, truncation_mode: str = "keep_start") -> tuple[int, ...]:
    """Places of the rows of preferences that TRL leaves out of the training at this `max_length`.

    DPO and KTO drop a row whose prompt fills `max_length` (DPO not with `keep_end`), the reward trainer one of whose
    two sequences is longer (TRL 1.16, each trainer's `_prepare_dataset`). Online methods drop none; what SFT drops
    says `autotune.plan.padding.truncate`.
    """
    if max_length is None:
        return ()
    match lengths.method:
        case "dpo" if truncation_mode == "keep_end":
            return ()
        case "dpo" | "kto":
            return tuple(place for place, tokens in enumerate(lengths.prompt_tokens) if tokens >= max_length)
        case "reward":
            pairs = zip(lengths.chosen_tokens, lengths.rejected_tokens, strict=True)
            return tuple(place for place, pair in enumerate(pairs) if max(pair) > max_length)
        case _:
            return ()


def sample_rows(
    job_resolved: Mapping[str, Any], row_numbers: Sequence[int], path: Path, *, folder: Path, children: Children
) -> None:
    """Write rows of the train split, in the order given, to a Parquet file that only the user can read.

    The rows are as the data has them, so that TRL's own preparation can run on the file.
    """
    children.call(
        "autotune.probe.row_sample:write",
        {"job": _plain(job_resolved), "row_numbers": list(row_numbers), "path": str(path.absolute())},
        deadline_seconds=DEADLINE_SECONDS,
        working_folder=folder,
    )


def _plain(job_resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that data and tokenizer depend on."""
    return {name: job_resolved[name] for name in READ_OPTIONS if job_resolved.get(name) is not None}


def _progress(child_folder: Path) -> tuple[int, int] | None:
    """Rows done and rows in all: of TRL's bar where there is one, which is drawn when batches did not do."""
    try:
        with (child_folder / "output.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            found = PROGRESS.findall(file.read().decode(errors="replace"))
        if found:
            return int(found[-1][0]), int(found[-1][1])
        done, rows = (child_folder / "progress").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(done), int(rows)


def _shared(values: array[int], objects: dict[int, int]) -> tuple[int, ...]:
    """As a tuple in which equal numbers are one object, kept in `objects`: 8 bytes a row instead of 40."""
    return tuple(objects.setdefault(value, value) for value in values)
