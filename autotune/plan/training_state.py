"""What a training holds whatever its batch: weights, gradients, optimizer state, and in which precision."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.job import Job, effective
from autotune.probe.model import ModelShape

FLOAT_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

# bitsandbytes: blocks of 64 values share a float32 scale (4 bits); a row of values shares one (8 bits)
FOUR_BIT_BYTES = 0.5 + FLOAT_BYTES / 64
EIGHT_BIT_BYTES = 1.0

DEFAULT_RANK = 16  # trl 1.16, `trl/trainer/model_config.py`, `lora_r`
DEFAULT_DROPOUT = 0.05  # the same, `lora_dropout`
# peft 0.21, `utils/constants.py`: of Llama, Qwen2, Qwen3, Mistral and Gemma, where the job names none
DEFAULT_TARGETS = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Values that an optimizer keeps for each trained parameter, by the start of its name (transformers 5.22,
# `training_args.py`, `OptimizerNames`): how many, and their bytes where they are not the parameter's own. The first
# that fits counts; what is not here is counted as AdamW.
OPTIMIZER_STATE: tuple[tuple[str, int, float | None], ...] = (
    ("adamw_torch_4bit", 2, 0.5),
    ("adamw_torch_8bit", 2, 1.0),
    ("adamw_8bit", 2, 1.0),
    ("adamw_bnb_8bit", 2, 1.0),
    ("paged_adamw_8bit", 2, 1.0),
    ("ademamix_8bit", 3, 1.0),
    ("paged_ademamix_8bit", 3, 1.0),
    ("lion_8bit", 1, 1.0),
    ("paged_lion_8bit", 1, 1.0),
    ("rmsprop_bnb_8bit", 1, 1.0),
    ("ademamix", 3, None),
    ("paged_ademamix", 3, None),
    ("lion", 1, None),
    ("paged_lion", 1, None),
    ("rmsprop", 1, None),
    ("adagrad", 1, None),
    ("sgd", 0, None),
    ("adafactor", 0, None),  # two vectors for each matrix
)
ADAMW_STATE = (2, None)


class Widths(msgspec.Struct, frozen=True):
    """Values per position of a layer's tensors."""

    hidden: int
    query: int
    key_value: int
    intermediate: int

    def of_linear(self, name: str) -> tuple[int, int]:
        """Inputs and outputs of a linear layer, by its name in Llama and its kin."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key_value),
            "v_proj": (self.hidden, self.key_value),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }.get(name, (self.hidden, self.hidden))

    @property
    def linear_parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in map(self.of_linear, ALL_LINEAR))


class Precision(msgspec.Struct, frozen=True):
    """Bytes of a weight, of a value in a matrix product, and of a value between layers."""

    weight: int
    compute: int
    residual: int
    half_products: bool = False  # autocast, also where the weights are half already

    @property
    def autocast(self) -> bool:
        """Whether weights are cast for each product."""
        return self.compute < self.weight


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, and what decides them.

    `largest` is the largest trained tensor's gradient, `dropout_mask` what dropout before an adapter keeps of each
    value: a factor of its own on a CPU, a boolean on a GPU (torch 2.13, `Dropout.cpp`), nothing at a rate of 0.
    """

    weights: int
    gradients: int
    optimizer_state: int
    optimizer_step: int
    trained_parameters: int
    adapters: tuple[str, ...] | None  # the linear layers with LoRA; None: every weight trains
    trains_head: bool
    largest: int
    quantised: bool
    rank: int = 0
    dropout_mask: int = 0


def widths_of(model: ModelShape) -> Widths:
    """The widths, with the usual ones where a config does not tell."""
    heads = model.attention_heads or 1
    head_dim = model.head_dim or model.hidden_size // heads
    return Widths(
        hidden=model.hidden_size,
        query=heads * head_dim,
        key_value=(model.key_value_heads or heads) * head_dim,
        intermediate=model.intermediate_size or 4 * model.hidden_size,
    )


