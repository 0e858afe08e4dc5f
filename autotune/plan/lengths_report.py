"""What `lengths --json` prints and `lengths.json` in the run folder holds."""

from __future__ import annotations

from typing import Any

from autotune.plan.figures import Figures, weight_of
from autotune.plan.packing import bfd, bfd_split, wrapped
from autotune.plan.padding import TruncationMode, padded, truncate
from autotune.plan.rebalance import rebalanced
from autotune.probe.lengths import Lengths

PERCENTILES = (50, 90, 99, 100)


def lengths_report(
    lengths: Lengths,
    *,
    max_length: int | None,
    micro_batch: int,
    accumulation: int = 1,
    truncation_mode: TruncationMode = "keep_start",
    num_proc: int | None = None,
    shuffled: bool = False,
    processes: int = 1,
) -> dict[str, Any]:
    """The report as JSON values (schema 1). Without `max_length` nothing can be packed, and packing is left out."""
    kept = truncate(lengths, max_length, truncation_mode)
    arrangements = [padded(kept, micro_batch), rebalanced(kept, micro_batch, accumulation, processes=processes)]
    if max_length is not None:
        arrangements += [
            pack(lengths, max_length, micro_batch=micro_batch, num_proc=num_proc, shuffled=shuffled)
            for pack in (bfd, bfd_split, wrapped)
        ]
    return {
        "schema": 1,
        "rows": lengths.rows,
        "rows_measured": lengths.rows_measured,
        "rows_known": lengths.rows_known,
        "format": lengths.format,
        "tokens": round(sum(lengths.tokens) * weight_of(lengths)),
        "percentiles": percentiles(lengths),
        "max_length": max_length,
        "arrangements": {figures.arrangement: _described(figures) for figures in arrangements},
    }


def percentiles(lengths: Lengths) -> dict[str, int]:
    """Lengths before truncation that 50, 90, 99 and 100 % of the rows do not exceed; empty for no rows."""
    ascending = sorted(lengths.tokens)
    if not ascending:
        return {}
    return {str(percent): ascending[-(-percent * len(ascending) // 100) - 1] for percent in PERCENTILES}


def _described(figures: Figures) -> dict[str, Any]:
    return {
        "rows": figures.rows,
        "micro_batches": figures.micro_batches,
        "fill": round(figures.fill, 4),
        "useful_tokens": figures.useful_tokens,
        "loss_tokens": figures.loss_tokens,
        "dropped_tokens": figures.dropped_tokens,
        "dropped_rows": figures.dropped_rows,
        "split_rows": figures.split_rows,
        "kept_without_loss": figures.kept_without_loss,
        "largest_micro_batch": {"rows": figures.largest_rows, "positions": figures.largest_positions},
        "exact": figures.exact,
    }
