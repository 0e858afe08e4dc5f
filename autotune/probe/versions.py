"""Versions of what is installed, and whether they fit each other, read without importing any of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from autotune import __version__
from autotune.probe.facts import Problem

DISTRIBUTIONS = (
    "trl",
    "transformers",
    "torch",
    "accelerate",
    "peft",
    "datasets",
    "kernels",
    "vllm",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
)

# A pair that this program's own tests run against, for when the newest of each do not fit.
TESTED_PAIR = "transformers==5.22.2 kernels==0.17.2"

# The `kernels` that each minor version of transformers takes: at least, and older than (its own
# `utils/import_utils.py`, KERNELS_MIN_VERSION and KERNELS_MAX_VERSION, read in 5.17.0, 5.18, 5.19, 5.20.2, 5.22.2 and
# 5.24.0; 5.21 stands between two that agree). For machines that are not here; the installed one is asked itself.
KERNELS_BOUNDS = {
    (5, 17): ("0.16.0", "0.17"),
    (5, 18): ("0.17.0", "0.18"),
    (5, 19): ("0.17.0", "0.18"),
    (5, 20): ("0.17.2", "0.18"),
    (5, 21): ("0.17.2", "0.18"),
    (5, 22): ("0.17.2", "0.18"),
    (5, 24): ("0.18.2", "0.19"),
}


class TorchBuild(msgspec.Struct, frozen=True):
    """What the installed torch is built for: CUDA's, ROCm's and XPU's versions, None where it is not."""

    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


def probe_versions() -> dict[str, str | None]:
    """Versions of this program, the operating system, Python and each distribution, None where it is not installed.
    `torch_cuda` is added for the CUDA version that torch is built for."""
    versions: dict[str, str | None] = {
        "trl_autotune": __version__,
        "os": _operating_system(),
        "python": platform.python_version(),
    }
    for name in DISTRIBUTIONS:
        versions[name] = installed_version(name)
        if name == "torch":
            versions["torch_cuda"] = probe_torch_build().cuda
    return versions


def _operating_system() -> str:
    """Its name and release as it tells them itself: `Ubuntu 24.04.3 LTS`, `macOS 15.6`, `Linux 6.8.0`."""
    if mac := platform.mac_ver()[0]:
        return f"macOS {mac}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe_torch_build() -> TorchBuild:
    """Read `torch/version.py`, where the build writes what it was made for: importing torch takes a second."""
    text = _source_of("torch", "version.py")

    def setting(name: str) -> str | None:
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return match.group(1) if match else None

    return TorchBuild(cuda=setting("cuda"), hip=setting("hip"), xpu=setting("xpu"))


def kernels_problem(versions: dict[str, str | None]) -> Problem | None:
    """The problem of a `kernels` that the installed transformers does not accept: hub kernels are then off, and
    nothing says so until a model is built (transformers 5.22.2, `utils/import_utils.py`, `is_kernels_available`)."""
    transformers, kernels = versions["transformers"], versions["kernels"]
    bounds = kernels_bounds()
    if transformers is None or bounds is None:
        return None
    lowest, below = bounds
    hint = f'install a pair that works: `pip install "kernels>={lowest},<{below}"`, or `pip install {TESTED_PAIR}`'
    if kernels is None:
        return Problem(what="`kernels` is not installed, so no attention kernel can come from the hub", hint=hint)
    try:
        fits = Version(lowest) <= Version(kernels) < Version(below)
    except InvalidVersion:
        fits = False
    if fits:
        return None
    return Problem(
        what=f"transformers {transformers} takes kernels {lowest} or newer and older than {below}, "
        f"and {kernels} is installed, so no attention kernel can come from the hub",
        hint=hint,
    )


def kernels_bounds() -> tuple[str, str] | None:
    """The lowest `kernels` that the installed transformers accepts and the one it is older than, None if not told."""
    text = _source_of("transformers", "utils/import_utils.py")
    found = dict(re.findall(r"^KERNELS_(MIN|MAX)_VERSION\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return (found["MIN"], found["MAX"]) if len(found) == 2 else None


def known_kernels_bounds(transformers: str) -> tuple[str, str] | None:
    """The same of any version of transformers; None for one that is not known."""
    if transformers == installed_version("transformers"):
        return kernels_bounds()
    try:
        version = Version(transformers)
    except InvalidVersion:
        return None
    return KERNELS_BOUNDS.get((version.major, version.minor))


def _source_of(package: str, path: str) -> str:
    """The text of a module of a top-level package; finding the package does not import it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    try:
        return (Path(spec.origin).parent / path).read_text(encoding="utf-8")
    except OSError:
        return ""
