"""How long the whole training takes at a trial's rate: what a faster setting is worth."""

from __future__ import annotations

from autotune.plan.space import Candidate
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult


def epoch_seconds(setting: Setting, candidate: Candidate, rate: float) -> float:
    """One pass over the whole data at a rate, in seconds."""
    return setting.data.figures(candidate.arrangement).useful_tokens / rate


def training_seconds(setting: Setting, result: TrialResult) -> float:
    """The whole training at a trial's rate, in seconds: `max_steps` optimizer steps, or else its epochs."""
    assert result.rate is not None
    resolved = setting.job.resolved
    steps = resolved.get("max_steps") or -1
    if steps > 0:
        return float(steps * setting.data.tokens_per_step(result.candidate.arrangement) / result.rate)
    return float(epoch_seconds(setting, result.candidate, result.rate) * resolved["num_train_epochs"])


def training_name(setting: Setting) -> str:
    """What the seconds are for: `40 steps`, `one epoch`, `3 epochs`."""
    resolved = setting.job.resolved
    steps, epochs = resolved.get("max_steps") or -1, resolved["num_train_epochs"]
    if steps > 0:
        return f"{steps:,} step{'s' if steps > 1 else ''}"
    return "one epoch" if epochs == 1 else f"{epochs:g} epochs"


def duration(seconds: float) -> str:
    """`4.8 s`, `48 s`, `5 min 48 s`, `3 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
