"""What machine this is: GPUs, precision, CPU, memory, versions. Runs in the engine and imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import inspect

from autotune.errors import AutotuneError
from autotune.given_file import read_given
from autotune.probe.device_precision import AMPERE, Backend, Precision, choose_precision
from autotune.probe.facts import Fact, Problem
from autotune.probe.gpus import MOST_BYTES, Bytes, Gpu, NvmlReport, gpu_problems, probe_gpus
from autotune.probe.host import Cpu, probe_cpu, probe_memory
from autotune.probe.machine_document import (
    NEW_FILE,
    check_content,
    check_names,
    check_sense,
    field_of,
    named,
    printable,
    wrong_field,
)
from autotune.probe.torch_builds import torch_problems
from autotune.probe.used import used_gpu
from autotune.probe.versions import TorchBuild, kernels_problem, probe_torch_build, probe_versions

__all__ = [
    "AMPERE",
    "Abilities",
    "AttentionBackend",
    "Backend",
    "Cpu",
    "Fact",
    "Gpu",
    "LayerKernels",
    "Machine",
    "Precision",
    "Problem",
    "as_torch_sees",
    "choose_precision",
    "describe",
    "machine_from_json",
    "probe_machine",
    "read_machine",
    "to_json",
]

GIB = 2**30

# What can be overridden, in words
SAID_NAMES = {"gpu_memory": "GPU memory", "ram": "RAM", "cores": "cores"}


class AttentionBackend(msgspec.Struct, frozen=True):
    """An attention implementation by its name in TRL's `attn_implementation`.

    `packing`: what it does with packed documents: `variable length`, `dense mask`, `contaminates` or `unknown`.
    `milliseconds`: forward and backward of the probe; `error`: its logits' distance from sdpa in float32 as a share
    of their spread; `revision`: the hub kernel's. `expected`: judged by what is published, not tried.
    """

    name: str
    usable: bool
    packing: str
    reason: str
    milliseconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    error: Annotated[float, msgspec.Meta(ge=0)] | None = None
    revision: str | None = None
    expected: bool = False


class LayerKernels(msgspec.Struct, frozen=True):
    """Whether `model_init_kwargs: {use_kernels: true}` works here; `names`: the layers that it would replace."""

    usable: bool
    reason: str
    names: tuple[str, ...] = ()


class Abilities(msgspec.Struct, frozen=True):
    """What the installed versions can do. `checkpointing`: `full`, `selective`, `every_n_layers`, `offload`, as far as
    they and the model have them; `optimizers`: 8-bit AdamW by the names of `optim`."""

    checkpointing: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`machine.json` and `doctor --json`; bytes."""

    schema: Literal[1] = 1
    backend: Backend
    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda_driver: tuple[int, int] | None
    cpu: Cpu
    ram_bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)]
    free_ram_bytes: Bytes = 0  # 0 in a file that does not tell it
    versions: dict[str, str | None]
    precision: Fact
    attention: tuple[AttentionBackend, ...] = ()
    layer_kernels: LayerKernels | None = None
    abilities: Abilities | None = None
    problems: tuple[Problem, ...] = ()
    overridden: tuple[str, ...] = ()  # what the user said instead of the probe: `precision`, `gpu_memory`, ...
    what_if: bool = False  # read from a file: the machine is not here


