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


def make_models(request: dict[str, Any], _folder: Path) -> list[str]:
    """Write tiny models with random weights into `folder`: one with full attention, two whose layers carry state."""
    import torch
    from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig, Qwen3Config

    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    configs = {
        "qwen3": Qwen3Config(**size, **heads, head_dim=16),
        "mamba": MambaConfig(**size, state_size=8),
        "lfm2": Lfm2Config(**size, **heads, layer_types=["conv", "full_attention"]),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(request["folder"]) / name)
    return list(configs)


def check_with_blind_attention(request: dict[str, Any], folder: Path) -> Any:
    """The document check with an attention that is causal over the whole row: nobody tells it where documents begin."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from autotune.trial.document_check import check

    def blind(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **rest: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **rest | {"is_causal": True})

    AttentionInterface.register("blind", blind)
    AttentionMaskInterface.register("blind", lambda *_arguments, **_options: None)
    return check(request, folder)


def refused(request: dict[str, Any], folder: Path) -> list[dict[str, str] | None]:
    """For each of `runs`, options of `trl sft`, who refuses a training on documents of these `lengths`: the `config`,
    the `trainer` or the `training`, and with what words; None where it trains."""
    return [_refusal(request["model"], request["lengths"], options, folder) for options in request["runs"]]


def _refusal(model: str, lengths: list[int], options: dict[str, Any], folder: Path) -> dict[str, str] | None:
    import datasets
    import trl

    datasets.disable_progress_bars()
    documents = [[1 + number] * length for number, length in enumerate(lengths)]
    of_model = {name: options[name] for name in ("use_peft", "lora_target_modules") if name in options}
    where = "config"
    try:
        options = {name: value for name, value in options.items() if name not in of_model}
        args = trl.SFTConfig(output_dir=str(folder / "out"), **(FIXED | {"max_steps": 1} | options))
        where = "trainer"
        trainer = trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
            peft_config=trl.get_peft_config(trl.ModelConfig(**of_model)),
        )
        where = "training"
        trainer.train()
    except Exception as error:
        return {"where": where, "error": f"{type(error).__name__}: {error}"}
    return None


def parse_all_elsewhere(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """As `parse_all`, as TRL would on another machine (`seen`: `as_torch_sees`)."""
    from autotune.job_elsewhere import pretend

    pretend(request["seen"])
    return parse_all(request, folder)


def trained_dtypes(request: dict[str, Any], folder: Path) -> list[str]:
    """The precision of what trains, with LoRA on the model of `request` loaded as `dtype`."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    trainer = trl.SFTTrainer(
        model=request["model"],
        args=trl.SFTConfig(output_dir=str(folder / "out"), model_init_kwargs={"dtype": request["dtype"]}, **FIXED),
        train_dataset=datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]}),
        peft_config=trl.get_peft_config(trl.ModelConfig(use_peft=True)),
    )
    return sorted({str(one.dtype) for one in trainer.model.parameters() if one.requires_grad})


def train_adapters(request: dict[str, Any], folder: Path) -> list[list[float]]:
    """As `train`, with LoRA without dropout on documents of these `lengths`."""
    import datasets
    import transformers
    import trl

    datasets.disable_progress_bars()
    documents = [[1 + number] * length for number, length in enumerate(request["lengths"])]
    answers = []
    for options in request["runs"]:
        transformers.set_seed(0)
        trainer = trl.SFTTrainer(
            model=request["model"],
            args=trl.SFTConfig(output_dir=str(folder / "out"), **(FIXED | options)),
            train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
            peft_config=trl.get_peft_config(trl.ModelConfig(use_peft=True, lora_dropout=0.0)),
        )
        trainer.train()
        answers.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return answers
