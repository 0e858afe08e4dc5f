"""The child's side of measuring lengths: in batches where that gives what TRL gives, else by TRL's own preparation."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from autotune.child import write_whole
from autotune.errors import AutotuneError
from autotune.probe import (
    batched,
    cores,
    formats,
    lengths_cache,
    lengths_file,
    mapped_memory,
    preparation,
    sampling,
    training_data,
)
from autotune.probe import tokenizer as tokenizers
from autotune.probe.counts import Counts, Preparing, as_rows, no_counts, unpaired
from autotune.probe.formats import COLUMNS, Method
from autotune.probe.rendering import Renderer, UnknownHereError
from autotune.probe.tokenizer import Tokenizer

# Above so many rows a sample of them is measured. In batches 200,000 take a minute on two cores; TRL's preparation does
# 1,200 to 2,200 rows a second on one.
MEASURED_ROWS = 200_000
MEASURED_BY_TRL = 20_000
GUARD_ROWS = 200  # of the first and of the last rows: both ways must agree on these
GIVE_BACK_BATCHES = 8
TELL_SECONDS = 0.1


class Measured(NamedTuple):
    """The counts of the rows `row_numbers`, which way they were counted, and why that way."""

    counts: Counts
    row_numbers: Sequence[int] | range
    by: str
    by_reason: str


class Rows(NamedTuple):
    """Rows of the data, the columns that TRL looks at, with how TRL would prepare them."""

    job: Mapping[str, Any]
    data: Any
    numbers: Sequence[int] | range  # in the whole data
    preparing: Preparing
    tokenizer: Tokenizer
    template: str | None
    data_format: str
    all_rows: bool

    def at(self, places: Sequence[int] | range) -> Rows:
        """Some of these rows."""
        return self._replace(data=self.data.select(places), numbers=[self.numbers[place] for place in places])


def measure(request: Mapping[str, Any], folder: Path) -> None:
    """The child's side of `measure_lengths`: leaves a `lengths_file` in its folder."""
    started = time.monotonic()
    need_no_gpu()
    job: Mapping[str, Any] = request["job"]
    method: Method = request["method"]
    into = folder / lengths_file.NAME
    cache = Path(request["cache"]) if request["cache"] else None
    asked = {name: request[name] for name in ("job", "method", "all_rows")}
    tokenizer = tokenizers.load(job)

    files = training_data.local_files(job)
    key = lengths_cache.key_of(asked, tokenizer, files) if cache and files is not None else None
    if _found(cache, key, into, started):
        return
    data, rows_known = training_data.load(job, folder)
    if key is None and cache and data.cache_files:  # data of the hub: by the files it was converted into
        key = lengths_cache.key_of(asked, tokenizer, [Path(file["filename"]) for file in data.cache_files])
        if _found(cache, key, into, started):
            return

    rows = _rows(job, method, data, tokenizer, all_rows=request["all_rows"])
    measured = _measured(rows, _teller(folder))
    facts = {
        "rows": len(data) * (2 if _unpairs(rows) else 1),
        "method": method,
        "format": rows.data_format,
        "columns": data.column_names,
        "rows_known": rows_known,
        "by": measured.by,
        "by_reason": measured.by_reason,
        "seconds": time.monotonic() - started,
    }
    counts = dict(measured.counts)
    if len(measured.row_numbers) < len(data):
        counts["row_numbers"] = array("i", measured.row_numbers)
        sizes = sampling.row_sizes(rows.at(measured.row_numbers).data).clip(max=2**31 - 1).tolist()
        if _unpairs(rows):
            sizes = unpaired({"both": array("i", [size for size in sizes for _ in range(2)])})["both"]
        counts["text_bytes"] = array("i", sizes)
    lengths_file.write(into, facts, counts)
    if cache and key and rows_known:
        lengths_cache.keep(cache, key, into)


