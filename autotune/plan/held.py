"""What is held in memory at the moments of a training step, and the peak that follows from an allocator's habits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

TermName = Literal[
    "process",
    "weights",
    "gradients",
    "optimizer_state",
    "casts",
    "activations",
    "attention",
    "head",
    "working",
    "optimizer_step",
    "generation",
    "slack",
]

# glibc 2.36, malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX on 64 bits: a freed block of at least this size goes back to
# the system. The threshold starts at 128 kB and grows to the size of each block that was freed, up to here, so in a
# training every smaller block soon comes from the heap, which keeps what it once had.
HEAP_BLOCK_BYTES = 32 * 2**20


class Held(msgspec.Struct, frozen=True):
    """Bytes of one term, in blocks of `block_bytes` each (the largest tensors among them)."""

    term: TermName
    bytes: float
    block_bytes: float = 0.0


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at the peak, by what they are held for. A term that is not there at the peak is 0.

    * `process`: libraries and buffers of a process on a CPU, context and library workspaces on a GPU. An estimate.
    * `weights`, `gradients`, `optimizer_state`: `autotune.plan.training_state`.
    * `casts`: half-precision copies of weights under autocast, and weights dequantised for one product.
    * `activations`, `attention`: what the layers save for the backward pass, `autotune.plan.activations`.
    * `head`: hidden states, tiles and float32 gradients of TRL's fused LM head, `autotune.plan.head`.
    * `working`: gradients that one layer's backward pass holds beside what was saved.
    * `optimizer_step`: temporaries of the optimizer's own step.
    * `generation`: vLLM's fraction of the card in colocate mode (`vllm_gpu_memory_utilization`).
    * `slack`: what the allocator holds and nothing uses. An estimate.
    """

    process: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    casts: int = 0
    activations: int = 0
    attention: int = 0
    head: int = 0
    working: int = 0
    optimizer_step: int = 0
    generation: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


def peak(moments: Mapping[str, Sequence[Held]], *, keeps_blocks_below: float = 0.0) -> Terms:
    """The terms at the moment that holds most.

    `keeps_blocks_below`: an allocator that keeps freed blocks smaller than this holds, at any later moment, the most
    that each term's ever took: the holes that one term leaves are of another size than what the next asks for. Larger
    blocks are there only while they are used.
    """
    sums: dict[str, float] = {}
    small = [_sums(one for one in held if one.block_bytes < keeps_blocks_below) for held in moments.values()]
    for term in {name for each in small for name in each}:
        sums[term] = max(each.get(term, 0.0) for each in small)
    large = [_sums(one for one in held if one.block_bytes >= keeps_blocks_below) for held in moments.values()]
    for term, value in max(large, key=lambda each: sum(each.values())).items():
        sums[term] = sums.get(term, 0.0) + value
    return Terms(**{name: round(value) for name, value in sums.items()})


def _sums(held: Iterable[Held]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in held:
        sums[one.term] = sums.get(one.term, 0.0) + one.bytes
    return sums
