"""Whether the hub has a kernel for this machine: asked for its metadata, nothing is loaded. Runs in a child."""

from __future__ import annotations

import os

from autotune.kernel_revision import local_kernels
from autotune.probe.attention_names import GENERATION_ONLY, HUB_KERNELS, repository, revision
from autotune.probe.builds import GENERATES, kernels_pair_refuses
from autotune.probe.machine import Backend
from autotune.probe.model import first_line
from autotune.probe.versions import TESTED_PAIR, installed_version


def hub_refuses(name: str, backend: Backend) -> str | None:
    """Why a hub kernel would not load here, from its name in `attn_implementation`; None when it would."""
    from transformers.integrations.hub_kernels import get_attn_kernel_version
    from transformers.utils import is_kernels_available

    kernel, pinned = repository(name), revision(name)
    if kernel == GENERATION_ONLY:
        return GENERATES
    if not is_kernels_available():  # out of transformers' range counts as missing
        return kernels_refusal()
    if backend != "cuda" and kernel in HUB_KERNELS and kernel not in local_kernels(os.environ):
        return "needs a CUDA GPU"
    return no_build(kernel, revision=pinned, version=None if pinned else get_attn_kernel_version(kernel))


def kernels_refusal() -> str:
    """Why the installed transformers loads no kernel from the hub, with a pair of versions that works."""
    versions = {name: installed_version(name) for name in ("transformers", "kernels")}
    reason = kernels_pair_refuses(versions)
    if reason is None:
        reason = f"transformers {versions['transformers']} does not take kernels {versions['kernels']}"
    return f"{reason}; a pair that works: `{TESTED_PAIR}`"


def no_build(kernel: str, *, revision: str | None = None, version: int | None = None) -> str | None:
    """Why the hub has no build of a kernel for this torch and this GPU, at one of a revision and a version; None when
    it has. Only its metadata is fetched."""
    import torch
    from huggingface_hub import constants
    from kernels import has_kernel

    if kernel in local_kernels(os.environ):
        return None
    try:
        # a version is a branch of that name (kernels 0.17.2, `_versions.py`)
        if constants.HF_HUB_OFFLINE and not _in_cache(kernel, revision or f"v{version}"):
            return "not in the cache, and offline (`HF_HUB_OFFLINE` is set)"
        built = has_kernel(kernel, revision=revision, version=version)
    except Exception as error:  # the network, the cache, an untrusted publisher: kernels 0.17 has no error of its own
        return _lookup_failed(error)
    return None if built else f"no build for torch {torch.__version__} and this device"


def _in_cache(kernel: str, revision: str) -> bool:
    """Whether a snapshot of a kernel's repository at this branch, tag or commit is in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from kernels.hf_hub import CACHE_DIR

    try:
        snapshot_download(kernel, repo_type="kernel", revision=revision, cache_dir=CACHE_DIR, local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True


def _lookup_failed(error: Exception) -> str:
    """In kernels 0.17.2 (`hf_hub.py`, `_check_trust_remote_code`) a hub that cannot be reached and an organisation
    that is not there say the same."""
    said = str(error)
    if "could not verify publisher trust" in said:
        return "the hub did not say whether to trust its publisher: no network, or no such repository"
    if "not from a trusted publisher" in said:
        return "the hub does not trust its publisher, and transformers loads no such kernel"
    return f"could not be looked up: {first_line(error)}"
