"""Axes of how a step computes: layer kernels, torch.compile, optimizer, dtype of the weights, TF32."""

from __future__ import annotations

from collections.abc import Collection

from autotune.job import Job, effective
from autotune.plan.recipe import computes_in_tf32, uses_layer_kernels
from autotune.plan.space import Axis, Choice, Grade, Rejected, offered
from autotune.probe.machine import AMPERE, Machine

OWN = "as your job has it"

# The same update in the same arithmetic (torch 2.13, `optim/adamw.py`)
ADAMW = ("adamw_torch_fused", "adamw_torch")
EIGHT_BIT = {"adamw_bnb_8bit": "bitsandbytes", "adamw_torch_8bit": "torchao"}

# What a layer kernel computes by itself, so that no adapter is passed by: norms and rotary embeddings have none
WITHOUT_ADAPTERS = ("norm", "rotary")


def layer_kernels_axis(job: Job, machine: Machine) -> Axis | None:
    """Kernels from the hub in place of the model's own layers; None where nobody looked and the job has none.

    Exact as an attention backend is: the same function of the same inputs in the same precision, summed in another
    order; the probe holds logits and gradients against those of plain layers.
    """
    base, kernels = uses_layer_kernels(job), machine.layer_kernels
    if kernels is None and not base:
        return None
    choices, rejected = [Choice(base, "exact", OWN)], []
    if base:
        choices.append(Choice(False, "exact", "the model's own layers"))
    elif kernels is not None:
        missing = kernels.reason if not kernels.usable else _passes_adapters_by(job, kernels.names)
        if missing is not None:
            rejected.append(Rejected(True, missing))
        else:
            choices.append(Choice(True, "exact", f"{', '.join(kernels.names)}: {kernels.reason}"))
    return Axis("layer_kernels", tuple(choices), tuple(rejected))


def _passes_adapters_by(job: Job, names: Collection[str]) -> str | None:
    others = [name for name in names if not any(part in name.lower() for part in WITHOUT_ADAPTERS)]
    if not others or not (job.resolved.get("use_peft") or _quantised(job)):
        return None
    return f"{', '.join(others)} may read weights that your adapters are added to, and was tried without adapters"


def compile_axis(job: Job, machine: Machine) -> Axis:
    """torch.compile of the whole model. Exact since `tf32` stays as the job has it: left unset, transformers would
    switch TF32 on with it (5.22, `training_args.py`)."""
    base = bool(job.resolved.get("torch_compile"))
    choices, rejected = [Choice(base, "exact", OWN)], []
    if base:
        choices.append(Choice(False, "exact", "nothing is compiled; TF32 stays as your job has it"))
    elif machine.backend == "cpu":
        rejected.append(
            Rejected(
                True,
                "on a CPU it compiled twice, 17 to 27 s each on a 2-core one with a 2-layer model, and steps were no "
                "faster afterwards",
            )
        )
    elif machine.backend != "cuda":
        rejected.append(Rejected(True, f"not known on {machine.backend}"))
    elif _quantised(job):
        rejected.append(Rejected(True, "never tried with quantised weights"))
    else:
        choices.append(
            Choice(
                True, "exact", "joins operations into fewer kernels, after two compilations; TF32 as your job has it"
            )
        )
    return Axis("torch_compile", tuple(choices), tuple(rejected))


def optimizer_axis(job: Job, machine: Machine, allowed: Collection[Grade]) -> Axis:
    """AdamW in other implementations; an optimizer of another kind is another training."""
    base = str(job.resolved.get("optim"))
    choices = [Choice(base, "exact", OWN)]
    rejected: list[Rejected] = []
    if base not in ADAMW:
        return Axis("optimizer", tuple(choices))
    if base == "adamw_torch":
        choices.append(Choice("adamw_torch_fused", "exact", "the same update in one kernel"))
    else:
        rejected.append(Rejected("adamw_torch", "the same update in several passes over memory"))
    found: list[Choice] = []
    there = () if machine.abilities is None else machine.abilities.optimizers
    for name, package in EIGHT_BIT.items():
        if machine.backend != "cuda":
            rejected.append(Rejected(name, f"{package} has it for CUDA GPUs"))
        elif job.resolved.get("use_peft"):
            rejected.append(Rejected(name, "the states of adapters are small already"))
        elif name not in there:
            rejected.append(Rejected(name, f"`{package}` is not installed"))
        else:
            found.append(Choice(name, "rounded", "AdamW whose two states are kept in 8 bits, a quarter of the memory"))
    inside, outside = offered(found[:1], allowed=allowed)  # one of them: they hold the same
    return Axis("optimizer", (*choices, *inside), (*rejected, *outside))


def dtype_axis(job: Job, machine: Machine, allowed: Collection[Grade]) -> Axis:
    """The precision that weights are held in; TRL's default is float32 whatever the products are computed in."""
    base = str(effective(job, "dtype") or "float32").removeprefix("torch.")
    choices = [Choice(base, "exact", OWN)]
    if base != "float32":
        return Axis("dtype", tuple(choices))
    missing = _no_half_weights(job, machine)
    if missing is not None:
        return Axis("dtype", tuple(choices), (Rejected("bfloat16", missing),))
    inside, outside = offered([Choice("bfloat16", "rounded", _half_weights(job))], allowed=allowed)
    return Axis("dtype", (*choices, *inside), tuple(outside))


def _no_half_weights(job: Job, machine: Machine) -> str | None:
    if job.resolved.get("fp16"):
        return "your job computes in fp16, and weights in bfloat16 would take part in neither"
    if machine.backend == "cpu":
        return None if machine.cpu.bf16 else "this CPU has no bf16 arithmetic"
    if machine.backend == "mps":
        return "not known on mps"
    told = [gpu.compute_capability for gpu in machine.gpus[:1] if gpu.compute_capability is not None]
    if machine.backend == "cuda" and (not told or min(told) < AMPERE):
        return "this GPU has no bf16 arithmetic"
    return None


def _half_weights(job: Job) -> str:
    if _quantised(job):
        return (
            "what is not quantised, and the products of quantised weights, which are computed in `dtype`; adapters are "
            "bfloat16 anyway"
        )
    if job.resolved.get("use_peft"):
        return "the frozen weights and what is between layers; adapters and their optimizer stay in float32"
    return "half the memory of weights, gradients and optimizer; updates below 1/256 of a weight are lost"


def tf32_axis(job: Job, machine: Machine, allowed: Collection[Grade]) -> Axis:
    """float32 products in TF32, on CUDA GPUs."""
    resolved = job.resolved
    told = machine.gpus[0].compute_capability if machine.gpus else None
    if told is None or told < AMPERE:
        return Axis("tf32", (Choice(False, "exact", OWN),), (Rejected(True, "arithmetic of Ampere and newer"),))
    base = computes_in_tf32(resolved, compiled=bool(resolved.get("torch_compile")))
    choices = [Choice(base, "exact", OWN)]
    if base:
        return Axis("tf32", tuple(choices))
    half = next((name for name in ("bf16", "fp16") if resolved.get(name)), None)
    if half is not None:
        return Axis("tf32", tuple(choices), (Rejected(True, f"your job computes its products in {half} as it is"),))
    found = [Choice(True, "rounded", "float32 products with 10 bits of mantissa instead of 23")]
    inside, outside = offered(found, allowed=allowed)
    return Axis("tf32", (*choices, *inside), tuple(outside))


def _quantised(job: Job) -> bool:
    return bool(job.resolved.get("load_in_4bit") or job.resolved.get("load_in_8bit"))
