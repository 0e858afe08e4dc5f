"""What the user says about the machine instead of the probe: facts that can be wrong, each marked where it is shown."""

from __future__ import annotations

from typing import get_args

import msgspec

from autotune.errors import AutotuneError
from autotune.probe.facts import Fact
from autotune.probe.gpus import chosen_of, gpu_problems
from autotune.probe.machine import GIB, Machine, Precision, choose_precision, judged

SAID = "you said so"


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the user gives; None leaves the probe's. Sizes in bytes."""

    gpu_memory_bytes: int | None = None
    precision: str | None = None
    ram_bytes: int | None = None
    cores: int | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that were given."""
        given = {
            "--gpu-memory": self.gpu_memory_bytes,
            "--precision": self.precision,
            "--ram": self.ram_bytes,
            "--cores": self.cores,
        }
        return tuple(option for option, value in given.items() if value is not None)


def overridden(machine: Machine, overrides: Overrides) -> Machine:
    """The machine with what the user said in place of what was probed, and the names of that in `overridden`.

    Memory of GPUs is bounded, total and free; RAM and cores may also be more than the probe saw. Raises AutotuneError
    for what could have no effect here.
    """
    if overrides.gpu_memory_bytes is not None:
        machine = _with_gpu_memory(machine, overrides.gpu_memory_bytes)
    if overrides.ram_bytes is not None:
        machine = _with_ram(machine, overrides.ram_bytes)
    if overrides.cores is not None:
        if overrides.cores < 1:
            raise AutotuneError(f"`--cores {overrides.cores}` is no number of cores", hint="give 1 or more")
        machine = _marked(machine, "cores", cpu=msgspec.structs.replace(machine.cpu, cores=overrides.cores))
    if overrides.precision is not None:
        machine = _with_precision(machine, overrides.precision)
    return machine


def with_gpus(machine: Machine, asked: str | None) -> Machine:
    """The machine of a file with those of its GPUs that `--gpus` names, `all` or None being all of them.

    Raises AutotuneError where `asked` names none that the file tells of.
    """
    if asked is None or asked == "all":
        return machine
    if not machine.gpus:
        raise AutotuneError(f"`--gpus {asked}` is given and that machine has no GPU", hint="leave it out")
    gpus = chosen_of(machine.gpus, asked)
    of_all = {problem.what for problem in gpu_problems(machine.gpus, ram_bytes=machine.ram_bytes)}
    problems = tuple(problem for problem in machine.problems if problem.what not in of_all)
    precision = machine.precision
    if "precision" not in machine.overridden:
        precision = choose_precision(machine.backend, gpus, machine.cpu)
    return judged(msgspec.structs.replace(machine, gpus=gpus, problems=problems, precision=precision))


def asked_precision(machine: Machine) -> str | None:
    """The precision that the user asked for, None where it is the probe's."""
    return machine.precision.value if "precision" in machine.overridden else None


def precision_to_add(machine: Machine) -> tuple[str, str] | None:
    """What a job that does not say is to compute in, with the reason: what the user asked for, or fp16 where TRL's
    bf16 would be emulated. None leaves it to TRL's default."""
    if asked_precision(machine) is None and (machine.backend == "cpu" or machine.precision.value != "fp16"):
        return None
    return machine.precision.value, machine.precision.reason


def _with_gpu_memory(machine: Machine, size_bytes: int) -> Machine:
    if not machine.gpus:
        raise AutotuneError(
            "`--gpu-memory` is given and there is no GPU here",
            hint="`--ram` and `--memory-limit` bound the memory of a training on the CPU",
        )
    most = max(gpu.memory_bytes for gpu in machine.gpus)
    if size_bytes > most:
        raise AutotuneError(
            f"`--gpu-memory` asks for {size_bytes / GIB:.1f} GiB, and no GPU here has more than {most / GIB:.1f} GiB",
            hint="it can bound what a GPU has, not add to it",
        )
    gpus = tuple(
        msgspec.structs.replace(
            gpu, memory_bytes=min(gpu.memory_bytes, size_bytes), free_bytes=min(gpu.free_bytes, size_bytes)
        )
        for gpu in machine.gpus
    )
    return _marked(machine, "gpu_memory", gpus=gpus)


def _with_ram(machine: Machine, size_bytes: int) -> Machine:
    # what others hold stays held: memory that the probe did not see counts as free
    unseen = max(0, size_bytes - machine.ram_bytes)
    free = min(machine.free_ram_bytes + unseen, size_bytes)
    return _marked(machine, "ram", ram_bytes=size_bytes, free_ram_bytes=free)


def _with_precision(machine: Machine, precision: str) -> Machine:
    known = get_args(Precision)
    if precision not in known:
        raise AutotuneError(
            f"`--precision {precision}` is not known", hint=f"give one of {', '.join(f'`{one}`' for one in known)}"
        )
    if precision == "fp16" and machine.backend == "cpu":
        raise AutotuneError(
            "`--precision fp16` has no effect on a CPU: accelerate trains in float32 there and does not say so",
            hint="give `--precision bf16` or `--precision float32`",
        )
    probed = machine.precision
    if "precision" in machine.overridden:  # a file of a machine about which somebody had said so already
        before = probed.reason.removeprefix(f"{SAID} (").removesuffix(")")
    else:
        before = f"probed: {probed.value}, {probed.reason}"
    return _marked(machine, "precision", precision=Fact(precision, f"{SAID} ({before})"))


def _marked(machine: Machine, name: str, **changes: object) -> Machine:
    marks = tuple(dict.fromkeys((*machine.overridden, name)))
    return msgspec.structs.replace(machine, overridden=marks, **changes)
