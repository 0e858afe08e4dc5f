"""Which GPUs a build of torch runs on: asked of torch where it is installed, looked up where it is not.

A build holds machine code for some compute capabilities. It runs on GPUs of the same generation from that minor version
on, and beyond only where it holds PTX (CUDA programming guide, "Binary compatibility" and "PTX compatibility").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from autotune.probe.architectures import Capability, dotted, number, supports, version_pair
from autotune.probe.facts import Problem

# What PyTorch's own wheels are built for, by their CUDA version (PyTorch's RELEASE.md, "PyTorch CUDA support matrix",
# releases 2.6 to 2.9). 12.8 and 12.9 have Volta in some releases and not in others: see UNSURE.
HOPPER = ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "9.0")
WHEELS: dict[tuple[int, int], tuple[str, ...]] = {
    (11, 8): HOPPER,
    (12, 1): HOPPER,
    (12, 4): HOPPER,
    (12, 6): HOPPER,
    (12, 8): ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"),
    (12, 9): ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"),
    (13, 0): ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX"),
}
# Capabilities of which the table does not say enough: Kepler was in some wheels for CUDA 11.8; Tegra's (Jetson, Orin,
# Thor) have builds of their own, and no binary compatibility with those of desktops (the same guide)
UNSURE: dict[tuple[int, int], tuple[Capability, ...]] = {
    (11, 8): ((3, 7),),
    (12, 8): ((7, 0),),
    (12, 9): ((7, 0),),
}
TEGRA: tuple[Capability, ...] = ((5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0))

# The oldest capability that a CUDA toolkit compiles for, whoever builds with it (release notes of CUDA 12.0 and 13.0:
# without Kepler; without Maxwell, Pascal and Volta)
OLDEST: dict[int, Capability] = {12: (5, 0), 13: (7, 5)}

FLEX_ATTENTION = (2, 5)  # the first release with `torch.nn.attention.flex_attention`


def torch_refuses(versions: Mapping[str, str | None], capability: Capability | None) -> str | None:
    """Why the torch of these `versions` runs nothing on a CUDA GPU; None where it does or where that is not known."""
    torch, cuda = versions.get("torch"), version_pair(versions.get("torch_cuda"))
    if torch is None:
        return None
    if cuda is None:
        return f"torch {torch} is not built for CUDA" if _local(torch) in ("cpu", "xpu") or "+rocm" in torch else None
    if capability is None:
        return None
    oldest = OLDEST.get(cuda[0], (0, 0))
    if capability < oldest:
        return (
            f"torch {torch} is built with CUDA {dotted(cuda)}, which compiles for {dotted(oldest)} and newer, and this "
            f"is {number(capability)}"
        )
    if capability in TEGRA or capability in UNSURE.get(cuda, ()) or not _released(torch):
        return None
    return build_refuses(torch, WHEELS.get(cuda, ()), capability)


def driver_refuses(
    versions: Mapping[str, str | None], runs: tuple[int, int] | None, *, driver: str | None = None
) -> str | None:
    """Why the torch of these `versions` finds no GPU with a driver that `runs` CUDA up to this version; None where it
    does: a driver runs any CUDA of its own major version or an older one (CUDA's minor version compatibility)."""
    built_for = version_pair(versions.get("torch_cuda"))
    if built_for is None or runs is None or runs[0] >= built_for[0]:
        return None
    named = f"the driver {driver}" if driver else "the driver"
    return f"torch is built for CUDA {dotted(built_for)}, and {named} runs CUDA up to {dotted(runs)}"


def torch_problems(
    versions: Mapping[str, str | None],
    capability: Capability | None,
    *,
    runs: tuple[int, int] | None,
    driver: str | None,
) -> list[Problem]:
    """What keeps torch from the CUDA GPU that is used."""
    found: list[Problem] = []
    refused = driver_refuses(versions, runs, driver=driver)
    if refused is not None and runs is not None:
        hint = f"update the driver, or install a torch that is built for CUDA {runs[0]}"
        found.append(Problem(what=f"{refused}, so torch will find no GPU", hint=hint))
    refused = torch_refuses(versions, capability)
    if refused is not None:
        found.append(Problem(what=f"{refused}, so nothing runs on the GPU", hint=_other_wheel(capability, runs)))
    return found


def _other_wheel(capability: Capability | None, runs: tuple[int, int] | None) -> str:
    fit = [
        cuda
        for cuda, architectures in WHEELS.items()
        if capability is not None and supports(architectures, capability) and (runs is None or runs[0] >= cuda[0])
    ]
    which = f"a torch for CUDA {dotted(max(fit))}" if fit else "a torch that is built for it"
    return f"install {which}, see https://pytorch.org/get-started/previous-versions"


def build_refuses(torch: str, built_for: Sequence[str], capability: Capability) -> str | None:
    """Why a torch that is `built_for` these architectures, as `9.0` or `12.0+PTX`, runs nothing on a GPU."""
    if not built_for or supports(built_for, capability):
        return None
    return f"torch {torch} is built for {', '.join(built_for)}, and {number(capability)} runs none of these"


def architectures_of(listed: Iterable[str]) -> tuple[str, ...]:
    """What `torch.cuda.get_arch_list()` gives (`sm_90`, `sm_100`, `sm_90a`, `compute_120`) as `9.0`, `12.0+PTX`."""
    found = []
    for one in listed:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", one)
        if match is not None:
            kind, major, minor, variant = match.groups()
            found.append(f"{major}.{minor}{variant}{'+PTX' if kind == 'compute' else ''}")
    return tuple(found)


def _local(torch: str) -> str:
    return torch.partition("+")[2]


def _released(torch: str) -> bool:
    """Whether it is a wheel of PyTorch's: `2.13.0` from PyPI or `2.13.0+cu130`; others build for what they like."""
    return re.fullmatch(r"\d+\.\d+\.\d+(\+cu\d+)?", torch) is not None
