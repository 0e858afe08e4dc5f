"""Machines, lengths and models made up for tests, each as the probes would give it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.probe.gpus import Gpu
from autotune.probe.host import Cpu
from autotune.probe.lengths import Lengths
from autotune.probe.machine import Abilities, AttentionBackend, Fact, Machine
from autotune.probe.model import ModelShape

GIB = 2**30

SDPA = AttentionBackend("sdpa", usable=True, packing="dense mask", reason="part of torch")
EAGER = AttentionBackend("eager", usable=True, packing="dense mask", reason="plain matrix products")
FLASH = AttentionBackend("flash_attention_2", usable=False, packing="unknown", reason="no GPU here")

VARYING = AttentionBackend("mine/varlen", usable=True, packing="variable length", reason="ran here")

# All that there is
ABLE = Abilities(
    checkpointing=("full", "selective", "every_n_layers", "offload"), optimizers=("adamw_bnb_8bit", "adamw_torch_8bit")
)

SHAPE = ModelShape(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    parameters=160_000,
    layers=2,
    hidden_size=64,
    vocabulary=1000,
    attention_heads=4,
    key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    linear_attention=False,
    dtype="float32",
)


def cpu_machine(*, cores: int = 2) -> Machine:
    """A machine without a GPU on which sdpa and eager attention run."""
    return machine(backend="cpu", cpu=Cpu(name="AMD EPYC", cores=cores, bf16=True, bf16_flag="avx512_bf16"))


def gpu_machine(*, gpus: int = 1) -> Machine:
    return machine(backend="cuda", gpus=tuple(gpu(index) for index in range(gpus)), driver="580.95.05")


def gpu(index: int = 0) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd",
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        memory_bytes=80 * GIB,
        free_bytes=79 * GIB,
        mig=None,
        linked_to=(),
        busy_processes=0,
    )


def machine(**changes: Any) -> Machine:
    fields: dict[str, Any] = {
        "backend": "cpu",
        "gpus": (),
        "driver": None,
        "cuda_driver": None,
        "cpu": Cpu(name="AMD EPYC", cores=2, bf16=True, bf16_flag="avx512_bf16"),
        "ram_bytes": 16 * GIB,
        "free_ram_bytes": 8 * GIB,
        "versions": {"trl": "1.16.0", "transformers": "5.22.2", "torch": "2.13.0", "kernels": "0.17.2"},
        "precision": Fact("bf16", "this CPU has bf16 arithmetic (avx512_bf16)"),
        "attention": (SDPA, EAGER, FLASH),
    }
    return Machine(**(fields | changes))


def lengths_of(tokens: Sequence[int], *, prompt: Sequence[int] | int = 0, rows: int | None = None) -> Lengths:
    """Rows of these lengths, of which the first `prompt` tokens bear no loss, measured of `rows` rows."""
    starts = [prompt] * len(tokens) if isinstance(prompt, int) else list(prompt)
    pairs = list(zip(tokens, starts, strict=True))
    return Lengths(
        rows=rows or len(tokens),
        tokens=tuple(tokens),
        first_loss=tuple(start if start < length else -1 for length, start in pairs),
        last_loss=tuple(length - 1 if start < length else -1 for length, start in pairs),
        loss_tokens=tuple(max(0, length - start) for length, start in pairs),
        format="text",
        columns=("text",),
        seconds=0.0,
        row_numbers=tuple(range(len(tokens))) if rows else (),
    )
