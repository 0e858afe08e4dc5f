"""One GPU as it is told: here by NVML, elsewhere by a machine file."""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_BYTES = 2**50  # no machine has a pebibyte of memory
MOST_GPUS = 64  # more than any machine has: a DGX-2 has 16
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MOST_GPUS)]
# NVIDIA's are 1.0 to 12.1 as of CUDA 13.0
CapabilityPart = Annotated[int, msgspec.Meta(ge=0, le=20)]


class GpuProcess(msgspec.Struct, frozen=True):
    """A process of somebody else that computes on a GPU; None for what the system does not tell, or `doctor` others."""

    pid: int | None
    name: str | None
    memory_bytes: Bytes | None


class Gpu(msgspec.Struct, frozen=True):
    """One GPU, or one MIG slice of it.

    `index` is NVML's, in PCI order; launches name a GPU by `uuid`. `mig` is the slice's profile, such as `3g.40gb`;
    the memory and the processes are then the slice's own. `linked_to` and `peer_access` are indices of other GPUs:
    reached over NVLink, and readable directly over any bus. `busy_processes` counts `processes`: those of others,
    which are neither this process nor an ancestor or a child of it. None: the driver does not tell.
    """

    index: Index
    uuid: str
    name: str
    compute_capability: tuple[CapabilityPart, CapabilityPart] | None
    memory_bytes: Bytes
    free_bytes: Bytes
    mig: str | None
    linked_to: tuple[Index, ...] | None
    busy_processes: Annotated[int, msgspec.Meta(ge=0)] | None
    peer_access: tuple[Index, ...] | None = ()
    pci: str | None = None  # its place on the bus, as `nvidia-smi` writes it
    processes: tuple[GpuProcess, ...] = ()
    power_limit_watts: Annotated[float, msgspec.Meta(ge=0, le=1e5)] | None = None
    throttling: tuple[str, ...] | None = None  # why its clocks are held back, in words; None where not told
