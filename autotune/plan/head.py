"""What TRL's fused LM head holds: it never makes the logits, but tiles of them.

Source: TRL 1.16, `trl/kernels/chunked_logprob.py`, with the tile width of `trl/trainer/utils.py`.
"""

from __future__ import annotations

import msgspec

from autotune.plan.training_state import FLOAT_BYTES, Precision

TOKEN_CHUNK = 4096
VOCABULARY_CHUNK = 32768

# On a CPU the backward pass of a tile is plain torch (`_backward_tile`). At its widest expression these are alive:
# scaled logits twice, log-probabilities, probabilities, gradient and two intermediate results in float32, and a mask.
CPU_TILES = 7
CPU_MASK_BYTES = 1


class Head(msgspec.Struct, frozen=True):
    """Bytes: `saved` lives from the forward to the backward pass, `tiles` while the head's gradient is computed, in
    blocks of `tile` each, and `gradient` is the float32 gradient of the head (0 where the head is frozen)."""

    saved: float
    tiles: float
    tile: float
    gradient: float


def head_bytes(
    *, positions: int, hidden: int, vocabulary: int, precision: Precision, trains: bool, triton: bool
) -> Head:
    """The head's part for `positions` predicted positions.

    With Triton the gradient is computed inside the tile, and a tile is as wide as `VOCABULARY_CHUNK` however small the
    vocabulary; without it only as much of it is touched as there are words.
    """
    rows = min(positions, TOKEN_CHUNK)
    width = VOCABULARY_CHUNK if triton else min(vocabulary, VOCABULARY_CHUNK)
    block = float(rows * width * FLOAT_BYTES)
    tiles = float(rows * width * precision.compute)
    if not triton:
        tiles += CPU_TILES * block + rows * width * CPU_MASK_BYTES
    if precision.autocast:
        tiles += float(min(vocabulary, VOCABULARY_CHUNK) * hidden * precision.compute)  # this tile's weights, cast
    return Head(
        # input and result of the last norm, its output, and the copy without the last position
        saved=positions * hidden * (FLOAT_BYTES + 3.0 * precision.residual),
        tiles=tiles + positions * hidden * FLOAT_BYTES,
        tile=block,
        gradient=float(vocabulary * hidden * FLOAT_BYTES) if trains else 0.0,
    )
