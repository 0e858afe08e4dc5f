"""`trl-autotune doctor`: what is here, on one screen for a person."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from autotune.deliver.wording import EMULATES, HUB, attention_out
from autotune.probe.architectures import dotted
from autotune.probe.builds import gpu_refuses, kernels_pair_refuses
from autotune.probe.gpus import Gpu
from autotune.probe.machine import AMPERE, GIB, AttentionBackend, Machine
from autotune.probe.torch_builds import driver_refuses
from autotune.probe.used import used_gpu, used_line

if TYPE_CHECKING:
    from autotune.probe.gpus import GpuProcess

LABEL_WIDTH = 11
MOST_COLUMNS = 110  # longer lines are hard to read
Row = tuple[str, str]


@contextlib.contextmanager
def progress(stream: TextIO) -> Iterator[None]:
    """On a terminal, what is going on and for how long; nothing where the stream is a file or a pipe."""
    from rich.console import Console  # 60 ms
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    what = "trying attention (a minute on a GPU)"
    if console.is_dumb_terminal:  # it could not take the line away again
        console.print(what)
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    hidden = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task(what, total=None)
        yield


def show(machine: Machine, stream: TextIO, *, width: int | None = None) -> None:
    """Write the screen; colour and width as the terminal has them, `NO_COLOR` and dumb ones included."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)
    table = Table.grid(padding=0)
    table.width = min(console.width, MOST_COLUMNS)
    table.add_column(width=LABEL_WIDTH, no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, text in rows(machine):
        table.add_row(label, text)
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        stream.write(line.rstrip() + "\n")  # rich fills a table's lines with spaces


def rows(machine: Machine) -> list[Row]:
    """The screen as pairs of label and text; a text may be longer than a line."""
    return [
        *([("what-if", "read from a file; that machine is not here")] if machine.what_if else []),
        ("machine", _machine(machine)),
        *_gpus(machine),
        *_used(machine),
        *([("driver", _driver(machine))] if machine.backend == "cuda" or machine.driver else []),
        ("precision", f"{machine.precision.value}: {machine.precision.reason}"),
        *_emulated(machine),
        *_attention(machine),
        *_layer_kernels(machine),
        *_versions(machine),
        *_problems(machine),
    ]


def _machine(machine: Machine) -> str:
    cores, ram = _said(machine, "cores"), _said(machine, "ram")
    memory = f"{machine.free_ram_bytes / GIB:.1f} of {machine.ram_bytes / GIB:.1f} GiB free{ram}"
    return f"{machine.cpu.cores}-core {machine.cpu.name}{cores}, {memory}"


def _said(machine: Machine, name: str) -> str:
    return " (you said so)" if name in machine.overridden else ""


def _gpus(machine: Machine) -> list[Row]:
    if not machine.gpus:
        none = "none that torch can use" if machine.backend == "cpu" else f"{machine.backend}, not looked at closer"
        return [("GPU", none)]
    alike: dict[str, list[int]] = {}
    for gpu in machine.gpus:
        alike.setdefault("; ".join(_gpu(gpu, machine)), []).append(gpu.index)
    return [
        (f"GPU {_ranges(sorted(set(indices)))}", f"{len(indices)}x {text}" if len(indices) > 1 else text)
        for text, indices in alike.items()
    ]


def _used(machine: Machine) -> list[Row]:
    line = used_line(machine.gpus, there=machine.what_if)
    return [] if line is None else [("  used", line)]


def _emulated(machine: Machine) -> list[Row]:
    used = used_gpu(machine.gpus)
    capability = None if used is None or machine.backend != "cuda" else used.compute_capability
    if machine.precision.value != "bf16" or capability is None or capability >= AMPERE:
        return []
    return [("", f"compute capability {dotted(capability)} {EMULATES}; `--precision fp16` is native there")]


def _gpu(gpu: Gpu, machine: Machine) -> Iterator[str]:
    name = gpu.name if gpu.mig is None or gpu.mig in gpu.name else f"{gpu.name}, MIG slice {gpu.mig}"
    said = _said(machine, "gpu_memory")
    yield f"{name}, {gpu.free_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free{said}"
    capability = gpu.compute_capability
    if machine.backend in ("cuda", "cpu"):
        yield f"compute capability {capability[0]}.{capability[1]}" if capability else "compute capability not told"
    if gpu.linked_to:
        others = {other.index for other in machine.gpus} - {gpu.index}
        yield f"NVLink to {'every other' if set(gpu.linked_to) == others else _ranges(gpu.linked_to)}"
    if gpu.busy_processes is None:
        yield "who else is on it is not told"
    elif gpu.busy_processes:
        programs = ", ".join(_process(process) for process in gpu.processes)
        yield f"busy: {_count(gpu.busy_processes, 'other process', 'es')}" + (f" ({programs})" if programs else "")
    if gpu.throttling:
        yield f"throttled: {', '.join(gpu.throttling)}"


def _process(process: GpuProcess) -> str:
    held = f" {process.memory_bytes / GIB:.1f} GiB" if process.memory_bytes is not None else ""
    return f"{process.name or 'not told'}{held}"


def _count(number: int, word: str, plural: str) -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _ranges(numbers: Sequence[int]) -> str:
    """`1-3, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _driver(machine: Machine) -> str:
    cuda, torch_cuda = machine.cuda_driver, machine.versions.get("torch_cuda")
    driver = machine.driver or "version not told"
    if cuda is not None:
        driver += f", runs CUDA up to {cuda[0]}.{cuda[1]}"
    if torch_cuda is None:
        return f"{driver}; torch is not built for CUDA" if machine.backend == "cpu" else driver
    built = f"{driver}; torch is built for {torch_cuda}"
    if cuda is None:
        return built
    if driver_refuses(machine.versions, cuda) is not None:
        return f"{built}: the driver is too old for it"
    if gpu_refuses(machine) is not None:
        return f"{built}: they fit, and torch is not built for the GPU"
    return f"{built}: they fit"


def _attention(machine: Machine) -> list[Row]:
    backends = machine.attention
    if not backends:
        return [("attention", "not looked at")]
    how = "tried there" if machine.what_if else "tried forward and backward"
    if any(one.expected for one in backends):
        how = "expected, not tried"
    hub = f"; hub kernels are in {HUB}" if any(one.name.startswith(HUB) for one in backends) else ""
    usable: dict[str, list[str]] = {}
    for one in backends:
        if one.usable:
            usable.setdefault(one.packing, []).append(_measured(one))
    works = [f"{packing}: {', '.join(names)}" for packing, names in usable.items()] or ["none"]
    out = [f"{', '.join(names)}: {reason}" for names, reason in attention_out(backends)]
    return [
        ("attention", f"{how}{hub}"),
        *(("  usable" if number == 0 else "", text) for number, text in enumerate(works)),
        *(("  not" if number == 0 else "", text) for number, text in enumerate(out)),
    ]


def _measured(one: AttentionBackend) -> str:
    milliseconds = f" {one.milliseconds:.3g} ms" if one.milliseconds is not None else ""
    return one.name.removeprefix(HUB) + milliseconds


def _layer_kernels(machine: Machine) -> list[Row]:
    kernels = machine.layer_kernels
    if kernels is None:
        return []
    names = f": {', '.join(kernels.names)}" if kernels.names else ""
    return [("layers", f"layer kernels {'usable' if kernels.usable else 'not usable'}{names}; {kernels.reason}")]


def _versions(machine: Machine) -> list[Row]:
    versions = machine.versions
    there = "  ".join(
        f"{name.replace('trl_auto', 'trl-auto')} {version}" if name != "os" else version
        for name, version in versions.items()
        if version and name != "torch_cuda"
    )
    missing = ", ".join(name for name, version in versions.items() if version is None and name != "torch_cuda")
    refused = kernels_pair_refuses(versions)
    return [
        ("versions", there or "not told"),
        *([("", f"not installed: {missing}")] if missing else []),
        ("", refused or "transformers and kernels fit together"),
    ]


def _problems(machine: Machine) -> list[Row]:
    if not machine.problems:
        return [("problems", "no problems found")]
    found: list[Row] = []
    for number, problem in enumerate(machine.problems):
        found += [("problems" if number == 0 else "", f"* {problem.what}"), ("", f"  hint: {problem.hint}")]
    return found
