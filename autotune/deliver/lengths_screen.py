"""`trl-autotune lengths` for a person: how long the rows are, every arrangement of them, and what follows."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from autotune.deliver.wording import seconds
from autotune.plan.figures import Arrangement, weight_of
from autotune.plan.histogram import histogram
from autotune.plan.lengths_report import LengthsReport, percentiles_of, sequence_tokens, sequences_counted
from autotune.probe.formats import ONLINE
from autotune.probe.intervals import Interval
from autotune.probe.lengths import Lengths

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from autotune.plan.sampled import Intervals

GLUE = "\N{NO-BREAK SPACE}"
BAR = 30  # characters of the longest bar


def print_lengths(report: LengthsReport, console: Console, intervals: Intervals | None = None) -> None:
    """Print the report; 60 columns are enough for it, and nothing is said by colour alone.

    `intervals` are those of a report on a sample: every figure is then told with how far it may be off.
    """
    for line in _head(report, intervals):
        console.print(_broken(line, console.width), soft_wrap=True)
    console.print()
    _print_bare(_histogram(report, intervals, blocks=console.encoding.startswith("utf")), console)
    console.print(f"\n{_batch(report)}")
    _print_bare(_arrangements(report, intervals), console)
    console.print()
    mark = " (est.)" if intervals else ""
    for sentence in report.findings.sentences:
        console.print(f"* {sentence}{mark}")
    for problem in report.findings.warnings:
        console.print(f"\nwarning: {problem.what}{mark}\nhint: {problem.hint}")
    if intervals:
        console.print(f"\nestimated from {report.lengths.rows_measured:,} rows, with 95 % intervals")
        console.print("hint: `--all-rows` measures every row")


def _print_bare(table: RenderableType, console: Console) -> None:
    """Without the spaces that rich fills a table's lines with."""
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True)


def unit(lengths: Lengths) -> str:
    """What a row of the data is to the method."""
    return "prompts" if lengths.method in ONLINE else "pairs" if lengths.method in ("dpo", "reward") else "rows"


def _broken(line: str, width: int) -> str:
    """The line with breaks between its parts, which are three spaces apart, and within a part only where that is
    wider than the console."""
    parts = line.split("   ")
    joined = "   ".join(part.replace(" ", GLUE) if len(part) <= width else part for part in parts)
    return textwrap.fill(joined, max(width, 1), break_long_words=False, break_on_hyphens=False).replace(GLUE, " ")


def _head(report: LengthsReport, intervals: Intervals | None) -> list[str]:
    lengths = report.lengths
    total = f"{round(sum(lengths.tokens) * weight_of(lengths)):,} tokens"
    if intervals:
        total += f" ({_span(intervals.tokens)})"
    read = "read earlier" if lengths.cached else f"read in {seconds(lengths.seconds)}"
    what = unit(lengths).removesuffix("s") if lengths.rows == 1 else unit(lengths)
    form = "" if lengths.format.removesuffix("s") == what.removesuffix("s") else f" ({lengths.format})"
    lines = [f"{lengths.rows:,} {what}{form}, {total}, {read}"]
    if lengths.rows_measured < lengths.rows:
        lines.append(f"from a sample of {lengths.rows_measured:,} rows")
    if not lengths.rows_known:
        lines.append("a stream: these are its first rows, and how many follow is not known")
    for name, tokens in sequence_tokens(lengths).items():
        known = intervals.sequences[name] if intervals else {}
        shares = "   ".join(
            f"{percent} %: {_with_span(length, known.get(percent), longest=bool(known) and percent == '100')}"
            for percent, length in percentiles_of(tokens).items()
        )
        lines.append(f"tokens per {name}   {shares}")
    return lines


def _with_span(value: int, interval: Interval | None, *, longest: bool) -> str:
    if interval is not None:
        return f"{value:,} ({_span(interval)})"
    return f"{value:,} or more" if longest else f"{value:,}"


def _span(interval: Interval) -> str:
    return f"{round(interval.low):,} to {round(interval.high):,}"


def _histogram(report: LengthsReport, intervals: Intervals | None, *, blocks: bool) -> RenderableType:
    from rich.bar import Bar
    from rich.table import Table

    bins = histogram(sequences_counted(report.lengths))
    most = max((one.rows for one in bins), default=0)
    weight = weight_of(report.lengths)
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("tokens", justify="right")
    table.add_column(
        "sequences" if report.lengths.method in ("dpo", "reward") else unit(report.lengths), justify="right"
    )
    if intervals:
        table.add_column("95 %", justify="right")
    table.add_column("")
    for place, one in enumerate(bins):
        span = f"{one.low:,}" if one.low == one.high else f"{one.low:,}-{one.high:,}"
        off = [f"+- {_reach(intervals.histogram[place]):,.0f}"] if intervals else []
        plain = "#" * round(BAR * one.rows / (most or 1))  # for an encoding without blocks
        bar = Bar(most or 1, 0, one.rows, width=BAR) if blocks else plain
        table.add_row(span, f"{round(one.rows * weight):,}", *off, bar)
    return table


def _reach(interval: Interval) -> float:
    return max(interval.high - interval.value, interval.value - interval.low)


def _batch(report: LengthsReport) -> str:
    """What the arrangements are for."""
    lengths = report.lengths
    cut = report.max_length is not None or lengths.method not in ONLINE
    length = "no max_length" if report.max_length is None else f"max_length {report.max_length:,}"
    batch = f"{report.micro_batch} x {report.accumulation}"
    batch += f" x {report.processes} processes" if report.processes > 1 else ""
    what = "completions" if lengths.method in ("grpo", "rloo") else unit(lengths)
    return f"at {f'{length} and ' if cut else ''}{batch} {what} a step"


def _arrangements(report: LengthsReport, intervals: Intervals | None) -> RenderableType:
    from rich.table import Table

    lengths = report.lengths
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("")
    shown = 5 if lengths.method == "sft" else 3 if lengths.method in ONLINE else 4  # prompts are never cut off
    for name in (unit(lengths), "steps", "fill", "dropped", "split")[:shown]:
        table.add_column(name, justify="right")
    tokens = sum(lengths.tokens) * weight_of(lengths)
    for name, figures in report.figures.items():
        mark = "" if figures.exact else " est."
        values = [
            f"{figures.rows:,}",
            f"{report.steps_per_epoch(figures):,}",
            f"{figures.fill:.1%}",
            f"{figures.dropped_tokens / tokens:.1%}" if tokens else "-",
            f"{figures.split_rows:,}",
        ]
        table.add_row(name + mark, *values[:shown])
        if intervals:
            table.add_row("  95 %", *_reaches(intervals, name, tokens)[:shown])
    return table


def _reaches(intervals: Intervals, name: Arrangement, tokens: float) -> list[str]:
    reach = {figure: _reach(interval) for figure, interval in intervals.arrangements[name].items()}
    return [
        f"+- {reach['rows']:,.0f}",
        f"+- {reach['steps_per_epoch']:,.0f}",
        f"+- {reach['fill']:.2%}",
        f"+- {reach['dropped_tokens'] / tokens:.2%}" if tokens else "-",
        f"+- {reach['split_rows']:,.0f}",
    ]
