"""Does the machine still run as fast as it did? Yours is measured again between trials, and what was measured on a
machine of another speed is corrected or measured again.

A GPU that has become hot, or a host that gives its time to others, slows everything down for minutes, and nothing that
a process can read tells so. Rates of then and of now cannot be compared, whereas those of one candidate can: the
baseline's, by a pass in between. The confirmation needs none of this, for its arms take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from autotune.plan.space import Candidate
from autotune.search.found import estimate_of
from autotune.search.measure import keep, measure
from autotune.search.prediction import Checked
from autotune.search.record import Record
from autotune.search.samples import Sample
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.search.training import duration
from autotune.trial.result import TrialResult

OLDEST_SECONDS = 300.0  # that a look at the baseline may be old
SHARE = 0.06  # of the search, for looks that nothing but their age asks for
CONTRADICTS = 3.0  # standard deviations below what was predicted, of one trial or of two in a row together
CONTRADICTS_AGAIN = 2.0  # the same of a machine that has changed before, either way
FAR = 0.8  # of what was predicted, at least: whatever the deviation, a trial nearer to it contradicts nothing
FEWEST_CHECKED = 4  # predictions, before one that errs says something about the machine
MOST_CONTRADICTIONS = 4  # looked into in one search
MOVED = 0.05  # a smaller change is none, however narrow the intervals
MOST_AGAIN = 3  # candidates that are measured again after a change: those that may win


class Drift:
    """Watches one search."""

    def __init__(self, setting: Setting, record: Record) -> None:
        self._setting = setting
        self._record = record
        self._looked = setting.clock.now()
        self._look_seconds = 0.0
        self._since = record.next_index  # trials from this one on have no look after them
        self._contradictions = MOST_CONTRADICTIONS
        self._changed = False

    def measured(self, baseline: TrialResult) -> None:
        """The baseline was measured."""
        self._looked = self._setting.clock.now()
        self._look_seconds = baseline.seconds
        self._since = self._record.next_index

    def reason_to_look(self, checked: Sequence[Checked]) -> str | None:
        """Why the baseline should be measured again now, in words; `checked` are the predictions and what came."""
        baseline = self._record.baseline
        if baseline is None or self._since >= self._record.next_index:
            return None
        enough = len(checked) >= (1 if self._changed else FEWEST_CHECKED)
        if enough and self._contradictions > 0 and self._contradicts(checked[-2:]):
            self._contradictions -= 1
            last = checked[-1]
            return f"#{last.index} gave {last.measured / last.predicted:.2f} of what was predicted"
        age = self._setting.clock.now() - self._looked
        if age > max(OLDEST_SECONDS, self._look_seconds / SHARE):
            return f"yours was measured {duration(age)} ago"
        return None

    def _contradicts(self, checked: Sequence[Checked]) -> bool:
        """Whether the last trial, alone or with the one before it in `checked`, is slower than the fit can believe, or
        on a machine that has changed before, faster."""
        last = checked[-1]
        if last.index != self._record.next_index - 1 or FAR < last.measured / last.predicted < 1 / FAR:
            return False
        new = [one.surprise for one in reversed(checked) if one.index >= self._since]
        together = [sum(new[:count]) / math.sqrt(count) for count in range(1, len(new) + 1)]
        if self._changed:
            return max(map(abs, together)) > CONTRADICTS_AGAIN
        return min(together) < -CONTRADICTS

    def look(self, sample: Sample, reason: str) -> list[Candidate] | None:
        """Measure the baseline for one pass. None where it is as fast as it was. Otherwise the record is brought to the
        speed of now, and the candidates are returned that should be measured again."""
        setting, record = self._setting, self._record
        baseline = record.baseline
        assert baseline is not None
        index = record.take_index()
        since, self._since = self._since, index + 1
        result = measure(
            setting,
            index,
            baseline.candidate,
            sample,
            reason=f"is the machine as it was: {reason}",
            best=None,
            baseline_rate=baseline.rate,
            purpose="gate",
            passes=1,
        )
        self.measured(result)
        record.set_aside.append(result)
        if result.rate is None:
            return None
        now = estimate_of(result)
        ratio = moved(estimate_of(baseline), now)
        if ratio is None:
            return None
        return self._bring_to(ratio, now, since)

    def _bring_to(self, ratio: float, now: Estimate, since: int) -> list[Candidate]:
        """Trials with a look at yours after them count with the change; those since the last look may be of before or
        of after it, so they win nothing, and of these the fastest are measured again."""
        self._changed = True
        record = self._record
        results = [self._at_speed(one, ratio, now, since) for one in record.results]
        for one in results:
            keep(self._setting, one)
        unsure = [one for one in results if one.index >= since and one.outcome == "ok" and one.rate]
        # each was measured at the speed of before, of now, or at both
        surely = max(((one.rate or 0.0) * min(1.0, ratio) for one in unsure), default=0.0)
        again = [one for one in unsure if (one.rate or 0.0) * max(1.0, ratio) >= surely]
        again = sorted(again, key=lambda one: -(one.rate or 0.0))[:MOST_AGAIN]
        record.note(_told(ratio, [one for one in results if one.index < since], again), topic="trial")
        record.results = results
        return [one.candidate for one in again]

    def _at_speed(self, one: TrialResult, ratio: float, now: Estimate, since: int) -> TrialResult:
        if one.candidate == self._setting.space.baseline:
            return msgspec.structs.replace(scaled(one, ratio), rate=now.value, rate_interval=(now.low, now.high))
        if one.index < since:
            return scaled(one, ratio)
        return msgspec.structs.replace(one, busy=True) if one.outcome in ("ok", "pruned") else one


def _told(ratio: float, looked_at: Sequence[TrialResult], again: Sequence[TrialResult]) -> str:
    """The change in words."""
    text = f"yours runs at {ratio:.2f} of its speed before"
    if len(looked_at) > 1:
        text += f", and what was measured until #{max(one.index for one in looked_at)} counts as so much"
    if again:
        text += f"; measured again: {', '.join(f'#{one.index}' for one in again)}"
    return text


def moved(before: Estimate, now: Estimate) -> float | None:
    """By which factor a rate has changed, where that is beyond both intervals; None where it has not."""
    ratio = now.value / before.value
    return None if before.overlaps(now) or abs(ratio - 1.0) < MOVED else ratio


def scaled(result: TrialResult, ratio: float) -> TrialResult:
    """A result as it would be on a machine of another speed; `at_speed` keeps by how much."""
    if result.rate is None and result.partial_rate is None:
        return result
    interval = result.rate_interval
    return msgspec.structs.replace(
        result,
        rate=result.rate * ratio if result.rate is not None else None,
        rate_interval=(interval[0] * ratio, interval[1] * ratio) if interval is not None else None,
        partial_rate=result.partial_rate * ratio if result.partial_rate is not None else None,
        at_speed=result.at_speed * ratio,
    )
