"""The child's side of running TRL's own preparation over rows, and of counting what comes out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from autotune.errors import AutotuneError
from autotune.probe.tokenizer import Tokenizer

PARALLEL_ROWS = 2_000  # below this, starting processes costs more than they save


def prepared(
    job: Mapping[str, Any], data: Any, data_format: str, tokenizer: Tokenizer, row_numbers: Sequence[int]
) -> Any:
    """The rows as `SFTTrainer` makes them, with `input_ids` and `labels`, before truncation and packing.

    `row_numbers` are the rows' numbers in the data, empty where these are all. Raises AutotuneError for a job that
    TRL refuses and, with its number, for the first row that TRL cannot prepare.
    """
    if (job.get("dataset_kwargs") or {}).get("skip_prepare_dataset"):
        if not {"input_ids", "labels"} <= set(data.column_names):
            raise AutotuneError(
                "`skip_prepare_dataset` is set and the data lacks `input_ids` or `labels`",
                hint="remove `skip_prepare_dataset` from `dataset_kwargs`, or add the columns",
            )
        return data
    prepare = _preparation(job, data, data_format, tokenizer)
    try:
        return prepare(data)
    except Exception as error:
        raise _first_broken_row(prepare, data, row_numbers, error) from error


def _preparation(job: Mapping[str, Any], data: Any, data_format: str, tokenizer: Tokenizer) -> Callable[[Any], Any]:
    """TRL's `_prepare_dataset` (1.16) with what `SFTTrainer.__init__` would have set on the trainer by then."""
    from trl import SFTTrainer

    conversational = data_format in {"messages", "conversations", "conversational prompt-completion"}
    if conversational and not tokenizer.processing_class.chat_template:
        raise AutotuneError(
            f"the data is conversational ({data_format}) and the tokenizer has no chat template",
            hint="use an instruct model, or set `chat_template_path` to a `.jinja` file or to a model that has one",
        )
    completion_only = job.get("completion_only_loss")
    stand_in = SimpleNamespace(
        _tokenizer=tokenizer.inner,
        chat_template=_training_template(job, conversational, tokenizer.processing_class),
        completion_only_loss={"prompt", "completion"} <= set(data.column_names)
        if completion_only is None
        else completion_only,
    )
    arguments = SimpleNamespace(
        dataset_num_proc=_processes(job, len(data)),
        dataset_text_field=job.get("dataset_text_field") or "text",
        assistant_only_loss=bool(job.get("assistant_only_loss")),
        max_length=None,
        truncation_mode="keep_start",
        shuffle_dataset=False,
        seed=42,
    )

    def prepare(rows: Any) -> Any:
        return SFTTrainer._prepare_dataset(stand_in, rows, tokenizer.processing_class, arguments, False, None, "train")

    return prepare


def _training_template(job: Mapping[str, Any], conversational: bool, processing_class: Any) -> str | None:
    from trl import get_training_chat_template
    from trl.chat_template_utils import has_generation_markers

    if not job.get("assistant_only_loss"):
        return None
    if not conversational:
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


def _first_broken_row(
    prepare: Callable[[Any], Any], data: Any, row_numbers: Sequence[int], error: Exception
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
            f"TRL cannot prepare the data: {_reason(error)}", hint="see that every row has the same columns filled"
        )
    number = (row_numbers[low] if row_numbers else low) + 1
    return AutotuneError(
        f"TRL cannot prepare row {number} of the data, counting from 1: {_reason(alone)}",
        hint="mend or remove that row; the chat template and the columns of the data say what it must hold",
    )


def _failure(prepare: Callable[[Any], Any], rows: Any) -> Exception | None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # the log keeps the first pass's bar
        try:
            prepare(rows)
        except Exception as error:
            return error
    return None


def _reason(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


def counted(rows: Any) -> dict[str, list[int]]:
    """`tokens`, `first_loss`, `last_loss` and `loss_tokens` of each prepared row, as `Lengths` wants them."""
    import numpy

    table = rows.select_columns(["input_ids", "labels"]).with_format("arrow")[:]
    tokens = table["input_ids"].combine_chunks().value_lengths()
    labels = table["labels"].combine_chunks()
    ends = numpy.cumsum(labels.value_lengths().to_numpy(zero_copy_only=False))
    bearing = numpy.flatnonzero(labels.flatten().to_numpy(zero_copy_only=False) != -100)
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
        "tokens": tokens.to_pylist(),
        "first_loss": first.tolist(),
        "last_loss": last.tolist(),
        "loss_tokens": (until - since).tolist(),
    }
