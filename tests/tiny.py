"""A tiny Qwen3 with random weights and a tokenizer with a chat template, for tests that run TRL for real."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 1000
END = "<|im_end|>"
PAD = "<|endoftext|>"
WORDS = tuple(
    first + second for first in ("ba", "ko", "li", "mu", "re", "ta") for second in ("no", "s", "ri", "lda", "")
)

# ChatML with what the assistant says marked, so that `assistant_only_loss` needs no other template
CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a Qwen3 of 2 layers, 64 wide, with a vocabulary of at most 1000, and its tokenizer, into `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Train a byte-level BPE tokenizer on made-up words and save it in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([words(200, seed=seed) for seed in range(20)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, chat_template=chat_template, model_max_length=4096
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def words(count: int, *, seed: int) -> str:
    """`count` made-up words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def lengths(rows: int, *, seed: int = 0, median: int = 40, longest: int = 400) -> list[int]:
    """Lengths with the long tail of real data: log-normal, from 1 to `longest`."""
    generator = random.Random(seed)
    return [max(1, min(longest, round(median * generator.lognormvariate(0.0, 0.9)))) for _ in range(rows)]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