def probe_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """Look at the machine that this process runs on, as jobs with this `environment` would see it. Takes 0.1 s."""
    memory = probe_memory()
    nvml = probe_gpus(environment, ram_bytes=memory.total_bytes, free_ram_bytes=memory.free_bytes)
    cpu = probe_cpu()
    versions = probe_versions()
    build = probe_torch_build()
    backend = _backend(nvml, build)
    problems = [*nvml.problems]
    if nvml.gpus and backend == "cpu":
        problems.append(_gpus_without_cuda(nvml, versions["torch"]))
    if backend == "cuda":
        built = {**versions, "torch_cuda": build.cuda}
        problems += _torch_problems(nvml.gpus, built, nvml.cuda_driver, nvml.driver)
    unfit = kernels_problem(versions)
    if unfit is not None:
        problems.append(unfit)
    return Machine(
        backend=backend,
        gpus=nvml.gpus,
        driver=nvml.driver,
        cuda_driver=nvml.cuda_driver,
        cpu=cpu,
        ram_bytes=memory.total_bytes,
        free_ram_bytes=memory.free_bytes,
        versions=versions,
        precision=choose_precision(backend, nvml.gpus, cpu),
        problems=tuple(problems),
    )


def _backend(nvml: NvmlReport, build: TorchBuild) -> Backend:
    if build.cuda is not None:
        return "cuda" if nvml.gpus else "cpu"
    if build.hip is not None and Path("/dev/kfd").exists():  # AMD's compute device
        return "rocm"
    if build.xpu is not None and Path("/dev/dri").exists():
        return "xpu"
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "mps"
    return "cpu"


def _gpus_without_cuda(nvml: NvmlReport, torch: str | None) -> Problem:
    names = ", ".join(dict.fromkeys(gpu.name for gpu in nvml.gpus))
    if torch is None:
        return Problem(what=f"this machine has {names}, and torch is not installed", hint="`pip install torch`")
    driver = (
        f"; the driver here runs CUDA up to {nvml.cuda_driver[0]}.{nvml.cuda_driver[1]}" if nvml.cuda_driver else ""
    )
    return Problem(
        what=f"this machine has {names}, and torch {torch} is not built for CUDA, so jobs run on the CPU",
        hint=f"install a CUDA build of torch, see https://pytorch.org/get-started/locally{driver}",
    )


def _torch_problems(
    gpus: tuple[Gpu, ...], versions: dict[str, str | None], runs: tuple[int, int] | None, driver: str | None
) -> list[Problem]:
    used = used_gpu(gpus)
    return torch_problems(versions, None if used is None else used.compute_capability, runs=runs, driver=driver)


def for_one_gpu(machine: Machine) -> Machine:
    """The machine as a job sees it that uses one of its GPUs: that one stands first."""
    used = used_gpu(machine.gpus)
    if used is None or used is machine.gpus[0]:
        return machine
    return msgspec.structs.replace(machine, gpus=(used, *(gpu for gpu in machine.gpus if gpu is not used)))


def to_json(machine: Machine) -> bytes:
    return msgspec.json.encode(machine)


