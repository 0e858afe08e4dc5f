"""Figures of the whole data from a sample of its rows, with intervals that hold them 95 times in 100."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from autotune.probe.lengths import Lengths

Z_95 = 1.96
PERCENTILES = (50, 90, 95, 99)


class Interval(msgspec.Struct, frozen=True):
    """A figure of the whole data; `low` and `high` are the figure itself where every row was measured."""

    value: float
    low: float
    high: float


class Estimates(msgspec.Struct, frozen=True, kw_only=True):
    """The data's token lengths. Of a stream these are the figures of the rows that were read."""

    mean_tokens: Interval
    total_tokens: Interval
    cut_tokens: Interval  # beyond `max_length`; 0 without one
    percentiles: dict[int, Interval]  # tokens


def estimates(lengths: Lengths, max_length: int | None) -> Estimates:
    """Mean, total, percentiles, and the tokens that `max_length` cuts off. At least one row was measured."""
    cut = [0 if max_length is None else max(0, tokens - max_length) for tokens in lengths.tokens]
    return Estimates(
        mean_tokens=mean(lengths, lengths.tokens),
        total_tokens=total(lengths, lengths.tokens),
        cut_tokens=total(lengths, cut),
        percentiles={percent: percentile(lengths, percent) for percent in PERCENTILES},
    )


def mean(lengths: Lengths, values: Sequence[float]) -> Interval:
    """The mean over all rows of something known of each measured row, in their order."""
    value = math.fsum(values) / len(values)
    reach = Z_95 * _standard_error(lengths, values)
    return Interval(value, value - reach, value + reach)


def total(lengths: Lengths, values: Sequence[float]) -> Interval:
    """The sum over all rows of something known of each measured row, in their order."""
    each = mean(lengths, values)
    return Interval(each.value * lengths.rows, each.low * lengths.rows, each.high * lengths.rows)


def percentile(lengths: Lengths, percent: int) -> Interval:
    """The tokens that `percent` of a hundred rows do not exceed.

    The interval is Woodruff's (J. Am. Stat. Assoc. 47, 1952): that of the share of rows up to the value, read off the
    sorted lengths at both of its ends.
    """
    ascending = sorted(lengths.tokens)
    value = _at(ascending, percent / 100)
    if not _sampled(lengths):
        return Interval(value, value, value)
    reach = Z_95 * _standard_error(lengths, [float(tokens <= value) for tokens in lengths.tokens])
    reach = max(reach, 1 / len(ascending))
    return Interval(value, _at(ascending, percent / 100 - reach), _at(ascending, percent / 100 + reach))


def _at(ascending: Sequence[int], share: float) -> int:
    place = math.ceil(share * len(ascending)) - 1
    return ascending[min(max(place, 0), len(ascending) - 1)]


def _sampled(lengths: Lengths) -> bool:
    return bool(lengths.text_bytes) and len(lengths.tokens) < lengths.rows


def _standard_error(lengths: Lengths, values: Sequence[float]) -> float:
    """Of the mean of rows that were taken at equal distances in the order of their size.

    From the differences between neighbours in that order, which all but have the same size (Wolter, Introduction to
    Variance Estimation, 2007, 8.2, estimator v2), less what the measured share of the data makes certain.
    """
    count = len(values)
    if not _sampled(lengths) or count < 2:
        return 0.0
    order = sorted(range(count), key=lengths.text_bytes.__getitem__)
    in_order = [values[place] for place in order]
    squares = math.fsum((one - other) ** 2 for one, other in itertools.pairwise(in_order))
    return math.sqrt((1 - count / lengths.rows) * squares / (2 * (count - 1)) / count)
