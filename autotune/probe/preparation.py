"""The child's side of running TRL's own preparation over rows, and of counting what comes out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from autotune.errors import AutotuneError
from autotune.probe.counts import Counts, Preparing, no_counts
from autotune.probe.formats import ONLINE, Method, is_chat
from autotune.probe.rendering import UnknownHereError
from autotune.probe.tokenizer import Tokenizer

PARALLEL_ROWS = 2_000  # below this, starting processes costs more than they save
TABLE_ROWS = 1_000


def by_trl(
    job: Mapping[str, Any],
    data: Any,
    preparing: Preparing,
    tokenizer: Tokenizer,
    row_numbers: Sequence[int] | range,
    *,
    template: str | None,
) -> Counts:
    """The counts of rows as TRL's own trainer makes them, before truncation and packing.

    `row_numbers` are the rows' numbers in the data. Raises AutotuneError, with its number, for the first row that TRL
    cannot prepare.
    """
    prepare = _preparation(job, preparing, tokenizer, template)
    try:
        return prepare(data)
    except Exception as error:
        raise _first_broken_row(prepare, data, row_numbers, error, preparing.text_field) from error


def prepared_already(data: Any) -> Counts:
    """The counts of rows that `skip_prepare_dataset` takes as they are."""
    if not {"input_ids", "labels"} <= set(data.column_names):
        raise AutotuneError(
            "`skip_prepare_dataset` is set and the data lacks `input_ids` or `labels`",
            hint="remove `skip_prepare_dataset` from `dataset_kwargs`, or add the columns",
        )
    return counted(data, ["labels"])


def _preparation(
    job: Mapping[str, Any], preparing: Preparing, tokenizer: Tokenizer, template: str | None
) -> Callable[[Any], Counts]:
    """TRL's `_prepare_dataset` (1.16) with what the trainer's `__init__` would have set on it by then."""
    import trl

    method = preparing.method
    if method in ONLINE:
        return lambda rows: _prompts_by_trl(rows, preparing, tokenizer)

    def arguments(rows: Any) -> SimpleNamespace:
        return SimpleNamespace(
            dataset_num_proc=_processes(job, len(rows)),
            dataset_text_field=preparing.text_field,
            assistant_only_loss=preparing.assistant_only,
            max_length=None,
            truncation_mode="keep_start",
            shuffle_dataset=False,
            seed=42,
        )

    trainer = SimpleNamespace(
        _tokenizer=tokenizer.inner,
        chat_template=template,
        completion_only_loss=preparing.completion_only,
        calculate_KL=False,
    )

    def prepare(rows: Any) -> Counts:
        # parallel encoding and processes that are forked after it wait for each other for ever
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        given = (trainer, rows, tokenizer.processing_class, arguments(rows))
        match method:
            case "sft":
                return counted(trl.SFTTrainer._prepare_dataset(*given, False, None, "train"), ["labels"])
            case "dpo":
                return _summed(trl.DPOTrainer._prepare_dataset(*given, "train"), "dpo")
            case "reward":
                return _summed(trl.RewardTrainer._prepare_dataset(*given, "train"), "reward")
            case _:  # under any name but "train" nothing is said of how many rows are desirable
                return _summed(trl.KTOTrainer._prepare_dataset(*given, "rows"), "kto")

    return prepare


def _summed(rows: Any, method: Method) -> Counts:
    """The counts of rows of preferences, from the lists of tokens that TRL makes of each."""
    columns = {
        "dpo": ("prompt_ids", "chosen_ids", "rejected_ids"),
        "reward": ("chosen_ids", "rejected_ids"),
        "kto": ("prompt_ids", "completion_ids"),
    }[method]
    counts = no_counts(method)
    tables = rows.select_columns([*columns, *(["label"] if method == "kto" else [])]).with_format("arrow")
    for start in range(0, len(rows), TABLE_ROWS):
        table = tables[start : start + TABLE_ROWS]
        lengths = {name: table[name].combine_chunks().value_lengths().to_numpy() for name in columns}
        for name, each in lengths.items():
            counts[name.replace("_ids", "_tokens")].extend(each.tolist())
        total = sum(lengths.values())
        if method == "dpo":  # both sequences of a pair begin with the prompt
            total = total + lengths["prompt_ids"]
        counts["tokens"].extend(total.tolist())
        if method == "kto":
            counts["desirable"].extend(int(bool(label)) for label in table["label"].to_pylist())
    return counts


def _prompts_by_trl(rows: Any, preparing: Preparing, tokenizer: Tokenizer) -> Counts:
    """The prompts of online methods, which TRL encodes in each step; here one by one."""
    import trl

    processing_class = tokenizer.processing_class
    stand_in = SimpleNamespace(
        processing_class=processing_class,
        chat_template=None,
        chat_template_kwargs=dict(preparing.chat_template_kwargs),
        tools=None,
        environment_factories=None,
        _is_vlm=processing_class is not tokenizer.inner,
    )
    trainer = trl.RLOOTrainer if preparing.method == "rloo" else trl.GRPOTrainer
    counts = no_counts(preparing.method)
    for row in rows:
        if preparing.method == "online_dpo":
            text = trl.maybe_apply_chat_template(row, processing_class)["prompt"]
            ids = processing_class(text=[text], add_special_tokens=False)["input_ids"][0]
        else:
            ids = trainer._tokenize_prompts(stand_in, [row["prompt"]])[0][0]
        counts["tokens"].append(len(ids))
    counts["prompt_tokens"] = counts["tokens"][:]
    return counts


def need_template(data_format: str, tokenizer: Tokenizer) -> None:
    """Raises AutotuneError for chats where the tokenizer has no chat template."""
    if is_chat(data_format) and not tokenizer.processing_class.chat_template:
        raise AutotuneError(
            f"the data is conversational ({data_format}) and the tokenizer has no chat template",
            hint="use an instruct model, or set `chat_template_path` to a `.jinja` file or to a model that has one",
        )


def training_template(job: Mapping[str, Any], data_format: str, processing_class: Any) -> str | None:
    """The template that TRL puts in the place of one that does not mark what the assistant says, or None.

    Raises AutotuneError where `assistant_only_loss` cannot be had.
    """
    from trl import get_training_chat_template
    from trl.chat_template_utils import has_generation_markers

    if not job.get("assistant_only_loss"):
        return None
    if not is_chat(data_format):
        raise AutotuneError(
            "`assistant_only_loss` is set and the data is not conversational",
            hint="remove `assistant_only_loss`, or give the data as `messages`",
        )
    if has_generation_markers(processing_class.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(processing_class)
    except ValueError as error:
        raise AutotuneError(
            f"`assistant_only_loss` is set and TRL cannot mark the answers in this chat template: {error}",
            hint="set `chat_template_path` to a template with `{% generation %}` around what the assistant says",
        ) from error
    return template


def _processes(job: Mapping[str, Any], rows: int) -> int | None:
    if rows < PARALLEL_ROWS:
        return None
    given = job.get("dataset_num_proc")
    if given is not None:
        return int(given)
    spare = min(8, len(os.sched_getaffinity(0)) // 2)
    return spare if spare > 1 else None


# Columns that hold text or messages in every row that has them
NEVER_EMPTY = ("prompt", "completion", "messages", "conversations", "chosen", "rejected")


def _first_broken_row(
    prepare: Callable[[Any], Counts],
    data: Any,
    row_numbers: Sequence[int] | range,
    error: Exception,
    text_field: str,
) -> AutotuneError:
    """Find the first row that cannot be prepared, by halves: as much work as one more pass."""
    low, high = 0, len(data)  # rows before `low` are good
    while high - low > 1:
        middle = (low + high) // 2
        if _failure(prepare, data.select(range(low, middle))) is None:
            low = middle
        else:
            high = middle
    alone = _failure(prepare, data.select(range(low, high)))
    if alone is None:  # the rows are good one by one, such as chats after plain text
        return AutotuneError(
            f"TRL cannot prepare the data: {reason_of(error)}", hint="see that every row has the same columns filled"
        )
    number = row_numbers[low] + 1
    row: dict[str, Any] = {}
    with contextlib.suppress(UnicodeDecodeError):  # text that is no UTF-8 cannot even be read back
        row = data[low]
    for name, value in row.items():
        if name in (text_field, *NEVER_EMPTY) and (value is None or isinstance(value, bool | int | float)):
            is_what = "is null" if value is None else f"is {json.dumps(value)[:40]}, not text"
            return AutotuneError(
                f"`{name}` of row {number} {is_what}", hint="mend or remove that row; rows are counted from 1"
            )
    return AutotuneError(
        f"TRL cannot prepare row {number} of the data, counting from 1: {reason_of(alone)}",
        hint="mend or remove that row; the chat template and the columns of the data say what it must hold",
    )


def _failure(prepare: Callable[[Any], Any], rows: Any) -> Exception | None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # the log keeps the first pass's bar
        try:
            prepare(rows)
        except Exception as error:
            return error
    return None


def reason_of(error: Exception) -> str:
    """The kind of an error and its first line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


