"""The last lines of a run: what won, whether it is the same training, what it saves."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.deliver import wording
from autotune.deliver.report import epoch_seconds
from autotune.events import Topic
from autotune.search.found import Found
from autotune.search.setting import Setting


def lines(setting: Setting, found: Found, *, seconds: float) -> Iterator[tuple[Topic, str]]:
    """Topic and text of each line; none when no trial finished."""
    best, baseline = found.best, found.baseline
    if best is None or best.rate is None or found.outcome == "failed":
        return
    if found.outcome != "kept" and best.candidate != setting.space.baseline:
        times = f", confirmed {found.confirmed_rounds} times in turns with yours" if found.confirmed_rounds else ""
        ratio = f"   {wording.ratio(found.speedup)}{times}" if found.speedup is not None else ""
        yield "best", f"#{best.index}  {best.candidate}{ratio}"
    if found.gates:
        yield "same", "   ".join(f"{gate.name}: {gate.detail}" for gate in found.gates[:2])
        for gate in found.gates[2:]:
            yield "same", f"{gate.name}: {gate.detail}"
    after = epoch_seconds(setting, best.candidate, best.rate)
    tuning = f"tuning took {wording.seconds(seconds)}"
    if baseline is None or baseline.rate is None or best.candidate == setting.space.baseline:
        yield "epoch", f"{wording.seconds(after)}; {tuning}"
        return
    before = epoch_seconds(setting, baseline.candidate, baseline.rate)
    saved = before - after
    paid_back = f", paid back after {seconds / saved:.1f} epochs" if saved > 0 else ""
    if saved > 0 and seconds < saved:
        paid_back = f", paid back after {seconds / saved:.0%} of the first epoch"
    yield "epoch", f"{wording.seconds(before)} -> {wording.seconds(after)}; {tuning}{paid_back}"
