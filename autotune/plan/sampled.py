"""How far a report on a sample of the rows may be off: 95 % intervals of its figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotune.plan.figures import Arrangement
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
    return Intervals(
        tokens=total(lengths, lengths.tokens),
        sequences={
            name: {str(percent): percentile(_with_tokens(lengths, tokens), percent) for percent in PERCENTILES}
            for name, tokens in sequence_tokens(lengths).items()
        },
        histogram=_histogram(lengths),
        arrangements=_arrangements(report, resolved),
    )


def _with_tokens(lengths: Lengths, tokens: Sequence[int]) -> Lengths:
    return msgspec.structs.replace(lengths, tokens=tuple(tokens))


def _histogram(lengths: Lengths) -> tuple[Interval, ...]:
    counted = sequences_counted(lengths)
    rows = lengths.rows_measured
    bits = [tokens.bit_length() for tokens in counted]
    found = []
    for one in histogram(counted):
        inside = [bit == one.high.bit_length() for bit in bits]
        # the sequences of a row stand `rows` apart
        found.append(total(lengths, [float(sum(inside[place::rows])) for place in range(rows)]))
    return tuple(found)


def _arrangements(report: LengthsReport, resolved: Mapping[str, Any]) -> dict[Arrangement, dict[str, Interval]]:
    """By random groups (Wolter, Introduction to Variance Estimation, 2007, 2.4): every eighth row in order of size
    makes a sample of its own, and how far the figures of the eight differ tells how far those of all may be off."""
    lengths = report.lengths
    order = sorted(range(lengths.rows_measured), key=lengths.text_bytes.__getitem__)
    groups = [
        job_report(_part(lengths, sorted(order[group::GROUPS])), resolved, processes=report.processes)
        for group in range(min(GROUPS, lengths.rows_measured))
    ]
    unmeasured = 1 - lengths.rows_measured / lengths.rows
    found: dict[Arrangement, dict[str, Interval]] = {}
    for name in report.figures:
        whole = _told(report, name)
        parts = [_told(group, name) for group in groups]
        found[name] = {
            figure: _interval(value, [part[figure] for part in parts], unmeasured) for figure, value in whole.items()
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


def _interval(value: float, parts: Sequence[float], unmeasured: float) -> Interval:
    reach = T_95 * statistics.stdev(parts) * math.sqrt(unmeasured / len(parts)) if len(parts) > 1 else 0.0
    return Interval(value, max(0.0, value - reach), value + reach)


def _part(lengths: Lengths, places: Sequence[int]) -> Lengths:
    """Some of the rows measured, as a sample of the same data."""
    parts = {name: getattr(lengths, name) for name in PER_ROW}
    chosen = {name: tuple(values[place] for place in places) for name, values in parts.items() if values}
    return msgspec.structs.replace(lengths, **chosen)
