"""Micro-batches as TRL's own trainers make them. These run in children: the test process imports no trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIXED: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}


def preferences(request: dict[str, Any], folder: Path) -> list[dict[str, int]]:
    """The micro-batches of a pass of dpo, reward or kto over `rows`, in their order."""
    import datasets
    import trl
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    datasets.disable_progress_bars()
    configs = {"dpo": trl.DPOConfig, "reward": trl.RewardConfig, "kto": trl.KTOConfig}
    trainers = {"dpo": trl.DPOTrainer, "reward": trl.RewardTrainer, "kto": trl.KTOTrainer}
    method = request["method"]
    model = request["model"]
    if method == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer = trainers[method](
        model=model,
        args=configs[method](
            output_dir=str(folder / "out"), train_sampling_strategy="sequential", **FIXED, **request["options"]
        ),
        train_dataset=datasets.Dataset.from_list(request["rows"]),
        processing_class=AutoTokenizer.from_pretrained(request["model"]),
    )
    return [_counted(inputs) for inputs in trainer.get_train_dataloader()]


def _counted(inputs: Any) -> dict[str, int]:
    parts = [prefix for prefix in ("", "KL_") if f"{prefix}input_ids" in inputs]
    masks = [inputs[f"{prefix}attention_mask"] for prefix in parts]
    return {
        "sequences": len(inputs["input_ids"]),
        "positions": sum(mask.numel() for mask in masks),
        "tokens": sum(int(mask.sum()) for mask in masks),
        "loss_tokens": int(inputs["completion_mask"].sum()) if "completion_mask" in inputs else 0,
    }


def prompts(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What GRPO or RLOO make of each generation batch of an unshuffled pass, and the pass's optimizer steps."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    config, kind = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[
        request["method"]
    ]
    trainer = kind(
        model=request["model"],
        reward_funcs=lambda completions, **_rest: [0.0] * len(completions),
        args=config(output_dir=str(folder / "out"), shuffle_dataset=False, **FIXED, **request["options"]),
        train_dataset=datasets.Dataset.from_list(request["rows"]),
    )
    loader = trainer.get_train_dataloader()
    repeats = trainer.args.steps_per_generation * trainer.num_iterations
    made = []
    for number, batch in enumerate(loader):
        if number % repeats == 0:
            inputs = trainer._generate_and_score_completions(batch)
            made.append({"width": inputs["prompt_ids"].shape[1], "tokens": inputs["prompt_mask"].sum(dim=1).tolist()})
    return {"batches": made, "steps": -(-len(loader) // trainer.args.gradient_accumulation_steps)}
