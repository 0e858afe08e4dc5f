"""What machine this is: GPUs, precision, CPU, memory, versions."""

from __future__ import annotations

from typing import Literal

import msgspec

Backend = Literal["cuda", "rocm", "xpu", "mps", "cpu"]


class Gpu(msgspec.Struct, frozen=True):
    index: int
    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    free_bytes: int
    mig: str | None
    linked_to: tuple[int, ...]
    busy_processes: int | None


class Cpu(msgspec.Struct, frozen=True):
    name: str
    cores: int  # physical cores this process may use
    bf16: bool


class Fact(msgspec.Struct, frozen=True):
    """A probed value with its reason."""

    value: str
    reason: str


class AttentionBackend(msgspec.Struct, frozen=True):
    """`packing`: what it does with packed documents: `variable length`, `dense mask` or `unknown`."""

    name: str
    usable: bool
    packing: str
    reason: str


class Problem(msgspec.Struct, frozen=True):
    what: str
    hint: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`machine.json` and `doctor --json`; bytes."""

    schema: Literal[1] = 1
    backend: Backend
    gpus: tuple[Gpu, ...]
    driver: str | None
    cuda_driver: tuple[int, int] | None
    cpu: Cpu
    ram_bytes: int
    free_ram_bytes: int
    versions: dict[str, str | None]
    precision: Fact
    attention: tuple[AttentionBackend, ...] = ()
    problems: tuple[Problem, ...] = ()
