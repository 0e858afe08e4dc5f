"""The axes of an SFT job: what may be chosen on this machine for this data, with grade and reason."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from autotune.job import Job, effective
from autotune.plan import rules
from autotune.plan.arrangements import arrangement_axis
from autotune.plan.axes_arithmetic import compile_axis, dtype_axis, layer_kernels_axis, optimizer_axis, tf32_axis
from autotune.plan.axes_data import pin_memory_axis, prefetch_axis, threads_axis, workers_axis
from autotune.plan.axes_memory import activation_offloading_axis, checkpointing_axis
from autotune.plan.data import Data
from autotune.plan.recipe import ATTENTION_DEFAULT, checkpointing_mode
from autotune.plan.space import Arrangement, Axis, Candidate, Choice, Grade, Rejected, Space
from autotune.probe.attention_names import CONTAMINATES, VARIABLE
from autotune.probe.machine import AttentionBackend, Machine

MIXES = "mixes the documents"

# What matters little: tried beside the job's own settings of each other
MINOR = ("prefetch", "pin_memory")


def baseline_candidate(job: Job, machine: Machine) -> Candidate:
    """The job exactly as the user gave it."""
    resolved = job.resolved
    sampling = resolved["train_sampling_strategy"]
    if resolved["packing"]:
        name: Any = resolved["packing_strategy"]
    else:
        name = "batch_rebalance" if sampling == "batch_rebalance" else "padded"
    others = {axis.name: axis.choices[0].value for axis in _own_axes(job, machine, ())}
    return Candidate(
        arrangement=Arrangement(
            name,
            resolved["per_device_train_batch_size"],
            resolved["gradient_accumulation_steps"],
            resolved["max_length"] if resolved["packing"] else None,
            padding_free=bool(resolved.get("padding_free")),
        ),
        attention=effective(job, "attn_implementation") or ATTENTION_DEFAULT,
        checkpointing=checkpointing_mode(resolved),
        workers=resolved["dataloader_num_workers"],
        threads=int(job.launch_environment.get("OMP_NUM_THREADS", "1")) if machine.backend == "cpu" else None,
        **others,
    )


def build_space(job: Job, machine: Machine, data: Data, *, allowed: Collection[Grade]) -> Space:
    """All that may be tried for the job on this machine."""
    baseline = baseline_candidate(job, machine)
    varying = [one.name for one in machine.attention if one.usable and one.packing == VARIABLE]
    axes = [
        arrangement_axis(job, data, baseline.arrangement, allowed, variable_lengths=varying),
        _attention(machine, baseline.attention),
        checkpointing_axis(job, machine),
        workers_axis(machine, baseline.workers),
    ]
    if baseline.threads is not None:
        axes.append(threads_axis(machine, baseline.threads))
    axes += _own_axes(job, machine, allowed)
    divided, apart = rules.divide(job, baseline, axes)
    mixing = tuple(backend.name for backend in machine.attention if backend.usable and _mixes(backend))
    return Space(
        baseline,
        divided,
        data.tokens_per_step(baseline.arrangement),
        mixing=mixing,
        mixing_allowed="changed" in allowed,
        unusable=tuple(one.name for one in machine.attention if one.name == baseline.attention and not one.usable),
        apart=apart,
        minor=MINOR,
    )


def _own_axes(job: Job, machine: Machine, allowed: Collection[Grade]) -> list[Axis]:
    """Those that look at job and machine alone, each with the job's own value first."""
    kernels = layer_kernels_axis(job, machine)
    axes = [
        *([] if kernels is None else [kernels]),
        compile_axis(job, machine),
        activation_offloading_axis(job, machine),
        optimizer_axis(job, machine, allowed),
        dtype_axis(job, machine, allowed),
    ]
    if machine.backend != "cpu":
        axes += [prefetch_axis(job), pin_memory_axis(job)]
    return [*axes, tf32_axis(job, machine, allowed)] if machine.backend == "cuda" else axes


def _mixes(backend: AttentionBackend) -> bool:
    """Whether it lets the documents of a packed row see each other: that changes what is learnt."""
    return backend.packing == CONTAMINATES


def _attention(machine: Machine, base: str) -> Axis:
    broken = next((one.reason for one in machine.attention if one.name == base and not one.usable), None)
    own = "as your job has it"
    choices = [Choice(base, "exact", own if broken is None else f"{own}, and it cannot run here: {broken}")]
    rejected = [] if broken is None else [Rejected(base, f"cannot run here: {broken}; tried as your job has it only")]
    for backend in machine.attention:
        if backend.name == base:
            continue
        if backend.usable and _mixes(backend):
            choices.append(
                Choice(backend.name, "exact", f"{backend.reason}; for padded rows: of packed ones it {MIXES}")
            )
        elif backend.usable:
            choices.append(Choice(backend.name, "exact", f"{backend.reason}; packed rows: {backend.packing}"))
        else:
            rejected.append(Rejected(backend.name, backend.reason))
    return Axis("attention", tuple(choices), tuple(rejected))
