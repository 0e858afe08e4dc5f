"""The child's side of reading the job's training rows, as TRL's script reads them."""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.errors import AutotuneError

# The loaders of `datasets` for files, by what the file's name ends in
LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
STREAMED_ROWS = 20_000
# Local data up to this size is converted into a folder that goes with the child. Above it the user's own cache is used,
# as the training would: a second copy would cost minutes and a disk that may not have the room.
PRIVATE_BYTES = 512 * 2**20


class TrainingData(NamedTuple):
    """The train split as a `datasets.Dataset`. `rows_known` is False for a stream that went on after these rows."""

    rows: Any
    rows_known: bool


def load(job: Mapping[str, Any], scratch: Path) -> TrainingData:
    """Read the train split as `trl.scripts.sft` does (TRL 1.16): `datasets:` where given, else `dataset_name`.

    `scratch` is a folder that is thrown away. Raises AutotuneError for every way in which data can be missing or
    broken.
    """
    import datasets
    import numpy

    datasets.disable_caching()
    _keep_temporary_files_in(scratch)
    split = job.get("dataset_train_split") or "train"
    if not job.get("datasets"):
        _check_name(job.get("dataset_name"))
    if _local_bytes(job) <= PRIVATE_BYTES:
        datasets.config.HF_DATASETS_CACHE = scratch / "datasets"
    # `test_split_size` splits at random, from numpy's global state: one seed, so that row numbers keep their meaning
    numpy.random.seed(0)
    try:
        splits = _read(job)
        if split not in splits:
            there = ", ".join(f"`{name}`" for name in splits) or "none"
            raise AutotuneError(
                f"the data has no split `{split}`", hint=f"set `dataset_train_split` to one it has: {there}"
            )
        wanted = job.get("dataset_test_split") or "test"
        if (job.get("eval_strategy") or "no") != "no" and wanted not in splits:
            there = ", ".join(f"`{name}`" for name in splits)
            raise AutotuneError(
                f"the job evaluates on the split `{wanted}`, which the data does not have: TRL would stop there",
                hint=f"the data has {there}; set `dataset_test_split`, or with `datasets:` a `test_split_size`",
            )
        rows = splits[split]
        rows_known = True
        if isinstance(rows, datasets.IterableDataset):
            rows, rows_known = _first_rows(rows)
        count = len(rows)
    except AutotuneError:
        raise
    except Exception as error:
        raise _explained(job, error) from error
    if count == 0:
        raise _no_rows(job)
    return TrainingData(rows, rows_known)


def _keep_temporary_files_in(scratch: Path) -> None:
    """Let `datasets` write what it maps and filters into `scratch`: by itself it makes a folder beside all others, and
    deletes it in an exit handler, which a child that is killed or leaves by `os._exit` never comes to (datasets 5.2,
    `fingerprint.py`, which reads TMPDIR once)."""
    from datasets.fingerprint import get_temporary_cache_files_directory

    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(scratch)
    try:
        get_temporary_cache_files_directory()
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


def _read(job: Mapping[str, Any]) -> Any:
    import datasets
    import trl

    if job.get("datasets"):
        mixture = trl.DatasetMixtureConfig(
            datasets=[dict(source) for source in job["datasets"]],
            streaming=bool(job.get("streaming")),
            test_split_size=job.get("test_split_size"),
        )
        return trl.get_dataset(mixture)
    return datasets.load_dataset(
        job["dataset_name"], name=job.get("dataset_config"), streaming=bool(job.get("dataset_streaming"))
    )


def _first_rows(stream: Any) -> tuple[Any, bool]:
    import datasets

    rows = list(stream.take(STREAMED_ROWS + 1))
    kept = rows[:STREAMED_ROWS]
    return datasets.Dataset.from_list(kept, features=stream.features), len(rows) <= STREAMED_ROWS


def _check_name(name: str | None) -> None:
    if not name:
        raise AutotuneError("the job names no data", hint="set `dataset_name`, or `datasets` with a `path`")
    path = Path(name)
    if path.is_file():
        loader = LOADERS.get(path.suffix, "json")
        raise AutotuneError(
            f"`dataset_name: {name}` is a file, and TRL takes a folder or a name on the hub there",
            hint=f"write it as `datasets: [{{path: {loader}, data_files: {name}}}]`",
        )
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or path.suffix in LOADERS
    if looks_local and not path.exists():
        raise AutotuneError(
            f"there is no folder `{name}`", hint=f"relative paths are looked up in `{Path.cwd()}`; check `dataset_name`"
        )


