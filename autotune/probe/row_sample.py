"""The child's side of writing rows of the job's data to a file, for trials to train on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.probe import training_data
from autotune.probe.measuring import need_no_gpu


def write(request: Mapping[str, Any], folder: Path) -> int:
    """The child's side of `sample_rows`: the number of rows written."""
    import datasets

    need_no_gpu()
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
