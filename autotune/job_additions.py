"""What a job is given beside its own options so that it runs on the machine at hand, or on the one asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.errors import AutotuneError

# TRL's default is bf16, which torch accepts below Ampere too and emulates (transformers 5.22,
# `is_torch_bf16_gpu_available`)
PRECISION_OPTIONS: dict[str | None, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "float32": {"bf16": False},
}


def needed_here(
    given: dict[str, Any], *, accelerator: bool, cpu_bf16: bool, precision: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The smallest change to what is `given`, with reasons, that a job needs to start without a GPU, not to be emulated
    on an old one, or to compute in what was asked for beside it.

    `precision` is what to compute in where the job does not say, with the reason. Raises AutotuneError for bf16 that
    the CPU does not have.
    """
    says_nothing = "bf16" not in given and "fp16" not in given
    chosen, why = precision or (None, "")
    computes = PRECISION_OPTIONS.get(chosen, {}) if says_nothing else {}
    reasons = dict.fromkeys(computes, why)
    if accelerator:
        return computes, reasons
    if not cpu_bf16 and given.get("bf16") in (True, "true", "True"):
        raise AutotuneError(
            "the job asks for `bf16: true` and this CPU has no bf16 arithmetic",
            hint="write `bf16: false`, or tune on the machine that will train",
        )
    if "use_cpu" in given:
        return computes, reasons
    additions: dict[str, Any] = {"use_cpu": True, **computes}
    reasons = {"use_cpu": "no GPU here: TRL refuses to start without it", **reasons}
    if not cpu_bf16 and says_nothing and not computes:
        additions["bf16"] = False
        reasons["bf16"] = "this CPU has no bf16 arithmetic; float32"
    return additions, reasons
