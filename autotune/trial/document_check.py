"""Do packed documents stay apart in this model with this attention? Runs in a child.

Two documents in one row, as TRL's own collator lays them out for packed rows (their positions and borders, no mask).
Leakage: how far the second's logits move when the first is exchanged. Parity: how far their loss is from that of the
two alone. Both in float32, where neither hides behind rounding; a kernel that takes only half precision is checked in
that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCUMENT_TOKENS = 48


def check(request: dict[str, Any], _folder: Path) -> dict[str, float | str]:
    """`request`: model, revision, trust_remote_code, attention. Returns leakage, parity (absolute) and the dtype."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = device == "cuda" and "flash" in request["attention"]
    dtype = torch.bfloat16 if half else torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        request["model"],
        revision=request["revision"],
        trust_remote_code=request["trust_remote_code"],
        attn_implementation=request["attention"],
        dtype=dtype,
    ).to(device)
    model.eval()
    vocabulary = model.config.get_text_config().vocab_size
    documents = torch.randint(0, vocabulary, (3, DOCUMENT_TOKENS))

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

    def logits(*parts: Any) -> Any:
        row = collator([{"input_ids": torch.cat(parts).tolist(), "seq_lengths": [len(part) for part in parts]}])
        del row["labels"]
        inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in row.items()}
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits[0].float()

    def loss(scores: Any, document: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores[:-1], document[1:], reduction="sum")

    first, other, second = documents
    packed = logits(first, second)
    exchanged = logits(other, second)
    first, second = first.to(device), second.to(device)
    alone = loss(logits(first), first) + loss(logits(second), second)
    together = loss(packed[:DOCUMENT_TOKENS], first) + loss(packed[DOCUMENT_TOKENS:], second)
    scored = 2 * (DOCUMENT_TOKENS - 1)
    return {
        "leakage": float((packed[DOCUMENT_TOKENS:] - exchanged[DOCUMENT_TOKENS:]).abs().max()),
        "parity": float((together - alone).abs() / scored),
        "dtype": str(dtype).removeprefix("torch."),
    }
