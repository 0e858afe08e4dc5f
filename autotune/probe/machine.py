"""What machine this is: GPUs, precision, CPU, memory, versions. Runs in the engine and imports no torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from autotune.errors import AutotuneError
from autotune.probe.facts import Fact, Problem
from autotune.probe.gpus import MOST_BYTES, Bytes, Gpu, NvmlReport, probe_gpus
from autotune.probe.host import Cpu, probe_cpu, probe_memory
from autotune.probe.machine_document import NEW_FILE, check_content, check_sense, named, printable, wrong_field
from autotune.probe.versions import TorchBuild, kernels_problem, probe_torch_build, probe_versions

__all__ = [
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
    "describe",
    "machine_from_json",
    "probe_machine",
    "read_machine",
    "to_json",
]

Backend = Literal["cuda", "rocm", "xpu", "mps", "cpu"]
Precision = Literal["bf16", "fp16", "float32"]

AMPERE = (8, 0)  # the first compute capability with bf16 arithmetic; older ones emulate it
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
    if nvml.gpus and backend == "cuda" and build.cuda is not None and nvml.cuda_driver is not None:
        problems += _driver_too_old(nvml.driver, nvml.cuda_driver, build.cuda)
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


def _driver_too_old(driver: str | None, runs: tuple[int, int], built_for: str) -> list[Problem]:
    """A driver runs any CUDA of its own major version or an older one (CUDA's minor version compatibility)."""
    major = built_for.partition(".")[0]
    if not major.isdecimal() or runs[0] >= int(major):
        return []
    return [
        Problem(
            what=f"torch is built for CUDA {built_for}, and the driver {driver or 'here'} runs CUDA up to "
            f"{runs[0]}.{runs[1]}, so torch will find no GPU",
            hint=f"update the driver, or install a torch that is built for CUDA {runs[0]}",
        )
    ]


def choose_precision(backend: Backend, gpus: tuple[Gpu, ...], cpu: Cpu) -> Fact:
    """The precision to train in when the user did not say: the best that the weakest device can do in hardware.

    torch itself accepts bf16 on GPUs older than Ampere and emulates it, slowly
    (torch 2.13, `torch.cuda.is_bf16_supported`).
    """
    match backend:
        case "cuda":
            return _gpu_precision(gpus)
        case "rocm" | "xpu":
            return Fact("bf16", f"TRL's default; precision is not probed on {backend}")
        case "mps":
            return Fact("float32", "precision is not probed on mps")
        case "cpu":
            if cpu.bf16:
                return Fact("bf16", f"this CPU has bf16 arithmetic ({cpu.bf16_flag or 'bf16'})")
            return Fact("float32", "this CPU has no bf16 arithmetic")


def for_one_gpu(machine: Machine) -> Machine:
    """The machine as a job sees it that uses the first of its GPUs: that one decides the precision."""
    if len(machine.gpus) < 2 or "precision" in machine.overridden:
        return machine
    precision = choose_precision(machine.backend, machine.gpus[:1], machine.cpu)
    return msgspec.structs.replace(machine, precision=precision)


def _gpu_precision(gpus: tuple[Gpu, ...]) -> Fact:
    told = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    if len(told) < len(gpus) or not told:
        return Fact("float32", "the driver does not tell the compute capability of every GPU")
    weakest = min(told)
    number = f"{weakest[0]}.{weakest[1]}"
    of_several = ", the lowest of the GPUs here," if len(set(told)) > 1 else ""
    if weakest >= AMPERE:
        return Fact("bf16", f"compute capability {number}{of_several} is Ampere or newer")
    return Fact("fp16", f"compute capability {number}{of_several} is older than Ampere, which is the first with bf16")


def to_json(machine: Machine) -> bytes:
    return msgspec.json.encode(machine)


def machine_from_json(content: bytes, *, file: Path | None = None) -> Machine:
    """Read what `to_json` wrote, or a `file` made by hand for a what-if.

    A file that does not tell the free memory is taken to have all of it free. Control characters become spaces. Raises
    AutotuneError that names the file, the field that is wrong and what was expected there.
    """
    check_content(content, file)
    try:
        machine = msgspec.json.decode(content, type=Machine)
    except msgspec.ValidationError as error:
        expected, _, field = str(error).partition(" - at `$.")
        place = f" in `{field.rstrip('`')}`" if field else ""
        raise wrong_field(file, place, expected[:1].lower() + expected[1:]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
    """The machine of a file, for a what-if: it is taken not to be here.

    Its precision is what its GPUs and its CPU give, unless the file says that somebody chose another
    (`overridden`). Raises AutotuneError for a file that is not there, cannot be read, or is wrong.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AutotuneError(
            f"cannot read the machine file `{path}`: {error.strerror}",
            hint="give the path of a file; `trl-autotune doctor --json > machine.json` makes one on the machine meant",
        ) from None
    machine = machine_from_json(content, file=path)
    precision, problems = machine.precision, machine.problems
    if "precision" not in machine.overridden:
        precision = choose_precision(machine.backend, machine.gpus, machine.cpu)
        if precision.value != machine.precision.value:
            differs = Problem(
                what=f"the machine file says {machine.precision.value}, and what it tells of that machine gives "
                f"{precision.value}: {precision.reason}",
                hint="the latter is taken; `--precision` chooses another",
            )
            problems = (*problems, differs)
    return msgspec.structs.replace(machine, what_if=True, precision=precision, problems=problems)


def as_torch_sees(machine: Machine) -> dict[str, bool]:
    """What torch would answer on that machine, where it decides what transformers accepts.

    bf16 counts as supported where it is emulated, too (torch 2.13, `torch.cuda.is_bf16_supported`); TF32 is asked of
    the first GPU (transformers 5.22.2, `utils/import_utils.py`, `is_torch_tf32_available`).
    """
    first = machine.gpus[0].compute_capability if machine.gpus else None
    return {
        "cuda": machine.backend in ("cuda", "rocm"),  # AMD's GPUs answer to CUDA's name
        "bf16": machine.backend != "cpu",
        "tf32": machine.backend == "cuda" and first is not None and first >= AMPERE,
    }


def describe(machine: Machine) -> str:
    """One line for people: `2x NVIDIA A100-SXM4-80GB, 79.1 GiB free` or `2-core AMD EPYC, 21.4 GiB free`.

    With several GPUs the free memory is that of the fullest, which is what bounds a trial. What the user said instead
    of the probe is marked, save the precision, whose reason says it.
    """
    said = [SAID_NAMES.get(name, name) for name in machine.overridden if name != "precision"]
    mark = f" ({', '.join(said)}: you said so)" if said else ""
    return ("what-if: " if machine.what_if else "") + _described(machine) + mark


def _described(machine: Machine) -> str:
    if machine.backend != "cuda":
        free = f"{machine.free_ram_bytes / GIB:.1f} GiB free"
        accelerator = "" if machine.backend == "cpu" else f"{machine.backend} on "
        return f"{accelerator}{machine.cpu.cores}-core {machine.cpu.name}, {free}"
    counts: dict[str, int] = {}
    for gpu in machine.gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    names = " + ".join(f"{count}x {name}" for name, count in counts.items())
    least = min(gpu.free_bytes for gpu in machine.gpus)
    each = " each" if len(machine.gpus) > 1 else ""
    return f"{names}, {least / GIB:.1f} GiB free{each}"
