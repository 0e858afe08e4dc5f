"""What the layers of a decoder save for the backward pass of one micro-batch.

Counted tensor by tensor from transformers 5.22, `models/qwen3/modeling_qwen3.py` and `models/llama/modeling_llama.py`,
and from what torch 2.13's derivatives keep (`derivatives.yaml`): a product keeps its other factor where that one's
partner has a gradient, a linear layer keeps its input where its weight trains, softmax and rsqrt keep their result. A
model of another family is counted as if it were one of these.
"""

from __future__ import annotations

import msgspec

from autotune.plan.training_state import FLOAT_BYTES, Precision, TrainingState, widths_of
from autotune.probe.model import ModelShape

# Families whose queries and keys have a norm of their own (transformers 5.22)
NORMED_QUERIES = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3"})


class MicroBatch(msgspec.Struct, frozen=True):
    """One forward pass. For packed rows without padding `rows` is 1: they are laid end to end.

    `masked`: attention reads a mask, because of padding or of documents that must not see each other.
    """

    rows: int
    length: int
    masked: bool

    @property
    def positions(self) -> int:
        return self.rows * self.length


def layer_bytes(model: ModelShape, precision: Precision, state: TrainingState) -> float:
    """Bytes that one layer saves for each position, what attention saves aside.

    In float32, with all weights training: both norms keep input and result, and their output is the next product's
    input (6 x hidden); queries and keys keep what their own norms take and give; gate, up, the activation and their
    product are 4 x intermediate; each norm keeps its factor. Under autocast each product keeps a half-precision copy of
    its input of its own. LoRA leaves the inputs of frozen products out and adds what its adapters keep.
    """
    widths = widths_of(model)
    hidden, query, key_value, intermediate = widths.hidden, widths.query, widths.key_value, widths.intermediate
    full = state.adapters is None
    compute, residual = precision.compute, precision.residual
    saved = 2.0 * (hidden * (FLOAT_BYTES + (residual if full else 0)) + FLOAT_BYTES)  # a norm computes in float32
    saved += 3 * intermediate * compute
    if full:
        # three products take the first norm's output and two the second's: one tensor, or a copy for each
        saved += hidden * ((3 + 2) * compute if precision.autocast else 2 * residual)
        saved += intermediate * compute  # `down_proj` keeps its input
    if model.model_type in NORMED_QUERIES:
        heads = (model.attention_heads or 0) + (model.key_value_heads or 0)
        saved += (query + key_value) * (FLOAT_BYTES + (compute if full else 0)) + heads * FLOAT_BYTES
    return saved + sum(_adapter_bytes(widths.of_linear(name)[0], precision, state) for name in state.adapters or ())


def _adapter_bytes(inputs: int, precision: Precision, state: TrainingState) -> int:
    """peft 0.21, `tuners/lora/layer.py`: dropout's mask, what it gives to the first matrix and that gives to the
    second, both in the precision that is computed in. Adapters are float32, so half weights alone do not halve them."""
    value = precision.compute if precision.half_products else FLOAT_BYTES
    return inputs * (state.dropout_mask + value) + state.rank * value


def attention_bytes(
    attention: str, model: ModelShape, precision: Precision, state: TrainingState, micro_batch: MicroBatch
) -> float:
    """Bytes that one layer's attention saves for the whole micro-batch.

    Queries, keys, values and the result, and of the scores:

    * eager: the softmax in float32, rows x heads x length^2, and its half-precision copy; keys and values repeated for
      each query head (transformers 5.22, `eager_attention_forward`);
    * sdpa: the log of each row's sum in float32; with a mask that mask as a float for each layer, rows x length^2, and
      keys and values repeated (transformers 5.22, `integrations/sdpa_attention.py`, `use_gqa_in_sdpa`; torch 2.13,
      `attention.cpp`, `convert_boolean_attn_mask`);
    * any other: as sdpa without a mask.
    """
    widths, heads = widths_of(model), model.attention_heads or 1
    positions, compute = micro_batch.positions, precision.compute
    scores = float(micro_batch.rows) * micro_batch.length**2
    repeated = attention == "eager" or (attention == "sdpa" and micro_batch.masked)
    key_value = widths.query if repeated else widths.key_value
    saved = float(positions) * compute * 2 * (widths.query + key_value)
    if attention == "eager":
        if state.adapters is not None and "o_proj" not in state.adapters:
            saved -= float(positions) * compute * widths.query  # only the frozen output projection would keep it
        copy = compute if compute < FLOAT_BYTES else 0
        return saved + heads * scores * (FLOAT_BYTES + copy)
    saved += float(positions) * heads * FLOAT_BYTES
    if attention == "sdpa" and micro_batch.masked:
        saved += scores * compute
    return saved


def selected_bytes(attention: str, model: ModelShape, precision: Precision, micro_batch: MicroBatch) -> float:
    """Bytes of what fused attention gives in one layer, which selective checkpointing keeps: the result, and the log of
    each row's sum in float32 (TRL 1.16, `models/selective_activation_checkpointing.py`)."""
    if attention == "eager":
        return 0.0
    each = widths_of(model).query * precision.compute + (model.attention_heads or 1) * FLOAT_BYTES
    return float(micro_batch.positions) * each


def cast_bytes(model: ModelShape, precision: Precision, state: TrainingState) -> float:
    """Bytes of a layer's weights cast by autocast, which the backward pass needs. Adapters are float32 also where the
    weights are half already, but for those of quantised models."""
    cast = float(widths_of(model).linear_parameters) if precision.autocast and not state.quantised else 0.0
    if state.adapters is not None and precision.half_products and not state.quantised:
        cast += state.trained_parameters / max(1, model.layers)
    return cast * precision.compute


def mask_bytes(attention: str, precision: Precision, micro_batch: MicroBatch) -> float:
    """Bytes of the mask that all layers share: booleans, for eager numbers (transformers 5.22, `masking_utils.py`)."""
    if not micro_batch.masked and attention != "eager":
        return 0.0
    return float(micro_batch.rows) * micro_batch.length**2 * (precision.weight if attention == "eager" else 1)


def working_bytes(attention: str, model: ModelShape, precision: Precision, micro_batch: MicroBatch) -> float:
    """Bytes of gradients that a layer's backward pass holds beside what was saved: of the MLP's product and of its two
    factors at once, or in eager attention of the softmax, the masked scores and the scores before scaling."""
    widths, positions = widths_of(model), float(micro_batch.positions)
    mlp = positions * (3 * widths.intermediate * precision.compute + 2 * widths.hidden * precision.residual)
    if attention != "eager":
        return mlp
    scores = float(micro_batch.rows) * micro_batch.length**2 * (model.attention_heads or 1)
    return max(mlp, 3 * scores * FLOAT_BYTES)
