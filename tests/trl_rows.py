"""Jobs on a few rows, and those rows as TRL's own trainers prepare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import trl

from autotune.probe.lengths import Lengths
from tests import tiny

SFT_OPTIONS = ("assistant_only_loss", "completion_only_loss", "eos_token", "chat_template_path", "dataset_text_field")


def job_of(model: Path, rows: list[dict[str, Any]] | str, folder: Path, **options: Any) -> dict[str, Any]:
    """A job on these rows, or on a file with this text, named by a path relative to the job's folder."""
    if isinstance(rows, str):
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    else:
        tiny.write_rows(folder / "rows.jsonl", rows)
    return {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": "rows.jsonl"}],
        "dataset_train_split": "train",
    } | options


def by_the_trainer(job: Mapping[str, Any], folder: Path) -> dict[str, list[Any]]:
    """`input_ids` and `labels` that TRL's own trainer would train on."""
    data = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    arguments = trl.SFTConfig(
        output_dir=str(folder / "out"),
        max_length=None,
        use_cpu=True,
        bf16=False,
        report_to="none",
        **{name: job[name] for name in SFT_OPTIONS if name in job},
    )
    trainer = trl.SFTTrainer(model=job["model_name_or_path"], args=arguments, train_dataset=data)
    columns: dict[str, list[Any]] = trainer.train_dataset[:]
    return columns


def check_against_the_trainer(lengths: Lengths, columns: Mapping[str, list[Any]]) -> None:
    bearing = [[place for place, label in enumerate(row) if label != -100] for row in columns["labels"]]
    assert list(lengths.tokens) == [len(row) for row in columns["input_ids"]]
    assert list(lengths.first_loss) == [row[0] if row else -1 for row in bearing]
    assert list(lengths.last_loss) == [row[-1] if row else -1 for row in bearing]
    assert list(lengths.loss_tokens) == [len(row) for row in bearing]
