"""TRL's parser on behalf of a machine that is not here: transformers' own checks are told what that machine has."""

from __future__ import annotations

from typing import Any


def pretend(seen: dict[str, bool]) -> None:
    """Answer for the machine asked about wherever `TrainingArguments` looks at the hardware while it is made.

    `seen` is `autotune.probe.machine.as_torch_sees`. The call sites are those of transformers 5.22.2,
    `training_args.py`: bf16 in `_validate_args`, TF32 and the wording of its refusal in `__post_init__`. Devices are
    asked of torch, which sees none: a what-if runs in an environment that hides them. For a child that ends with its
    answer, since nothing is put back.
    """
    from transformers import training_args

    answers: dict[str, Any] = {
        "is_torch_cuda_available": seen["cuda"],
        "is_torch_bf16_gpu_available": seen["bf16"],
        "is_torch_tf32_available": seen["tf32"],
    }
    for name, answer in answers.items():
        getattr(training_args, name)  # a release that asks elsewhere must fail here, not plan for this machine
        setattr(training_args, name, lambda answer=answer: answer)
