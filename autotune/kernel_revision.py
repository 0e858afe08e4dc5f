"""Which revision of a hub kernel a process has loaded. Runs in children; imports `kernels` where that is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

LOCAL = "local"


def kernel_revision(attention: str | None) -> str | None:
    """The commit of the hub kernel that an attention implementation's name stands for and that is loaded here,
    `local` for one in a folder that `LOCAL_KERNELS` names; None where there is none.

    A kernel from the hub lies in `…/models--org--repo/snapshots/<commit>/build/<variant>` (huggingface_hub 2.4,
    `snapshot_download`; `kernels--` in place of `models--` for repositories of kernels). What `kernels` itself keeps
    (0.17.2, `importer.py`, `RepoInfo`) is missing offline, and may be a branch.
    """
    if attention is None or "/" not in attention or "kernels" not in sys.modules:
        return None
    from kernels import get_loaded_kernels  # loaded already, or there is no kernel

    repository = attention.rpartition("|")[2].partition(":")[0].partition("@")[0].strip()
    folder = local_kernels(os.environ).get(repository)
    for loaded in get_loaded_kernels():
        place = Path(loaded.module.__file__ or "")
        if folder is not None and place.resolve().is_relative_to(Path(folder).resolve()):
            return LOCAL
        parts = place.parts
        if "snapshots" not in parts:
            continue
        at = parts.index("snapshots")
        if parts[at - 1].partition("--")[2] == repository.replace("/", "--"):
            return parts[at + 1]
    return None


def local_kernels(environment: Mapping[str, str]) -> dict[str, str]:
    """Repositories that `LOCAL_KERNELS` maps to folders: `org/repo=/folder:org/other=/folder`
    (kernels 0.17.2, `load.py`)."""
    entries = (entry.partition("=") for entry in environment.get("LOCAL_KERNELS", "").split(":"))
    return {repository: folder for repository, equals, folder in entries if equals}
