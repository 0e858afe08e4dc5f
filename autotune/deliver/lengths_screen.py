"""`trl-autotune lengths` for a person: how long the rows are, every arrangement of them, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.deliver.wording import seconds
from autotune.plan.figures import weight_of
from autotune.plan.histogram import histogram
from autotune.plan.lengths_report import LengthsReport, percentiles

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BAR = 30  # characters of the longest bar


def print_lengths(report: LengthsReport, console: Console) -> None:
    """Print the report; 60 columns are enough for it, and nothing is said by colour alone."""
    for part in (_head(report), "", _histogram(report), "", _arrangements(report), ""):
        console.print(part)
    for sentence in report.findings.sentences:
        console.print(f"* {sentence}")
    for problem in report.findings.warnings:
        console.print(f"\nwarning: {problem.what}\nhint: {problem.hint}")


def _head(report: LengthsReport) -> str:
    lengths = report.lengths
    at = percentiles(lengths)
    total = round(sum(lengths.tokens) * weight_of(lengths))
    line = f"{lengths.rows:,} rows ({lengths.format}), {total:,} tokens, read in {seconds(lengths.seconds)}"
    if lengths.rows_measured < lengths.rows:
        line += f"\nfrom a sample of {lengths.rows_measured:,} rows"
    if not lengths.rows_known:
        line += "\na stream: these are its first rows, and how many follow is not known"
    shares = "   ".join(f"{percent} %: {length:,}" for percent, length in at.items())
    return f"{line}\ntokens per row   {shares}"


def _histogram(report: LengthsReport) -> RenderableType:
    from rich.bar import Bar
    from rich.table import Table

    bins = histogram(report.lengths.tokens)
    most = max((one.rows for one in bins), default=0)
    weight = weight_of(report.lengths)
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("tokens", justify="right")
    table.add_column("rows", justify="right")
    table.add_column("")
    for one in bins:
        span = f"{one.low:,}" if one.low == one.high else f"{one.low:,}-{one.high:,}"
        table.add_row(span, f"{round(one.rows * weight):,}", Bar(most or 1, 0, one.rows, width=BAR))
    return table


def _arrangements(report: LengthsReport) -> RenderableType:
    from rich.table import Table

    length = "no max_length" if report.max_length is None else f"max_length {report.max_length:,}"
    table = Table(
        box=None,
        pad_edge=False,
        header_style="",
        title=f"at {length} and {report.micro_batch} x {report.accumulation} rows a step",
        title_justify="left",
        title_style="",
    )
    table.add_column("")
    for name in ("rows", "steps", "fill", "dropped", "split"):
        table.add_column(name, justify="right")
    tokens = sum(report.lengths.tokens) * weight_of(report.lengths)
    for name, figures in report.figures.items():
        mark = "" if figures.exact else " est."
        table.add_row(
            name + mark,
            f"{figures.rows:,}",
            f"{report.steps_per_epoch(figures):,}",
            f"{figures.fill:.1%}",
            f"{figures.dropped_tokens / tokens:.1%}" if tokens else "-",
            f"{figures.split_rows:,}",
        )
    return table
