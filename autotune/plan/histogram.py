"""How many rows are how long, in bins that double."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec


class Bin(msgspec.Struct, frozen=True):
    """The rows of `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int


def histogram(tokens: Sequence[int]) -> tuple[Bin, ...]:
    """Bins 0, 1, 2-3, 4-7, 8-15 and so on, from the first to the last that holds a row."""
    rows_by_bits = Counter(map(int.bit_length, tokens))
    if not rows_by_bits:
        return ()
    bits = range(min(rows_by_bits), max(rows_by_bits) + 1)
    return tuple(Bin(2 ** (one - 1) if one else 0, 2**one - 1, rows_by_bits[one]) for one in bits)