def precision_of(job: Job, model: ModelShape, *, on_cpu: bool) -> Precision:
    """TRL 1.16 loads weights in float32 unless `dtype` says otherwise, and computes in bf16 by autocast unless told
    not to (`trl/trainer/base_config.py`). On a CPU accelerate 1.15 does no fp16 autocast (`accelerator.py`)."""
    dtype = str(effective(job, "dtype") or "float32").removeprefix("torch.")
    weight = DTYPE_BYTES.get(model.dtype or "float32" if dtype == "auto" else dtype, FLOAT_BYTES)
    resolved = job.resolved
    autocast = bool(resolved.get("bf16")) or (bool(resolved.get("fp16")) and not on_cpu)
    compute = min(weight, 2) if autocast else weight
    return Precision(weight=weight, compute=compute, residual=weight, half_products=autocast)


def training_state(job: Job, model: ModelShape, *, on_cpu: bool) -> TrainingState:
    """Bytes that do not depend on the batch. With AdamW in float32 they are 16 for each parameter that trains."""
    resolved = job.resolved
    precision = precision_of(job, model, on_cpu=on_cpu)
    widths = widths_of(model)
    quantised = bool(resolved.get("load_in_4bit") or resolved.get("load_in_8bit"))
    weights = float(model.parameters * precision.weight)
    if quantised:
        linear = widths.linear_parameters * model.layers
        each = FOUR_BIT_BYTES if resolved.get("load_in_4bit") else EIGHT_BIT_BYTES
        weights = linear * each + max(0, model.parameters - linear) * precision.weight
    vocabulary = model.vocabulary * model.hidden_size
    if not resolved.get("use_peft"):
        trained, trained_bytes = model.parameters, precision.weight
        adapters, trains_head = None, True
        largest = max(vocabulary, model.hidden_size * widths.intermediate)
    else:
        adapters = _targets(resolved)
        saved = resolved.get("lora_modules_to_save") or ()
        trains_head = "lm_head" in saved
        rank = resolved.get("lora_r") or DEFAULT_RANK
        sizes = [rank * sum(widths.of_linear(name)) for name in adapters]
        trained = sum(sizes) * model.layers + vocabulary * sum(name in saved for name in ("lm_head", "embed_tokens"))
        # peft 0.21 casts adapters of half-precision models to float32 (`autocast_adapter_dtype`); TRL 1.16 those of
        # quantised ones to bf16 (`sft_trainer.py`)
        trained_bytes = 2 if quantised else FLOAT_BYTES
        weights += trained * trained_bytes
        largest = vocabulary if trains_head else max(sizes, default=0)
    dropout = resolved.get("lora_dropout", DEFAULT_DROPOUT) if adapters is not None else 0.0
    values, value_bytes = _optimizer(str(resolved.get("optim") or "adamw_torch_fused"))
    return TrainingState(
        weights=round(weights),
        gradients=trained * trained_bytes,
        optimizer_state=round(trained * values * (trained_bytes if value_bytes is None else value_bytes)),
        optimizer_step=_step_bytes(
            str(resolved.get("optim") or ""), trained * trained_bytes, largest * trained_bytes, on_cpu
        ),
        trained_parameters=trained,
        adapters=adapters,
        trains_head=trains_head,
        largest=largest * trained_bytes,
        quantised=quantised,
        rank=0 if adapters is None else resolved.get("lora_r") or DEFAULT_RANK,
        dropout_mask=0 if not dropout else FLOAT_BYTES if on_cpu else 1,
    )


def _targets(resolved: dict[str, Any]) -> tuple[str, ...]:
    named = resolved.get("lora_target_modules")
    if named is None:
        return DEFAULT_TARGETS
    if isinstance(named, str):
        named = [named]
    return ALL_LINEAR if "all-linear" in named else tuple(named)


def _optimizer(name: str) -> tuple[int, float | None]:
    return next((found[1:] for found in OPTIMIZER_STATE if name.startswith(found[0])), ADAMW_STATE)


def _step_bytes(name: str, trained: int, largest: int, on_cpu: bool) -> int:
    """Temporaries of `optimizer.step`. Fused AdamW has none; the multi-tensor one takes the square roots of all second
    moments at once (torch 2.13, `optim/adam.py`, `_multi_tensor_adam`); on a CPU, where torch goes parameter by
    parameter, those of the largest and their quotient (`_single_tensor_adam`)."""
    if name != "adamw_torch":
        return 0
    return 2 * largest if on_cpu else trained
