"""In what precision a job's attention computes, and in what an online method generates: vLLM computes in the dtype
that the trainer computes in."""

from __future__ import annotations

from collections.abc import Collection

from autotune.job import Job
from autotune.job_limits import weights_dtype
from autotune.plan.space import Axis, Choice, Grade, Rejected, offered
from autotune.probe.machine import AMPERE, Machine
from autotune.probe.model import ModelShape
from autotune.probe.used import used_gpu

ONLINE_METHODS = ("grpo", "rloo", "online_dpo")

# vLLM's name for each precision (`--dtype`)
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}

OF_WEIGHTS = {dtype: precision for precision, dtype in VLLM_DTYPES.items()}

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
    of the trainer as well: grade rounded. The GPU that is used decides.
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
    used = used_gpu(machine.gpus)
    if used is None or used.compute_capability is None:
        return "the driver does not tell the compute capability of the GPU"
    if precision == "bf16" and used.compute_capability < AMPERE:
        return f"compute capability {used.compute_capability[0]}.{used.compute_capability[1]} is {EMULATED}"
    return None


def attention_precision(job: Job, model: ModelShape) -> str:
    """What the job's attention computes in: `bf16`, `fp16` or `float32`.

    Autocast's dtype where there is autocast, else that of the weights (transformers 5.22.2,
    `integrations/flash_attention.py`, `get_target_dtype`); `dtype: auto` leaves the checkpoint's.
    """
    resolved = job.resolved
    if resolved.get("bf16"):
        return "bf16"
    if resolved.get("fp16"):
        return "fp16"
    return OF_WEIGHTS.get(weights_dtype(resolved, model.dtype) or "", "float32")
