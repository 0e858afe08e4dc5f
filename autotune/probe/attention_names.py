"""The names that TRL's `attn_implementation` takes: what torch brings, what packages bring, kernels from the hub."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

NATIVE = ("sdpa", "eager", "flex_attention")


class Package(msgspec.Struct, frozen=True):
    """A pip distribution that an implementation stands for, and the hub kernel that runs where it is not installed.

    `lowest`: the oldest version that transformers takes, None where it takes any; `capability`: the lowest compute
    capability (transformers 5.22.2, `modeling_flash_attention_utils.py`, FLASH_ATTN_KERNEL_FALLBACK and
    FLASH_ATTENTION_COMPATIBILITY_MATRIX; `utils/import_utils.py`, `is_flash_attn_2_available`). The capability of
    FlashAttention 2 is its own (flash-attn 2.8, README): Ampere or newer.
    """

    distribution: str
    stand_in: str
    capability: tuple[int, int]
    lowest: str | None = None


PACKAGES = {
    "flash_attention_2": Package("flash-attn", "kernels-community/flash-attn2", (8, 0), "2.3.3"),
    "flash_attention_3": Package("flash-attn-3", "kernels-community/vllm-flash-attn3", (8, 0)),
    "flash_attention_4": Package("flash-attn-4", "kernels-community/flash-attn4", (9, 0)),
}


def not_there(name: str) -> str:
    """Why an implementation is not tried whose package is missing; it reads on without what it quotes."""
    package = PACKAGES[name]
    return f"without its package, `{package.distribution}`; the hub has the same, `{package.stand_in}`"


def twin(name: str, job_attention: str | None, *, installed: Callable[[str], bool]) -> str | None:
    """Why a hub kernel is not tried beside the job's own attention; None where it is another. Without its package
    transformers runs the hub's kernel under the job's name."""
    package = PACKAGES.get(job_attention or "")
    if package is None or package.stand_in != name or installed(package.distribution):
        return None
    return f"it is what `{job_attention}`, your job's name for it, runs without its package"


GENERATION_ONLY = "kernels-community/paged-attention"

# Hub kernels with builds for CUDA (the same file, FLASH_ATTN_KERNEL_DEVICES), in the order in which they are tried.
HUB_KERNELS = (
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
    "kernels-community/flash-attn4",
    GENERATION_ONLY,
)

FLASH_KERNELS = tuple(name for name in HUB_KERNELS if name != GENERATION_ONLY)

DENSE = "dense mask"
VARIABLE = "variable length"
CONTAMINATES = "contaminates"
UNKNOWN = "unknown"

FORMS = "`org/repo`, `org/repo@revision`, `org/repo:function` or `org/repo@revision:function`"

# transformers 5.22.2, `integrations/hub_kernels.py`, `is_kernel`
_KERNEL = re.compile(r"[^/:]+/[^/:]+(?:@[^/:]+)?(?::[^/:]+)?")
# what the hub takes as a repository's name (huggingface_hub 2.4, `utils/_validators.py`, `validate_repo_id`)
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def is_kernel(name: str) -> bool:
    """Whether transformers would take the name for a kernel of the hub."""
    return _KERNEL.fullmatch(name) is not None


def repository(name: str) -> str:
    """`org/repo` of a hub kernel's name."""
    return _plain(name).partition(":")[0].partition("@")[0].strip()


def revision(name: str) -> str | None:
    """What a hub kernel's name pins after `@`, None where it pins nothing."""
    return _plain(name).partition(":")[0].partition("@")[2].strip() or None


def _plain(name: str) -> str:
    return name.removeprefix("paged|")  # for generation; transformers trains with what stands behind it


def malformed(name: str) -> str | None:
    """Why a name can stand for no kernel of the hub, with the forms that can; None for one that can."""
    if is_kernel(_plain(name)) and _REPOSITORY.fullmatch(repository(name)):
        return None
    native = ", ".join(f"`{one}`" for one in (*NATIVE, *PACKAGES))
    return f"is neither one of {native} nor the name of a kernel's repository, {FORMS}"


def packing_of(name: str) -> str:
    """What a backend is known to do with packed documents, before it has been tried.

    sdpa, eager and flex get a mask with the documents' borders (transformers 5.22.2, `masking_utils.py`,
    `find_packed_sequence_indices`), flash kernels the borders themselves.
    """
    if _plain(name) in NATIVE:
        return DENSE
    known = name in PACKAGES or repository(name) in HUB_KERNELS
    return VARIABLE if known and repository(name) != GENERATION_ONLY else UNKNOWN
