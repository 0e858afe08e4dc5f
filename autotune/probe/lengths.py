"""Token lengths of the data as TRL will see them."""

from __future__ import annotations

import msgspec


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Every row's length before truncation, in the data's order, and where its loss tokens lie.

    `tokens[i]` is row i's length, `first_loss[i]` and `last_loss[i]` the positions of its first and last token that
    bears loss (-1 where none does), `loss_tokens[i]` their number.
    """

    rows: int  # of the data
    tokens: tuple[int, ...]  # of the rows measured
    first_loss: tuple[int, ...]
    last_loss: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    format: str  # text | prompt-completion | messages | ...
    columns: tuple[str, ...]
    seconds: float
    row_numbers: tuple[int, ...] = ()  # in the data, from 0, of the rows measured; empty when all were
    rows_known: bool = True  # False: a stream, of which the first rows were read; `rows` counts those

    @property
    def rows_measured(self) -> int:
        return len(self.tokens)