def _sources(job: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each source's loader or path, with the local files it reads; none for one on the hub."""
    for source in job.get("datasets") or [{"path": job.get("dataset_name") or ""}]:
        path = str(source.get("path"))
        files = source.get("data_files")
        if isinstance(files, Mapping):
            files = list(files.values())
        patterns = _flat(files)
        folder = source.get("data_dir") or (path if Path(path).is_dir() else None)
        if folder and patterns:
            patterns = [str(Path(folder, pattern)) for pattern in patterns]
        elif folder:
            patterns = [str(Path(folder, "**", f"*{ending}")) for ending in LOADERS]
        yield path, [name for pattern in patterns for name in _matching(pattern)]


def _matching(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)


def _flat(files: Any) -> list[str]:
    if files is None:
        return []
    if isinstance(files, str):
        return [files]
    return [name for part in files for name in _flat(part)]


def local_files(job: Mapping[str, Any]) -> list[Path] | None:
    """The files that the job reads, or None where some of its data is not local."""
    found: list[Path] = []
    for path, files in _sources(job):
        if not files or not (path in LOADERS.values() or Path(path).is_dir()):
            return None
        found += map(Path, files)
    return found


def _local_bytes(job: Mapping[str, Any]) -> float:
    """How many bytes of local files the job reads; infinite where some of its data is not local."""
    files = local_files(job)
    if files is None:
        return float("inf")
    total = 0.0
    for path in files:
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _no_rows(job: Mapping[str, Any]) -> AutotuneError:
    return AutotuneError(f"the data has no rows ({_named(job)})", hint="check that the file was written to its end")


def _named(job: Mapping[str, Any]) -> str:
    names: Sequence[str] = [name for path, files in _sources(job) for name in (files or [path])]
    return ", ".join(f"`{name}`" for name in names[:3]) + (" …" if len(names) > 3 else "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explained(job: Mapping[str, Any], error: Exception) -> AutotuneError:
    """Say in the user's words why `datasets` could not read the data (exceptions of datasets 5.2)."""
    import datasets

    named = _named(job)
    causes = list(_chain(error))
    for cause in causes:
        if isinstance(cause, PermissionError):
            return AutotuneError(f"the data cannot be read: {cause}", hint="give this user the right to read it")
    if isinstance(error, datasets.exceptions.DatasetNotFoundError | ConnectionError):
        return AutotuneError(
            f"the data {named} is neither here nor to be had from the hub: {error}",
            hint="check the name; without a network only local data and data that was loaded before can be used "
            "(for a private or gated set run `hf auth login`)",
        )
    if isinstance(error, FileNotFoundError):
        return AutotuneError(f"the data is not there: {error}", hint=f"relative paths are looked up in `{Path.cwd()}`")
    if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
        return _no_rows(job)
    if isinstance(error, ValueError) and "split" in str(error).lower():
        return AutotuneError(f"the data has no such split: {error}", hint="check `split` in `datasets:`")
    broken = _first_broken_line(job)
    if broken is not None:
        return broken
    files = [name for _, found in _sources(job) for name in found]
    if files and not any(Path(name).stat().st_size for name in files):
        return _no_rows(job)
    last = next((str(cause) for cause in reversed(causes) if str(cause)), repr(error))
    return AutotuneError(
        f"the data {named} cannot be read: {type(causes[-1]).__name__}: {last[:300]}",
        hint="`datasets.load_dataset` says the same about it; check the file",
    )


def _first_broken_line(job: Mapping[str, Any]) -> AutotuneError | None:
    for _, files in _sources(job):
        for name in files:
            if LOADERS.get(Path(name).suffix) == "json":
                reason = _broken_line(Path(name))
                if reason is not None:
                    return AutotuneError(f"`{name}`, {reason}", hint="mend or remove that line; each holds one object")
    return None


def _broken_line(path: Path) -> str | None:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if number == 1 and _is_one_value(path):  # an array or an object over many lines, not JSON lines
                    return None
                return f"line {number} is not JSON ({error})"
            if not isinstance(row, dict) and not (number == 1 and isinstance(row, list)):
                return f"line {number} is a JSON {type(row).__name__}, not an object"
    return None


def _is_one_value(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True
