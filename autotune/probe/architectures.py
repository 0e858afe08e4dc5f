"""CUDA's numbers: compute capabilities of GPUs, architectures of builds, versions."""

from __future__ import annotations

import re
from collections.abc import Sequence

Capability = tuple[int, int]


def supports(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether a build for these CUDA architectures runs on a GPU of this compute capability.

    kernels 0.17.2, `archs.py`, `_supports_cuda_capability`: `9.0a` runs on exactly that capability, `9.0` and `9.0f`
    on the same generation from that minor version on, `9.0+PTX` on anything newer; a list in no known form on all.
    """
    known = [runs for runs in (_runs(one, capability) for one in architectures) if runs is not None]
    return not known or any(known)


def _runs(architecture: str, capability: Capability) -> bool | None:
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        return None
    built = (int(match.group(1)), int(match.group(2)))
    if match.group(3) == "a":
        return capability == built
    if match.group(4) and not match.group(3):
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]


def number(capability: Capability | None) -> str:
    """A compute capability in words."""
    return f"compute capability {'not told' if capability is None else dotted(capability)}"


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def version_pair(version: str | None) -> tuple[int, int] | None:
    """Major and minor of a version; None where it does not begin with them."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version or "")
    return (int(match.group(1)), int(match.group(2))) if match else None
