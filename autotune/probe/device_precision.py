"""The precision that a device computes in by hardware, for jobs that do not say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from autotune.probe.facts import Fact
from autotune.probe.gpu import Gpu
from autotune.probe.host import Cpu
from autotune.probe.used import used_gpu

Backend = Literal["cuda", "rocm", "xpu", "mps", "cpu"]
Precision = Literal["bf16", "fp16", "float32"]

AMPERE = (8, 0)  # the first compute capability with bf16 arithmetic; older ones emulate it

# CDNA 2 and newer by name: MI210, MI250, MI300, MI325, MI350, MI355 (AMD's ROCm documentation, "Data types and
# precision support", lists bf16 for their matrix cores)
CDNA2 = re.compile(r"\bMI ?[23]\d\d")


def choose_precision(backend: Backend, gpus: Sequence[Gpu], cpu: Cpu) -> Fact:
    """The precision to train in when the user did not say: the best that the GPU that is used can do in hardware.

    torch itself accepts bf16 on GPUs older than Ampere and emulates it, slowly
    (torch 2.13, `torch.cuda.is_bf16_supported`).
    """
    used = used_gpu(gpus)
    match backend:
        case "cuda":
            return _of_cuda(used)
        case "rocm" if used is not None and CDNA2.search(used.name):
            return Fact("bf16", f"TRL's default, and {used.name} is CDNA 2 or newer, which has bf16 arithmetic")
        case "rocm" | "xpu" | "mps":
            return Fact("bf16", f"TRL's default; precision is not probed on {backend}")
        case "cpu":
            if cpu.bf16:
                return Fact("bf16", f"this CPU has bf16 arithmetic ({cpu.bf16_flag or 'bf16'})")
            return Fact("float32", "this CPU has no bf16 arithmetic")


def _of_cuda(used: Gpu | None) -> Fact:
    if used is None or used.compute_capability is None:
        return Fact("bf16", "TRL's default; the driver does not tell the compute capability of the GPU")
    number = f"{used.compute_capability[0]}.{used.compute_capability[1]}"
    if used.compute_capability >= AMPERE:
        return Fact("bf16", f"compute capability {number} is Ampere or newer")
    return Fact("fp16", f"compute capability {number} is older than Ampere, which is the first with bf16")
