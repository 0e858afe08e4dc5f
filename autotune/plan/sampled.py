"""How far a report on a sample of the rows may be off: 95 % intervals of its figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotune.plan.figures import Arrangement, weight_of
from autotune.plan.histogram import histogram
from autotune.plan.lengths_report import LengthsReport, job_report, sequence_tokens, sequences_counted
from autotune.probe.intervals import Interval, percentile, total
from autotune.probe.lengths import Lengths

GROUPS = 8
T_95 = 2.365  # of Student's t with GROUPS - 1 degrees of freedom
PERCENTILES = (50, 90, 99)  # of a sample's longest row nothing is known but that there is one as long
PER_ROW = (
    *("tokens", "first_loss", "last_loss", "loss_tokens", "row_numbers", "prompt_tokens", "chosen_tokens"),
    *("rejected_tokens", "completion_tokens", "desirable", "text_bytes"),
)


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Of the figures of a `LengthsReport`, each for the whole data."""

    tokens: Interval
    sequences: dict[str, dict[str, Interval]]  # percentiles, by what `sequence_tokens` calls them
    histogram: tuple[Interval, ...]  # rows of each bin
    arrangements: dict[Arrangement, dict[str, Interval]]  # rows, steps_per_epoch, fill, dropped_tokens, split_rows


def intervals_of(report: LengthsReport, resolved: Mapping[str, Any]) -> Intervals | None:
    """None where every row was measured, and for the first rows of a stream, which are no sample of the rest."""
    lengths = report.lengths
    if not lengths.text_bytes or lengths.rows_measured >= lengths.rows:
        return None
    groups = _groups(lengths)
    return Intervals(
        tokens=total(lengths, lengths.tokens),
        sequences={
            name: {str(percent): percentile(_with_tokens(lengths, tokens), percent) for percent in PERCENTILES}
            for name, tokens in sequence_tokens(lengths).items()
        },
        histogram=_histogram(lengths, groups),
        arrangements=_arrangements(report, groups, resolved),
    )


def _with_tokens(lengths: Lengths, tokens: Sequence[int]) -> Lengths:
    return msgspec.structs.replace(lengths, tokens=tuple(tokens))


def _groups(lengths: Lengths) -> list[Lengths]:
    """Random groups (Wolter, Introduction to Variance Estimation, 2007, 2.4): every eighth row in order of size makes a
    sample of its own, and how far the figures of the eight differ tells how far those of all may be off."""
    order = sorted(range(lengths.rows_measured), key=lengths.text_bytes.__getitem__)
    return [_part(lengths, sorted(order[group::GROUPS])) for group in range(min(GROUPS, lengths.rows_measured))]


def _histogram(lengths: Lengths, groups: Sequence[Lengths]) -> tuple[Interval, ...]:
    parts = [_rows_by_bin(group) for group in groups]
    found = []
    for high, rows in _rows_by_bin(lengths).items():
        told = _interval(rows, [part.get(high, 0.0) for part in parts], lengths)
        reach = max(told.high - rows, weight_of(lengths))  # groups may agree by chance, to a row
        found.append(Interval(rows, max(0.0, rows - reach), rows + reach))
    return tuple(found)


def _rows_by_bin(lengths: Lengths) -> dict[int, float]:
    """Of the whole data, by the longest that a bin holds."""
    return {one.high: one.rows * weight_of(lengths) for one in histogram(sequences_counted(lengths))}


def _arrangements(
    report: LengthsReport, groups: Sequence[Lengths], resolved: Mapping[str, Any]
) -> dict[Arrangement, dict[str, Interval]]:
    reports = [job_report(group, resolved, processes=report.processes) for group in groups]
    found: dict[Arrangement, dict[str, Interval]] = {}
    for name in report.figures:
        parts = [_told(one, name) for one in reports]
        found[name] = {
            figure: _interval(
                value, [part[figure] for part in parts], report.lengths, most=1.0 if figure == "fill" else math.inf
            )
            for figure, value in _told(report, name).items()
        }
    return found


def _told(report: LengthsReport, name: Arrangement) -> dict[str, float]:
    figures = report.figures[name]
    return {
        "rows": figures.rows,
        "steps_per_epoch": report.steps_per_epoch(figures),
        "fill": figures.fill,
        "dropped_tokens": figures.dropped_tokens,
        "split_rows": figures.split_rows,
    }


def _interval(value: float, parts: Sequence[float], lengths: Lengths, *, most: float = math.inf) -> Interval:
    """Of a figure that the groups have in `parts`, 0 to `most`; what was measured of the data is certain."""
    unmeasured = 1 - lengths.rows_measured / lengths.rows
    reach = T_95 * statistics.stdev(parts) * math.sqrt(unmeasured / len(parts)) if len(parts) > 1 else 0.0
    return Interval(value, max(0.0, value - reach), min(most, value + reach))


def _part(lengths: Lengths, places: Sequence[int]) -> Lengths:
    """Some of the rows measured, as a sample of the same data."""
    parts = {name: getattr(lengths, name) for name in PER_ROW}
    chosen = {name: tuple(values[place] for place in places) for name, values in parts.items() if values}
    return msgspec.structs.replace(lengths, **chosen)
