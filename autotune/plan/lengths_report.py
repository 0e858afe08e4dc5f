"""What `lengths --json` prints and `lengths.json` in the run folder holds."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.plan.figures import Arrangement, Figures, weight_of
from autotune.plan.findings import LENGTHS, Findings, find, kept_share
from autotune.plan.histogram import histogram
from autotune.plan.packing import bfd, bfd_split, wrapped
from autotune.plan.padding import Kept, TruncationMode, padded, truncate
from autotune.plan.rebalance import rebalanced
from autotune.probe.lengths import Lengths

PERCENTILES = (50, 90, 99, 100)


class LengthsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The data's lengths and every arrangement of them, for one `max_length` and batch."""

    lengths: Lengths
    max_length: int | None
    micro_batch: int
    accumulation: int
    processes: int
    kept: Kept
    figures: dict[Arrangement, Figures]
    findings: Findings

    def steps_per_epoch(self, figures: Figures) -> int:
        """Optimizer steps of one pass over the data; the last may hold fewer rows."""
        return -(-figures.rows // (self.micro_batch * self.accumulation * self.processes))


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
    position_limit: int | None = None,
) -> LengthsReport:
    """Plan every arrangement. Without `max_length` nothing can be packed, and packing is left out."""
    kept = truncate(lengths, max_length, truncation_mode)
    arrangements = [padded(kept, micro_batch), rebalanced(kept, micro_batch, accumulation, processes=processes)]
    if max_length is not None:
        arrangements += [
            pack(lengths, max_length, micro_batch=micro_batch, num_proc=num_proc, shuffled=shuffled)
            for pack in (bfd, bfd_split, wrapped)
        ]
    figures: dict[Arrangement, Figures] = {one.arrangement: one for one in arrangements}
    return LengthsReport(
        lengths=lengths,
        max_length=max_length,
        micro_batch=micro_batch,
        accumulation=accumulation,
        processes=processes,
        kept=kept,
        figures=figures,
        findings=find(
            lengths,
            figures,
            kept,
            max_length=max_length,
            micro_batch=micro_batch,
            position_limit=position_limit,
        ),
    )


def to_builtins(report: LengthsReport) -> dict[str, Any]:
    """The report as JSON values (schema 1)."""
    lengths = report.lengths
    weight = weight_of(lengths)
    longest = max(lengths.tokens, default=0)
    shorter = [one for one in LENGTHS if one < longest]
    return {
        "schema": 1,
        "rows": lengths.rows,
        "rows_measured": lengths.rows_measured,
        "rows_known": lengths.rows_known,
        "format": lengths.format,
        "tokens": round(sum(lengths.tokens) * weight),
        "loss_tokens": round(sum(lengths.loss_tokens) * weight),
        "percentiles": percentiles(lengths),
        "histogram": [
            {"low": one.low, "high": one.high, "rows": round(one.rows * weight)} for one in histogram(lengths.tokens)
        ],
        "max_length": report.max_length,
        "keeps": {str(one): round(kept_share(lengths, one), 4) for one in shorter},
        "arrangements": {name: _described(report, figures) for name, figures in report.figures.items()},
        "findings": list(report.findings.sentences),
        "warnings": [msgspec.to_builtins(one) for one in report.findings.warnings],
    }


def percentiles(lengths: Lengths) -> dict[str, int]:
    """Lengths before truncation that 50, 90, 99 and 100 % of the rows do not exceed; empty for no rows."""
    ascending = sorted(lengths.tokens)
    if not ascending:
        return {}
    return {str(percent): ascending[-(-percent * len(ascending) // 100) - 1] for percent in PERCENTILES}


def _described(report: LengthsReport, figures: Figures) -> dict[str, Any]:
    return {
        "rows": figures.rows,
        "micro_batches": figures.micro_batches,
        "steps_per_epoch": report.steps_per_epoch(figures),
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