def need_no_gpu() -> None:
    """Keep accelerate from opening a GPU context."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _found(cache: Path | None, key: str | None, into: Path, started: float) -> bool:
    found = lengths_cache.find(cache, key) if cache and key else None
    if found is None:
        return False
    lengths_file.write(into, {**found.facts, "cached": True, "seconds": time.monotonic() - started}, found.counts)
    return True


def _rows(job: Mapping[str, Any], method: Method, data: Any, tokenizer: Tokenizer, *, all_rows: bool) -> Rows:
    text_field = job.get("dataset_text_field") or "text"
    data_format = formats.format_of(_first(data), text_field, method)
    preparation.need_template(data_format, tokenizer)
    completion_only = job.get("completion_only_loss")
    if completion_only is None:
        completion_only = {"prompt", "completion"} <= set(data.column_names)
    narrow = data.select_columns([name for name in data.column_names if name in COLUMNS or name == text_field])
    preparing = Preparing(
        method=method,
        text_field=text_field,
        completion_only=completion_only,
        assistant_only=bool(job.get("assistant_only_loss")),
        chat_template_kwargs=job.get("chat_template_kwargs") or {},
        first=narrow[0],
    )
    template = preparation.training_template(job, data_format, tokenizer.processing_class)
    return Rows(job, narrow, range(len(data)), preparing, tokenizer, template, data_format, all_rows)


def _first(data: Any) -> dict[str, Any]:
    try:
        row: dict[str, Any] = data[0]
    except (UnicodeDecodeError, ValueError) as error:  # text that is no UTF-8, JSON that is none
        raise AutotuneError(
            f"row 1 of the data cannot be read: {preparation.reason_of(error)}",
            hint="text must be UTF-8; mend or remove that row",
        ) from error
    return row


def _measured(rows: Rows, tell: Callable[[int, int], None]) -> Measured:
    if (rows.job.get("dataset_kwargs") or {}).get("skip_prepare_dataset"):
        counts = preparation.prepared_already(rows.data)
        return Measured(counts, rows.numbers, "TRL", "`skip_prepare_dataset`: the rows are taken as they are")
    try:
        count = _batched_way(rows)
        _guard(rows, count)
    except UnknownHereError as error:
        return _by_trl(rows, str(error))
    if rows.data_format == "input_ids":
        return Measured(count(rows, _quiet), rows.numbers, "batched", "the tokens are in the data")
    some = _chosen(rows, MEASURED_ROWS)
    try:
        counts = count(some, tell)
    except (UnknownHereError, BrokenProcessPool) as error:  # such as for want of memory
        return _by_trl(rows, str(error))
    return Measured(counts, some.numbers, "batched", f"the same as by TRL on {_guarded(rows)} rows")


def _by_trl(rows: Rows, reason: str) -> Measured:
    some = _chosen(rows, MEASURED_BY_TRL)
    return Measured(_trl_counts(some), some.numbers, "TRL", reason)


def _trl_counts(rows: Rows) -> Counts:
    return preparation.by_trl(rows.job, rows.data, rows.preparing, rows.tokenizer, rows.numbers, template=rows.template)


def _chosen(rows: Rows, most: int) -> Rows:
    if rows.all_rows or len(rows.data) <= most:
        return rows
    return rows.at(sampling.by_size(sampling.row_sizes(rows.data), most).tolist())


Counting = Callable[[Rows, Callable[[int, int], None]], Counts]


def _batched_way(rows: Rows) -> Counting:
    if rows.data_format == "input_ids":
        return lambda some, _: preparation.counted(some.data, _masks(rows))
    if rows.data_format == "chosen_ids":
        raise UnknownHereError("the pairs are tokens already")
    count_rows = batched.counter(rows.preparing, rows.tokenizer, Renderer(rows.tokenizer, rows.template))

    def count(some: Rows, tell: Callable[[int, int], None]) -> Counts:
        # each core has a process, which encodes on its own; parallel encoding and forks wait for each other for ever
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        done = itertools.count(1)

        def count_span(span: tuple[int, int]) -> Counts | str:
            try:
                counts = count_rows(as_rows(some.data[span[0] : span[1]]))
            except Exception as error:
                return str(error) if isinstance(error, UnknownHereError) else preparation.reason_of(error)
            if next(done) % GIVE_BACK_BATCHES == 0:
                mapped_memory.give_back()
            return counts

        counts = no_counts(rows.preparing.method)
        spans = list(sampling.batches(sampling.row_sizes(some.data)))
        processes = cores.available() if len(some.data) >= preparation.PARALLEL_ROWS else 1
        parts = cores.each(count_span, spans, processes=processes)
        with contextlib.closing(parts):
            for (start, end), part in zip(spans, parts, strict=True):
                if isinstance(part, str):
                    # TRL names the row that neither can prepare; where it can, it does all of them
                    _trl_counts(some.at(range(start, end)))
                    raise UnknownHereError(f"only TRL prepares rows {start + 1} to {end}: {part}")
                for name, values in part.items():
                    counts[name] += values
                tell(end, len(some.data))
        return unpaired(counts) if _unpairs(rows) else counts

    return count


def _masks(rows: Rows) -> list[str]:
    columns = rows.data.column_names
    if "labels" in columns:
        return ["labels"]
    wanted = {"completion_mask": rows.preparing.completion_only, "assistant_masks": True}
    return [name for name, used in wanted.items() if used and name in columns]


def _guard(rows: Rows, count: Counting) -> None:
    """Raise UnknownHereError unless both ways agree on the first and the last rows."""
    total = len(rows.data)
    for span in (range(min(GUARD_ROWS, total)), range(max(GUARD_ROWS, total - GUARD_ROWS), total)):
        if not span:
            continue
        some = rows.at(span)
        counts = count(some, _quiet)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # the log is for the whole's bar
            own = _trl_counts(some)
        for name in counts:
            if counts[name] != own[name]:
                raise UnknownHereError(f"the ways differ in `{name}` within rows {span.start + 1} to {span.stop}")


def _guarded(rows: Rows) -> int:
    return min(2 * GUARD_ROWS, len(rows.data))


def _unpairs(rows: Rows) -> bool:
    return rows.preparing.method == "kto" and "chosen" in rows.preparing.first and "rejected" in rows.preparing.first


def _quiet(done: int, of: int) -> None:
    """Progress that nobody is told."""


def _teller(folder: Path) -> Callable[[int, int], None]:
    """Leaves the rows done and the rows in all in the file `progress`, ten times a second."""
    told = 0.0

    def tell(done: int, of: int) -> None:
        nonlocal told
        if done == of or time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            write_whole(folder / "progress", f"{done} {of}".encode())

    return tell