def counted(rows: Any, masks: Sequence[str]) -> Counts:
    """`tokens`, `first_loss`, `last_loss` and `loss_tokens` of each row with `input_ids`.

    A token bears loss where every mask does: where `labels` is not -100, any other not 0. Without masks all tokens
    do. Raises UnknownHereError for masks of other lengths than the tokens, or rows without tokens.
    """
    counts = no_counts("sft")
    tables = rows.select_columns(["input_ids", *masks]).with_format("arrow")
    for start in range(0, len(rows), TABLE_ROWS):
        for name, values in _table_counts(tables[start : start + TABLE_ROWS], masks).items():
            counts[name].extend(values)
    return counts


def _table_counts(table: Any, masks: Sequence[str]) -> dict[str, list[int]]:
    import numpy

    lists = {name: table[name].combine_chunks() for name in ("input_ids", *masks)}
    if any(each.null_count for each in lists.values()):
        raise UnknownHereError("rows without tokens")
    tokens = lists["input_ids"].value_lengths().to_numpy()
    # `labels` on their own count as they are; TRL holds them against nothing before the collator
    spans = lists[masks[0]].value_lengths().to_numpy() if masks else tokens
    if any((lists[name].value_lengths().to_numpy() != spans).any() for name in masks):
        raise UnknownHereError("masks of several lengths")
    bears = numpy.ones(int(spans.sum()), dtype=bool)
    for name in masks:
        values = lists[name].flatten().to_numpy(zero_copy_only=False)
        bears &= values != -100 if name == "labels" else values.astype(bool)
    ends = numpy.cumsum(spans)
    bearing = numpy.flatnonzero(bears)
    # of the loss tokens of all rows in a line: how many come before each row's end, and before its start
    until = numpy.searchsorted(bearing, ends)
    since = numpy.concatenate(([0], until[:-1]))
    starts = numpy.concatenate(([0], ends[:-1]))
    some = until > since
    first = numpy.full(len(ends), -1)
    last = numpy.full(len(ends), -1)
    first[some] = bearing[since[some]] - starts[some]
    last[some] = bearing[until[some] - 1] - starts[some]
    return {
        "tokens": tokens.tolist(),
        "first_loss": first.tolist(),
        "last_loss": last.tolist(),
        "loss_tokens": (until - since).tolist(),
    }
