"""What tests ask of TRL itself. These run in children: the test process imports no trainer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def parse_all(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Parse each of `configs` as `trl sft --config` does: every field, and what is left for `accelerate launch`."""
    script = importlib.import_module("trl.scripts.sft")
    return [_parse(script.make_parser(), text, folder / "config.yaml") for text in request["configs"]]


def _parse(parser: Any, text: str, path: Path) -> dict[str, Any]:
    path.write_text(text)
    with _without_exit(parser):
        *configs, remaining = parser.parse_args_and_config(["--config", str(path)], return_remaining_strings=True)
    fields = {
        field.name: _plain(getattr(config, field.name))
        for config in configs
        for field in dataclasses.fields(config)
        if field.init
    }
    return {"fields": fields, "launcher": remaining}


@contextlib.contextmanager
def _without_exit(parser: argparse.ArgumentParser) -> Iterator[None]:
    def refuse(message: str) -> None:
        raise ValueError(message)

    parser.error = refuse  # type: ignore[method-assign,assignment]
    yield


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    return str(value)


def train(request: dict[str, Any], folder: Path) -> list[list[float]]:
    """Train the model of `request` with each of `runs` (options of SFTConfig and the `lengths` of the documents):
    the loss of each optimizer step."""
    answers = []
    for options in request["runs"]:
        trainer = _trainer(request["model"], options, folder)
        trainer.train()
        answers.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return answers


def batches(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The rows that TRL would train on in each of `runs`, as for `train`: their number, and the documents of each
    optimizer step by number."""
    answers = []
    for options in request["runs"]:
        trainer = _trainer(request["model"], options, folder)
        micro_batches = [_documents(inputs) for inputs in trainer.get_train_dataloader()]
        accumulation = trainer.args.gradient_accumulation_steps
        steps = [
            sorted(itertools.chain(*micro_batches[start : start + accumulation]))
            for start in range(0, len(micro_batches), accumulation)
        ]
        answers.append({"rows": len(trainer.train_dataset), "steps": steps})
    return answers


def _trainer(model: str, options: dict[str, Any], folder: Path) -> Any:
    import datasets
    import torch
    import transformers
    import trl

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    documents = [[1 + number] * length for number, length in enumerate(options.pop("lengths"))]
    transformers.set_seed(0)
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder / "out"), **(FIXED | options)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
    )


FIXED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "num_train_epochs": 1,
}


def _documents(inputs: Mapping[str, Any]) -> list[int]:
    """The documents of a micro-batch: each is its number + 1, repeated."""
    return [int(token) - 1 for token in inputs["input_ids"].unique() if token > 0]
