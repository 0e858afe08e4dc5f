"""The last lines of a run: what won, whether it is the same training, what it saves."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.deliver import grades, wording
from autotune.events import Topic
from autotune.search.found import Found, why_kept
from autotune.search.setting import Setting
from autotune.search.statistics import Estimate
from autotune.search.training import training_name, training_seconds
from autotune.trial.result import TrialResult


def lines(setting: Setting, found: Found, *, seconds: float) -> Iterator[tuple[Topic, str]]:
    """Topic and text of each line; none when no trial finished."""
    best, baseline = found.best, found.baseline
    if found.outcome == "failed":
        return
    if best is None or best.rate is None:
        yield "best", "no trial was done: tuned.yaml is your config as it was"
        return
    if found.outcome == "kept":
        yield "best", why_kept(found)
    elif best.candidate == setting.space.baseline:
        yield "best", "yours so far: tuned.yaml is your config as it was"
    else:
        times = "once" if found.confirmed_rounds == 1 else f"{found.confirmed_rounds} times"
        busy = ", on a busy machine" if found.busy else ""
        confirmed = f"confirmed {times} in turns with yours{busy}"
        how = confirmed if found.confirmed_rounds else "not confirmed, and not checked to be the same training"
        ratio = f"   {_faster(found.speedup)}, {how}" if found.speedup is not None else ""
        yield "best", f"#{best.index}  {best.candidate}{ratio}"
        for text in grades.differences(setting.space, best.candidate):
            yield "best", text
    if found.gates:
        yield "same", "   ".join(f"{gate.name}: {gate.detail}" for gate in found.gates[:2])
        for gate in found.gates[2:]:
            yield "same", f"{gate.name}: {gate.detail}"
    yield "epoch", _times(setting, found, best, baseline, seconds)


def _faster(speedup: Estimate) -> str:
    return wording.ratio(speedup) if speedup.known else f"how much faster is {wording.ratio(speedup)}"


def _times(setting: Setting, found: Found, best: TrialResult, baseline: TrialResult | None, seconds: float) -> str:
    """How long the training takes, before and after, and when the tuning is paid back."""
    tuning = f"tuning took {wording.seconds(seconds)}"
    after = training_seconds(setting, best)
    name = training_name(setting)
    if baseline is None or best.candidate == setting.space.baseline:
        return f"{name} {wording.seconds(after)}; {tuning}"
    before = training_seconds(setting, baseline)
    saved = before - after
    if seconds < saved:
        paid_back = f"paid back after {seconds / saved:.0%} of one training"
    elif saved > 0:
        paid_back = f"paid back after {seconds / saved:.1f} trainings"
    else:
        paid_back = "not paid back"
    return f"{name} {wording.seconds(before)} -> {wording.seconds(after)}; {tuning}, {paid_back}"
