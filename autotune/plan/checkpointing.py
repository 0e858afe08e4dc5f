"""The ways in which activations are checkpointed, each by its name.

`off` keeps what every layer saves for the backward pass, `full` only each layer's input; `every N layers` checkpoints
each Nth layer, `selective` keeps the results of attention beside the inputs, and `offload` holds the inputs in host
memory. Several at once are joined by commas, as `every 2 layers, offload`.
"""

from __future__ import annotations

import functools
import re

import msgspec

OFF = "off"
FULL = "full"
SELECTIVE = "selective"
OFFLOAD = "offload"


class Checkpointing(msgspec.Struct, frozen=True):
    """`every`: one of how many layers is checkpointed; 0 where none is."""

    every: int
    selective: bool = False
    offload: bool = False

    def __str__(self) -> str:
        if self.every == 0:
            return OFF
        parts = [f"every {self.every} layers"] if self.every > 1 else []
        parts += [SELECTIVE] * self.selective + [OFFLOAD] * self.offload
        return ", ".join(parts) or FULL

    def layers(self, count: int) -> int:
        """How many of `count` layers are checkpointed: the first, and each `every`th after it (transformers 5.22,
        `modeling_utils.py`, `_set_gradient_checkpointing`)."""
        return -(-count // self.every) if self.every else 0


@functools.lru_cache(maxsize=256)
def parse(name: str) -> Checkpointing:
    """The way that a name stands for. Raises ValueError for a name that stands for none."""
    if name in (OFF, FULL):
        return Checkpointing(0 if name == OFF else 1)
    parts = name.split(", ")
    numbered = re.fullmatch(r"every (\d+) layers", parts[0])
    found = Checkpointing(int(numbered[1]) if numbered else 1, SELECTIVE in parts, OFFLOAD in parts)
    if str(found) != name:
        raise ValueError(f"no way of checkpointing is called `{name}`")
    return found


def keeps_at_least(one: str, other: str) -> bool:
    """Whether the way `one` surely holds no less on the device than `other`, all else being equal."""
    mine, theirs = parse(one), parse(other)
    if mine == theirs or mine.every == 0:
        return True
    if theirs.every == 0:
        return False
    return mine.every >= theirs.every and mine.selective >= theirs.selective and mine.offload <= theirs.offload
