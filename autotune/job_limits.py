"""Jobs that cannot be tuned: what is not built yet, and what TRL would fail on later, said at once."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, NotYetError

# The least that each number can be. TRL and transformers take less without a word, and fail on it later, when they
# divide by it, cut rows with it or start processes (trl 1.16, transformers 5.22)
LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("eval_accumulation_steps", "dataloader_prefetch_factor", "dataset_num_proc"), 1),
    **dict.fromkeys(("max_length", "max_prompt_length", "max_completion_length", "max_new_tokens"), 1),
    **dict.fromkeys(("eval_max_length", "pad_to_multiple_of", "vllm_max_model_length"), 1),
    **dict.fromkeys(("generation_batch_size", "steps_per_generation", "num_iterations"), 1),
    **dict.fromkeys(("num_generations", "num_generations_eval"), 1),
    **dict.fromkeys(("dataloader_num_workers", "seed", "data_seed", "learning_rate", "num_train_epochs"), 0),
    "max_steps": -1,  # -1 is none
}
MOST_COUNT = 2**31 - 1  # what a 32-bit integer holds; torch takes seeds of 64 bits


def check_number(name: str, value: Any, place: str = "") -> None:
    """Refuse a number that the option `name` cannot be; `place` says where it stands. Raises AutotuneError."""
    if name not in LEAST or isinstance(value, bool) or not isinstance(value, int | float):
        return
    least = LEAST[name]
    most = 2**64 - 1 if name in ("seed", "data_seed") else MOST_COUNT
    if not least <= value <= most:  # not a number is neither
        shown = (
            f"{value:.3g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "a number so long"
        )
        reach = f"{least} or more" if value < least or math.isnan(value) else f"{most} or less"
        raise AutotuneError(f"{place}`{name}` cannot be {shown}", hint=f"give it {reach}")


def refuse_not_yet(resolved: dict[str, Any], launch: argparse.Namespace) -> None:
    several = launch.multi_gpu or launch.tpu or launch.use_megatron_lm
    if launch.use_deepspeed or resolved.get("deepspeed"):
        raise NotYetError(
            "jobs with DeepSpeed are not tuned yet", hint="tune without it on one GPU, then add it to the tuned config"
        )
    if launch.use_fsdp or resolved.get("fsdp"):
        raise NotYetError(
            "jobs with FSDP are not tuned yet", hint="tune without it on one GPU, then add it to the tuned config"
        )
    # accelerate starts one process for `distributed_type: NO`, whatever number of processes its config file names
    asked = "num_processes" in getattr(launch, "nondefault", ()) and (launch.num_processes or 0) > 1
    if (several and (launch.num_processes or 0) != 1) or asked or (launch.num_machines or 1) > 1:
        raise NotYetError(
            "jobs of several processes are not tuned yet",
            hint="give `--num_processes 1`, and choose the GPU with CUDA_VISIBLE_DEVICES",
        )
    for name in ("dataset_streaming", "streaming"):
        if resolved.get(name):
            raise NotYetError(
                f"jobs with `{name}: true` are not tuned yet: the lengths of all rows must be known",
                hint=f"write `{name}: false`",
            )


def check_model_and_data(resolved: dict[str, Any]) -> None:
    """Say at once what TRL says after it has loaded everything else. The working folder is the job's."""
    model = resolved.get("model_name_or_path")
    if not model:
        raise AutotuneError("no model is given", hint="add `model_name_or_path`, a folder or a name on the Hub")
    if not resolved.get("dataset_name") and not resolved.get("datasets"):
        raise AutotuneError("no data is given", hint="add `dataset_name`, or `datasets` with `path` and `data_files`")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
            raise AutotuneError(
                f"the folder `{model}` holds no model: there is no `config.json` in it",
                hint="give the folder that `save_pretrained` wrote, such as its `checkpoint-500`",
            )
    elif model.startswith("~"):
        raise AutotuneError(f"`{model}` is taken as it is: TRL does not expand `~`", hint="write the whole path")
    elif model.startswith((".", "/")):
        what = "is a file" if path.exists() else "does not exist"
        raise AutotuneError(
            f"the model folder `{model}` {what}",
            hint=f"relative paths start from `{Path.cwd()}`; give a model's folder",
        )


def check_packing(resolved: dict[str, Any]) -> None:
    """Say at once what TRL's trainer says when model and data are loaded (trl 1.16, `SFTTrainer`)."""
    if resolved.get("packing") and resolved.get("max_length") is None:
        raise AutotuneError(
            "`packing: true` needs a `max_length`, and yours is null: TRL refuses to start",
            hint="write how long a packed row may be, as `max_length: 1024`",
        )
    if resolved.get("padding_free") and not resolved.get("packing") and resolved.get("max_length") is not None:
        raise AutotuneError(
            f"`padding_free: true` with `max_length: {resolved['max_length']}`, which TRL refuses without `packing`",
            hint="write `max_length: null`, or `packing: true`",
        )


def weights_dtype(resolved: dict[str, Any], checkpoint_dtype: str | None) -> str | None:
    """The dtype that a job's weights are held in; `auto` leaves the checkpoint's, None where that is not told."""
    asked = (resolved.get("model_init_kwargs") or {}).get("dtype", resolved.get("dtype"))
    return checkpoint_dtype if asked == "auto" else None if asked is None else str(asked).removeprefix("torch.")


def unscalable(resolved: dict[str, Any], checkpoint_dtype: str | None) -> str | None:
    """What fp16 autocast would say in the first optimizer step on a GPU, None where it runs.

    It scales the loss, and its scaler takes no gradients in half precision: it refuses those in float16 (torch 2.13,
    `amp/grad_scaler.py`, `unscale_`) and on CUDA has had no kernel for those in bfloat16, as users of torch 2 report
    in these words; not tried with 2.13 on a GPU, and on a CPU it does have one. PEFT keeps its adapters in float32.
    """
    if resolved.get("use_cpu") or resolved.get("use_peft"):
        return None
    return {
        "float16": "Attempting to unscale FP16 gradients",
        "bfloat16": "not implemented for 'BFloat16'",
    }.get(weights_dtype(resolved, checkpoint_dtype) or "")


def check_half_weights(resolved: dict[str, Any], *, checkpoint_dtype: str | None) -> None:
    """Say at once what the first optimizer step on a GPU says to fp16 autocast over weights in half precision."""
    says = unscalable(resolved, checkpoint_dtype)
    if not resolved.get("fp16") or says is None:
        return
    inside = resolved.get("model_init_kwargs") or {}
    asked = inside.get("dtype", resolved.get("dtype"))
    shown = f"model_init_kwargs: {{dtype: {asked}}}" if "dtype" in inside else f"dtype: {asked}"
    held = weights_dtype(resolved, checkpoint_dtype)
    of_model = f", which is {held} for this model" if asked == "auto" else ""
    raise AutotuneError(
        f'`fp16: true` with `{shown}`{of_model}, which fails in the first step on a GPU: "{says}"',
        hint="leave `dtype` at float32, TRL's default: the arithmetic is fp16 all the same",
    )
