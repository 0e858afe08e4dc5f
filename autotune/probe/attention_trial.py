"""One attention backend, tried in a child: a tiny model with a job's heads, run on packed documents.

What it computes is held against sdpa in float32 with the same weights, and its forward and backward are timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from autotune.kernel_revision import kernel_revision
from autotune.probe.machine import Backend
from autotune.probe.model import first_line, head_dim, model_class, read_config

DOCUMENT_TOKENS = (11, 13)  # two documents of different lengths, neither a multiple of a kernel's block

# What is timed: on a GPU enough tokens that attention outweighs the launch of its kernels, and few enough that eager's
# scores of 32 heads fit beside each other (32 x 4096^2 in float32 are 2 GB); on a CPU what is run anyway.
TIMED_TOKENS = {"gpu": (1024, 512, 2048, 512), "cpu": DOCUMENT_TOKENS}
WARM_UPS = {"gpu": 3, "cpu": 1}
REPETITIONS = {"gpu": 9, "cpu": 3}

# How far a backend may be from sdpa in float32: the largest difference of logits as a share of their spread, and of
# a weight's gradient as a share of its norm. sdpa and eager themselves are at most 3e-2 off in bf16 (8 bits of
# mantissa), 4e-3 in fp16 (11 bits) and 1e-6 in float32, and a GPU sums in another order (torch 2.13 on a CPU, 2 to 64
# heads of 64 to 256). A softmax scale that is 10 % off moves the logits by 0.12 to 0.22, a missing mask by 1.8 to 4.5.
LIMITS = {"bf16": 1e-1, "fp16": 2e-2, "float32": 1e-4}


class Outcome(msgspec.Struct, frozen=True):
    """What came of a trial: `failure` is None when it ran; `actual` is the implementation that ran, `apart` tells
    whether it kept the packed documents apart, `revision` of what hub kernel it is.

    `error`: the largest difference of its logits from sdpa's in float32, as a share of their spread.
    `milliseconds`: median of a forward and a backward; None where it could not be timed, with `untimed` for why.
    """

    failure: str | None = None
    actual: str = ""
    apart: bool = False
    error: float | None = None
    milliseconds: float | None = None
    untimed: str | None = None
    revision: str | None = None


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

    @property
    def arithmetic(self) -> str:
        """Of the tiny model: flash kernels take half precision only; on a CPU jobs keep float32 weights."""
        return "float32" if self.backend == "cpu" else self.precision

    @property
    def size(self) -> str:
        return "cpu" if self.backend == "cpu" else "gpu"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None  # some configs hold a list, one per layer


def try_backend(name: str, heads: Heads) -> Outcome:
    """Run a one-layer Qwen3 with the model's heads, on the inputs that TRL's collator makes of packed documents."""
    import torch

    step = "loading"
    try:
        model = _tiny_model(name, heads)
        step = "forward"
        packed = packed_inputs(DOCUMENT_TOKENS, heads.device)
        logits = model(**packed, use_cache=False).logits
        step = "backward"
        _scalar(logits).backward()
        if not all(bool(torch.isfinite(gradient).all()) for gradient in _gradients(model).values()):
            return Outcome(failure="its backward gave values that are not finite")
        step = "forward"
        apart = _keeps_documents_apart(model, packed, logits.detach())
        step = "comparison"
        # one that mixes documents can still be right where there is one
        compared = packed if apart else _one_document(heads.device)
        error, gradient_error = distance(model, _reference(model, heads), compared)
    except Exception as error_raised:  # whatever a kernel raises, it is the reason
        return Outcome(failure=f"fails in {step}: {first_line(error_raised)}")
    limit = LIMITS[heads.arithmetic]
    for what, far in (("logits", error), ("gradients", gradient_error)):
        if not far <= limit:  # so that a value that is no number fails, too
            return Outcome(failure=f"its {what} are {far:.1e} off sdpa's in float32, at most {limit:.0e}", error=error)
    milliseconds, untimed = _timed(model, heads)
    actual = model.config._attn_implementation
    return Outcome(
        actual=actual,
        apart=apart,
        error=error,
        milliseconds=milliseconds,
        untimed=untimed,
        revision=kernel_revision(actual),
    )


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
        max_position_embeddings=max(TIMED_TOKENS[heads.size]),
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(heads.arithmetic, torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
    return model.to(device=heads.device, dtype=dtype).train()


def _reference(model: Any, heads: Heads) -> Any:
    """sdpa in float32 with the weights of `model`, its rounded ones."""
    import torch

    reference = _tiny_model("sdpa", heads).to(dtype=torch.float32)
    reference.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return reference


def _scalar(logits: Any) -> Any:
    return logits.float().square().sum()  # of the mean, gradients would be too small for fp16


def _gradients(model: Any) -> dict[str, Any]:
    return {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}


def distance(model: Any, reference: Any, inputs: dict[str, Any]) -> tuple[float, float]:
    """Largest difference of the logits over their spread, and of a weight's gradient over its norm."""
    import torch

    found = []
    for one in (model, reference):
        one.zero_grad()
        logits = one(**inputs, use_cache=False).logits
        _scalar(logits).backward()
        found.append((logits.detach().float(), _gradients(one)))
    (logits, gradients), (exact, exact_gradients) = found
    shares = [(gradients[name] - gradient).norm() / gradient.norm() for name, gradient in exact_gradients.items()]
    return float((logits - exact).abs().max() / exact.std()), float(torch.stack(shares).max())


def packed_inputs(documents: Sequence[int], device: str) -> dict[str, Any]:
    """Documents of these lengths in one row as TRL's collator gives them: positions and boundaries, no attention mask
    (TRL 1.16, `sft_trainer.py`, DataCollatorForLanguageModeling)."""
    import torch

    positions = torch.cat([torch.arange(length) for length in documents])[None]
    ends = torch.tensor(documents).cumsum(0)
    boundaries = torch.cat([torch.zeros(1, dtype=ends.dtype), ends]).to(dtype=torch.int32, device=device)
    return {
        "input_ids": (torch.arange(sum(documents)) % 64).to(device)[None],
        "position_ids": positions.to(device),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(documents),
        "max_length_k": max(documents),
    }


def _one_document(device: str) -> dict[str, Any]:
    import torch

    return {"input_ids": torch.arange(sum(DOCUMENT_TOKENS), device=device)[None]}


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


def _timed(model: Any, heads: Heads) -> tuple[float | None, str | None]:
    """Median milliseconds of a forward and a backward, or None and why not."""
    try:
        inputs = packed_inputs(TIMED_TOKENS[heads.size], heads.device)
        seconds = [_seconds(model, inputs, heads) for _ in range(WARM_UPS[heads.size] + REPETITIONS[heads.size])]
    except Exception as error:  # it ran at the small size: the likeliest is memory
        return None, first_line(error)
    return 1000 * statistics.median(seconds[WARM_UPS[heads.size] :]), None


def _seconds(model: Any, inputs: dict[str, Any], heads: Heads) -> float:
    _synchronise(heads)
    begin = time.perf_counter()
    model.zero_grad()
    _scalar(model(**inputs, use_cache=False).logits).backward()
    _synchronise(heads)
    return time.perf_counter() - begin


def _synchronise(heads: Heads) -> None:
    import torch

    if heads.backend != "cpu":
        torch.accelerator.synchronize()
