"""Which of several GPUs a job uses: one, by which alone precision, attention and memory are judged."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.probe.facts import Problem
from autotune.probe.gpu import Gpu, GpuProcess

LITTLE_BYTES = 256 * 2**20  # a display, or an MPS server that waits; a process that computes holds more
# What no process accounts for and is still no sign of one: the driver keeps 0.6 GiB of an 80 GiB card for itself.
UNSEEN_BYTES, UNSEEN_SHARE = 2 * 2**30, 0.05
SHARING_RAM = ("GB10", "Tegra", "Orin", "Thor", "Xavier", "Jetson")  # GPUs without memory of their own, by name

NO_NAME = "NVIDIA GPU"  # of a card that does not tell its own
WRONG_BESIDE = "figures are wrong beside other work"
ONE_SLICE = "CUDA gives a process one MIG slice"  # NVIDIA MIG user guide, "CUDA device enumeration"


def used_gpu(gpus: Sequence[Gpu]) -> Gpu | None:
    """The first of the GPUs, in CUDA's order; or where others are on it, the first that is like it and free."""
    if not gpus:
        return None
    if busy(gpus[0]) is None:
        return gpus[0]
    return next((gpu for gpu in gpus if _alike(gpu, gpus[0]) and busy(gpu) is None), gpus[0])


def used_line(gpus: Sequence[Gpu], *, there: bool = False) -> str | None:
    """Which GPU is used of several, and why; None where there is no choice."""
    used = used_gpu(gpus)
    if used is None or len(gpus) < 2:
        return None
    where = "there" if there else "here"
    slices = sum(gpu.mig is not None for gpu in gpus)
    if slices == len(gpus):
        which = "the first is used" if used is gpus[0] else f"one is used, `{used.uuid}`"
        return f"{slices} MIG slices are {where} and {which}: {ONE_SLICE}"
    why = "" if used is gpus[0] else f" since GPU {gpus[0].index} is in use and this one is like it and free"
    return f"{len(gpus)} GPUs are {where} and one is used, {_named(used)}{why}: several are not tuned yet"


def mixed(gpus: Sequence[Gpu]) -> Problem | None:
    """The problem of GPUs that are not alike."""
    used = used_gpu(gpus)
    others = {} if used is None else {gpu.name: gpu for gpu in gpus if _differs(gpu, used)}
    if used is None or not others:
        return None
    choices = " and ".join(f"`--gpus {option(gpu)}` chooses {name}" for name, gpu in others.items())
    return Problem(what=f"the GPUs are not alike, and {_named(used)}, is the one that is used", hint=choices)


def busy(gpu: Gpu, *, own_bytes: int = 0, shares_ram: bool = False) -> str | None:
    """By what else a GPU is in use, in words; None where by nothing that holds more than a display does.

    `own_bytes` are held by this process and its relatives; of a GPU that `shares_ram` memory tells nothing.
    """
    used_bytes = gpu.memory_bytes - gpu.free_bytes
    holders = [
        process
        for process in gpu.processes
        if (used_bytes if process.memory_bytes is None else process.memory_bytes) > LITTLE_BYTES
    ]
    where = f"GPU {gpu.index} ({gpu.name})"
    if holders:
        return f"{where} is in use by {', '.join(_holder(process) for process in holders)}"
    shares_ram = shares_ram or any(name in gpu.name for name in SHARING_RAM)
    unseen = used_bytes - own_bytes - sum(process.memory_bytes or 0 for process in gpu.processes)
    if not shares_ram and unseen > max(UNSEEN_BYTES, UNSEEN_SHARE * gpu.memory_bytes):
        return f"{unseen / 2**30:.1f} GiB of {where} are in use by nothing that is seen here"
    return None


def busy_problem(gpu: Gpu, gpus: Sequence[Gpu], *, own_bytes: int = 0, shares_ram: bool = False) -> Problem | None:
    """The problem of a GPU that others use, with a free one of `gpus` as the way out."""
    what = busy(gpu, own_bytes=own_bytes, shares_ram=shares_ram)
    if what is None:
        return None
    free = next((one for one in gpus if one is not gpu and _alike(one, gpu) and busy(one) is None), None)
    unseen = "" if gpu.processes else "see `nvidia-smi` outside the container; "
    if free is None:
        wait = "wait for it, or tune on another GPU with `--gpus`: " if gpu.processes else ""
        return Problem(what=what, hint=f"{unseen}{wait}{WRONG_BESIDE}")
    instead = ", and is used instead" if free is used_gpu(gpus) and gpu is gpus[0] else ""
    return Problem(
        what=what,
        hint=f"{unseen}{_named(free)}, is like it and free{instead}; `--gpus {option(free)}` names it: {WRONG_BESIDE}",
    )


def option(gpu: Gpu) -> str:
    """A GPU as `--gpus` takes it: a MIG slice by its UUID."""
    return str(gpu.index) if gpu.mig is None else gpu.uuid


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index}, {gpu.name}"


def _alike(gpu: Gpu, other: Gpu) -> bool:
    return (gpu.name, gpu.compute_capability, gpu.mig) == (other.name, other.compute_capability, other.mig)


def _differs(gpu: Gpu, other: Gpu) -> bool:
    """Whether two GPUs are told to be of different kinds; what is not told is no difference."""
    names = {gpu.name, other.name} - {NO_NAME}
    capabilities = {gpu.compute_capability, other.compute_capability} - {None}
    return len(names) > 1 or len(capabilities) > 1


def _holder(process: GpuProcess) -> str:
    program = (process.name or "").split()[:1]  # some tell a whole command line, which may hold secrets
    name = f"`{program[0].rpartition('/')[2]}`" if program else "a process"
    number = "" if process.pid is None else f" (pid {process.pid})"
    size = "" if process.memory_bytes is None else f" with {process.memory_bytes / 2**30:.1f} GiB"
    return f"{name}{number}{size}"
