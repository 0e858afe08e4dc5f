"""What the probe says about what it found: facts with their reasons, and problems with what to do about them."""

from __future__ import annotations

import msgspec


class Fact(msgspec.Struct, frozen=True):
    """A probed value with its reason."""

    value: str
    reason: str


class Problem(msgspec.Struct, frozen=True):
    """Something that keeps this machine from its best, and what to do about it."""

    what: str
    hint: str
