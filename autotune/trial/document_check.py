"""Do packed documents stay apart in this model with this attention? Runs in a child.

Two documents in one row, as TRL's collator lays them out (`position_ids`, no mask). Leakage: how far the second's
logits move when the first is exchanged. Parity: how far their loss is from that of the two alone. Both in float32,
where neither hides behind rounding; a kernel that takes only half precision is checked in that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCUMENT_TOKENS = 48


def check(request: dict[str, Any], _folder: Path) -> dict[str, float | str]:
    """`request`: model, revision, trust_remote_code, attention. Returns leakage, parity (absolute) and the dtype."""
    import torch
    from transformers import AutoModelForCausalLM

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
    documents = torch.randint(0, vocabulary, (3, DOCUMENT_TOKENS), device=device)

    def logits(*parts: Any) -> Any:
        row = torch.cat(parts)[None]
        positions = torch.cat([torch.arange(len(part), device=device) for part in parts])[None]
        with torch.no_grad():
            return model(input_ids=row, position_ids=positions, use_cache=False).logits[0].float()

    def loss(scores: Any, document: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores[:-1], document[1:], reduction="sum")

    first, other, second = documents
    packed = logits(first, second)
    exchanged = logits(other, second)
    alone = loss(logits(first), first) + loss(logits(second), second)
    together = loss(packed[:DOCUMENT_TOKENS], first) + loss(packed[DOCUMENT_TOKENS:], second)
    scored = 2 * (DOCUMENT_TOKENS - 1)
    return {
        "leakage": float((packed[DOCUMENT_TOKENS:] - exchanged[DOCUMENT_TOKENS:]).abs().max()),
        "parity": float((together - alone).abs() / scored),
        "dtype": str(dtype).removeprefix("torch."),
    }
