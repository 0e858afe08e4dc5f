"""In what precision an online method generates: vLLM computes in the dtype that the trainer computes in."""

from __future__ import annotations

from collections.abc import Collection

from autotune.plan.space import Axis, Choice, Grade, Rejected, offered
from autotune.probe.machine import AMPERE, Machine

ONLINE_METHODS = ("grpo", "rloo", "online_dpo")

# vLLM's name for each precision (`--dtype`)
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}

# Where the two differ, the log-probabilities that vLLM sampled with are not those that the trainer computes, and the
# update is off-policy by that gap: TRL passes vLLM no dtype of its own in colocate mode (TRL 1.16,
# `generation/vllm_generation.py`), so the checkpoint's would decide.
SAME = "vLLM computes in the dtype of the trainer, so that its log-probabilities are the trainer's but for rounding"
NARROWER = "10 bits of mantissa instead of bf16's 7 narrow the gap between the trainer's log-probabilities and vLLM's"
WIDER = "the range of float32 needs no scaling of the loss; 7 bits of mantissa instead of fp16's 10 widen the gap"
EMULATED = "older than Ampere, which is the first with bf16; torch would emulate it, and vLLM refuses it"


def vllm_dtype_axis(method: str, machine: Machine, allowed: Collection[Grade]) -> Axis | None:
    """The axis `vllm_dtype` of an online method on this machine; None for a method that does not generate.

    The first choice is the precision that the machine's jobs train in. The other half precision is another rounding
    of the trainer as well: grade rounded. The weakest GPU decides.
    """
    if method not in ONLINE_METHODS:
        return None
    base = machine.precision.value
    choices = [Choice(VLLM_DTYPES[base], "exact", f"{SAME}; {machine.precision.reason}")]
    rejected: list[Rejected] = []
    for precision, reason in (("fp16", NARROWER), ("bf16", WIDER)):
        if precision == base:
            continue
        missing = _missing(precision, machine)
        if missing is not None:
            rejected.append(Rejected(VLLM_DTYPES[precision], missing))
        else:
            choices.append(Choice(VLLM_DTYPES[precision], "rounded", f"{reason}; trainer and vLLM alike"))
    inside, outside = offered(choices, allowed=allowed)
    return Axis("vllm_dtype", tuple(inside), (*rejected, *outside))


def _missing(precision: str, machine: Machine) -> str | None:
    """Why the machine cannot train in this half precision; None where it can."""
    if machine.backend == "cpu":
        if precision == "fp16":  # accelerate 1.15, `accelerator.py`: no autocast, and no word of it
            return "on a CPU fp16 is silently float32"
        return None if machine.cpu.bf16 else "this CPU has no bf16 arithmetic"
    if machine.backend != "cuda":
        return f"not known on {machine.backend}"
    told = [gpu.compute_capability for gpu in machine.gpus if gpu.compute_capability is not None]
    if not told or len(told) < len(machine.gpus):
        return "the driver does not tell the compute capability of every GPU"
    weakest = min(told)
    if precision == "bf16" and weakest < AMPERE:
        return f"compute capability {weakest[0]}.{weakest[1]} is {EMULATED}"
    return None