def machine_from_json(content: bytes, *, file: Path | None = None) -> Machine:
    """Read what `to_json` wrote, or a `file` made by hand for a what-if.

    A file that does not tell the free memory is taken to have all of it free. Control characters become spaces. Raises
    AutotuneError that names the file, the field that is wrong and what was expected there.
    """
    check_content(content, file)
    raw: Any = None
    try:
        with contextlib.suppress(msgspec.ValidationError):  # a number out of all bounds: the next line knows its place
            raw = msgspec.json.decode(content)
        check_names(raw, inspect.type_info(Machine), file)
        machine = msgspec.json.decode(content, type=Machine)
    except msgspec.ValidationError as error:
        expected, _, field = str(error).partition(" - at `$.")
        place = f" in `{field_of(field.rstrip('`'), raw)}`" if field else ""
        raise wrong_field(file, place, expected[:1].lower() + expected[1:]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AutotuneError(f"{named(file)} is not JSON: {error}", hint=NEW_FILE) from None
    machine = msgspec.convert(printable(msgspec.to_builtins(machine)), Machine)
    if machine.precision.value not in get_args(Precision):
        expected = (
            f"expected one of {', '.join(f'`{one}`' for one in get_args(Precision))}, got `{machine.precision.value}`"
        )
        raise wrong_field(file, " in `precision.value`", expected)
    if machine.backend == "cuda" and not machine.gpus:
        raise wrong_field(file, " in `gpus`", "expected at least one GPU with the backend `cuda`, got none")
    check_sense(machine, file)
    if machine.free_ram_bytes == 0:
        machine = msgspec.structs.replace(machine, free_ram_bytes=machine.ram_bytes)
    return machine


def read_machine(path: Path) -> Machine:
    """The machine of a file, for a what-if: it is taken not to be here. Raises AutotuneError for a file that is not
    there, cannot be read, or is wrong."""
    content = read_given(
        path,
        named=named(path),
        hint="give the path of a file; `trl-autotune doctor --json > machine.json` makes one on the machine meant",
    )
    return judged(msgspec.structs.replace(machine_from_json(content, file=path), what_if=True))


def judged(machine: Machine) -> Machine:
    """A machine of a file with what follows from what it tells, whatever the file says follows.

    Its precision is what its GPU or its CPU gives, unless the file says that somebody chose another (`overridden`).
    """
    precision = machine.precision
    found = gpu_problems(machine.gpus, ram_bytes=machine.ram_bytes)
    if machine.backend == "cuda":
        found += _torch_problems(machine.gpus, machine.versions, machine.cuda_driver, machine.driver)
    if "precision" not in machine.overridden:
        precision = choose_precision(machine.backend, machine.gpus, machine.cpu)
        if precision.value != machine.precision.value:
            found.append(
                Problem(
                    what=f"the machine file says {machine.precision.value}, and what it tells of that machine gives "
                    f"{precision.value}: {precision.reason}",
                    hint="the latter is taken; `--precision` chooses another",
                )
            )
    told = {problem.what for problem in machine.problems}
    problems = (*machine.problems, *(problem for problem in found if problem.what not in told))
    return msgspec.structs.replace(machine, precision=precision, problems=problems)


def as_torch_sees(machine: Machine) -> dict[str, bool]:
    """What torch would answer on that machine, where it decides what transformers accepts.

    bf16 counts as supported where it is emulated, too (torch 2.13, `torch.cuda.is_bf16_supported`); TF32 is asked of
    the GPU that is used (transformers 5.22.2, `utils/import_utils.py`, `is_torch_tf32_available`).
    """
    used = used_gpu(machine.gpus)
    first = used.compute_capability if used is not None else None
    return {
        "cuda": machine.backend in ("cuda", "rocm"),  # AMD's GPUs answer to CUDA's name
        "bf16": machine.backend != "cpu",
        "tf32": machine.backend == "cuda" and first is not None and first >= AMPERE,
    }


def describe(machine: Machine) -> str:
    """One line for people: `2x NVIDIA A100-SXM4-80GB, 79.1 GiB free each` or `2-core AMD EPYC, 21.4 GiB free`.

    GPUs that differ are told one by one, each with its own free memory. What the user said instead of the probe is
    marked, save the precision, whose reason says it.
    """
    said = [SAID_NAMES.get(name, name) for name in machine.overridden if name != "precision"]
    mark = f" ({', '.join(said)}: you said so)" if said else ""
    return ("what-if: " if machine.what_if else "") + _described(machine) + mark


def _described(machine: Machine) -> str:
    if not machine.gpus or machine.backend == "cpu":
        free = f"{machine.free_ram_bytes / GIB:.1f} GiB free"
        accelerator = "" if machine.backend == "cpu" else f"{machine.backend} on "
        return f"{accelerator}{machine.cpu.cores}-core {machine.cpu.name}, {free}"
    counts: dict[tuple[str, str], int] = {}
    for gpu in machine.gpus:
        alike = gpu.name, f"{gpu.free_bytes / GIB:.1f}"
        counts[alike] = counts.get(alike, 0) + 1
    return " + ".join(
        f"{count}x {name}, {free} GiB free{' each' if count > 1 else ''}" for (name, free), count in counts.items()
    )
