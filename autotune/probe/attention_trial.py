"""One attention backend, tried in a child: a tiny model with a job's heads, run on packed documents."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.probe.machine import Backend
from autotune.probe.model import first_line, head_dim, model_class, read_config

DOCUMENT_TOKENS = (11, 13)  # two documents of different lengths, neither a multiple of a kernel's block


class Outcome(msgspec.Struct, frozen=True):
    """What came of a trial: `failure` is None when it ran; `actual` is the implementation that ran, and `apart` tells
    whether it kept the packed documents apart."""

    failure: str | None = None
    actual: str = ""
    apart: bool = False


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """With what heads, where and in what precision backends are tried. `architecture` is the model's class, None when
    not told."""

    backend: Backend
    precision: str
    attention_heads: int
    key_value_heads: int
    head_dim: int
    architecture: Any = None

    @classmethod
    def of(cls, request: dict[str, Any]) -> Heads:
        told: dict[str, Any] = dict(request["model"])
        architecture = None
        if told.get("model"):
            trust = bool(told.get("trust_remote_code"))
            config = read_config(told["model"], revision=told.get("revision"), trust_remote_code=trust)
            architecture = model_class(config, told["model"], trust_remote_code=trust)
            text = config.get_text_config()
            read = {
                "num_attention_heads": getattr(text, "num_attention_heads", None),
                "num_key_value_heads": getattr(text, "num_key_value_heads", None),
                "head_dim": head_dim(text),
            }
            told = {**read, **{name: value for name, value in told.items() if value is not None}}
        heads = _whole(told.get("num_attention_heads")) or 2
        shared = _whole(told.get("num_key_value_heads")) or heads
        return cls(
            backend=request["backend"],
            precision=request["precision"],
            attention_heads=heads,
            key_value_heads=shared if heads % shared == 0 else heads,
            head_dim=_whole(told.get("head_dim")) or 64,
            architecture=architecture,
        )

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "rocm" else self.backend  # torch's name for AMD's GPUs is CUDA's


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None  # some configs hold a list, one per layer


def try_backend(name: str, heads: Heads) -> Outcome:
    """Run a one-layer Qwen3 with the model's heads, on the inputs that TRL's collator makes of packed documents."""
    import torch

    step = "loading"
    try:
        model = _tiny_model(name, heads)
        step = "forward"
        tokens = _packed_inputs(heads.device)
        logits = model(**tokens, use_cache=False).logits
        step = "backward"
        logits.float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return Outcome(failure="its backward gave values that are not finite")
        step = "forward"
        apart = _keeps_documents_apart(model, tokens, logits.detach())
    except Exception as error:  # whatever a kernel raises, it is the reason
        return Outcome(failure=f"fails in {step}: {first_line(error)}")
    return Outcome(actual=model.config._attn_implementation, apart=apart)


def _tiny_model(name: str, heads: Heads) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads.attention_heads,
        num_key_value_heads=heads.key_value_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=64,
    )
    # flash kernels take half precision only; on a CPU jobs keep float32 weights
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(heads.precision, torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    return model.to(device=heads.device, dtype=torch.float32 if heads.backend == "cpu" else dtype).train()


def _packed_inputs(device: str) -> dict[str, Any]:
    """Two documents in one row as TRL's collator gives them: positions and boundaries, no attention mask
    (TRL 1.16, `sft_trainer.py`, DataCollatorForLanguageModeling)."""
    import torch

    total = sum(DOCUMENT_TOKENS)
    positions = torch.cat([torch.arange(length) for length in DOCUMENT_TOKENS])[None]
    boundaries = torch.tensor([0, DOCUMENT_TOKENS[0], total], dtype=torch.int32, device=device)
    return {
        "input_ids": torch.arange(total, device=device)[None],
        "position_ids": positions.to(device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(DOCUMENT_TOKENS),
        "max_length_k": max(DOCUMENT_TOKENS),
    }


def _keeps_documents_apart(model: Any, tokens: dict[str, Any], logits: Any) -> bool:
    """Whether the second document's logits stay as they are when the first document is another."""
    import torch

    first = DOCUMENT_TOKENS[0]
    other = tokens["input_ids"].clone()
    other[:, :first] = 63 - other[:, :first]
    with torch.no_grad():
        changed = model(**{**tokens, "input_ids": other}, use_cache=False).logits
    # a causal mask without the documents' borders moves these logits by 0.38, one with them by 0 (sdpa, float32)
    return bool(torch.allclose(changed[:, first:].float(), logits[:, first:].float(), atol=0.01, rtol=0.0))
