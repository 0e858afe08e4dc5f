"""Token lengths of the data as TRL will see them."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from autotune.children import Children

# Above this many rows a random sample of them is measured: TRL's preparation does 1200 to 2200 rows a second on a core
MEASURED_ROWS = 20_000
DEADLINE_SECONDS = 3600.0  # a first load may have to download the data

# The bar that `datasets` draws while TRL tokenizes, in the child's log
PROGRESS = re.compile(r"Tokenizing train dataset[^|]*\|[^|]*\| (\d+)/(\d+) ")


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
)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Every row's length before truncation, in the data's order, and where its loss tokens lie.

    `tokens[i]` is row i's length, `first_loss[i]` and `last_loss[i]` the positions of its first and last token that
    bears loss (-1 where none does), `loss_tokens[i]` their number.
    """

    rows: int  # of the data
    tokens: tuple[int, ...]  # of the rows measured
    first_loss: tuple[int, ...]
    last_loss: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    format: str  # text | prompt-completion | messages | ...
    columns: tuple[str, ...]
    seconds: float
    row_numbers: tuple[int, ...] = ()  # in the data, from 0, of the rows measured; empty when all were
    rows_known: bool = True  # False: a stream, of which the first rows were read; `rows` counts those

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
) -> Lengths:
    """Measure the training rows of a job, by TRL's own preparation in a child.

    `job_resolved` holds every field of TRL's dataclasses, `folder` is where its relative paths mean what they meant,
    `progress` is told rows done and rows in all. Up to 20,000 rows all are measured, else a random sample. Raises
    AutotuneError where the data, the tokenizer or one row cannot be used, ChildError where the child dies.
    """
    told = (0, 0)

    def tell(child_folder: Path) -> None:
        nonlocal told
        state = _progress(child_folder / "output.log")
        if progress is not None and state is not None and state != told:
            told = state
            progress(*state)

    reply = children.call(
        "autotune.probe.lengths:measure",
        {"job": _plain(job_resolved)},
        deadline_seconds=DEADLINE_SECONDS,
        working_folder=folder,
        while_waiting=tell,
    )
    return msgspec.convert(reply, Lengths)


def sample_rows(
    job_resolved: Mapping[str, Any], row_numbers: Sequence[int], path: Path, *, folder: Path, children: Children
) -> None:
    """Write rows of the train split, in the order given, to a Parquet file that only the user can read.

    The rows are as the data has them, so that TRL's own preparation can run on the file.
    """
    children.call(
        "autotune.probe.lengths:write_sample",
        {"job": _plain(job_resolved), "row_numbers": list(row_numbers), "path": str(path.absolute())},
        deadline_seconds=DEADLINE_SECONDS,
        working_folder=folder,
    )


def _plain(job_resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that data and tokenizer depend on."""
    return {name: job_resolved[name] for name in READ_OPTIONS if job_resolved.get(name) is not None}


def _progress(log: Path) -> tuple[int, int] | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            tail = file.read().decode(errors="replace")
    except OSError:
        return None
    found = PROGRESS.findall(tail)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


# ---- what follows runs in a child


def measure(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The child's side of `measure_lengths`: the fields of `Lengths`."""
    from autotune.probe import preparation, tokenizer, training_data

    started = time.monotonic()
    _need_no_gpu()
    job = request["job"]
    data, rows_known = training_data.load(job, folder)
    data_format = training_data.format_of(data[0], job.get("dataset_text_field") or "text")
    rows = len(data)
    row_numbers: list[int] = []
    if rows > MEASURED_ROWS:
        row_numbers = sorted(random.Random(0).sample(range(rows), MEASURED_ROWS))
        data = data.select(row_numbers)
    rows_ready = preparation.prepared(job, data, data_format, tokenizer.load(job), row_numbers)
    return {
        "rows": rows,
        "format": data_format,
        "columns": data.column_names,
        "row_numbers": row_numbers,
        "rows_known": rows_known,
        **preparation.counted(rows_ready),
        "seconds": time.monotonic() - started,
    }


def write_sample(request: Mapping[str, Any], folder: Path) -> int:
    """The child's side of `sample_rows`: the number of rows written."""
    import datasets

    from autotune.probe import training_data

    _need_no_gpu()
    data, _ = training_data.load(request["job"], folder)
    # row by row: `Dataset.select` cannot reorder a column of mixed JSON (datasets 5.2, pyarrow 26)
    rows = [data[number] for number in request["row_numbers"]]
    sample = datasets.Dataset.from_list(rows, features=data.features)
    path = Path(request["path"])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            sample.to_parquet(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(rows)


def _need_no_gpu() -> None:
    """Keep accelerate from opening a GPU context, and tokenizers from threads that TRL's row by row use cannot feed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
