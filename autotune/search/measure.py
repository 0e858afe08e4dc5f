"""Measuring one trial: watch it, say when its rate is known well enough, stop it when it cannot win."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autotune.child import write_whole
from autotune.events import AnyEvent, Finished, Note, Outcome, Step, TrialFinished, TrialStarted
from autotune.plan.space import Candidate
from autotune.search.samples import MEMORY_STEPS, Sample
from autotune.search.setting import NO_OPTIONS, Setting
from autotune.search.statistics import Estimate, cannot_reach, fit_step_cost, on_whole_data, rate_of
from autotune.search.steadiness import steady, warming_up
from autotune.trial.result import Pass, Purpose, TrialResult, passes_of
from autotune.trial.runner import Trial, to_json

POLL_SECONDS = 0.05  # more often would be felt by a trial that uses every core
ENOUGH = 0.022  # half the interval as a share of the rate, below which a rate is known well enough
MOST_PASSES = 3  # of a trial in the search; the confirmation goes on for longer
LONGEST_SHARE = 0.12  # of the budget, for the passes of one trial, beyond the first
TOO_LONG = 1.5  # times what a pass should take at most: starting again for less costs more than it saves
SLACK_CORES = 0.25  # what others may use of the cores a trial needs
CONTENDS = 0.97  # of the best rate: one that reaches this is measured on


def measure(
    setting: Setting,
    index: int,
    candidate: Candidate,
    sample: Sample,
    *,
    reason: str,
    best: Estimate | None,
    baseline_rate: float | None,
    longest_pass: float | None = None,
    purpose: Purpose = "speed",
    passes: int = MOST_PASSES,
) -> TrialResult:
    """Run a speed trial until its rate is known to `ENOUGH`, or it cannot reach the best; for so many passes at most.

    `longest_pass` in seconds: a trial whose first steps foretell a longer pass is stopped with outcome `stopped` and
    no rate, for the caller to take a smaller sample.
    """
    trial = setting.trial(index, candidate, sample.path, purpose=purpose, passes=passes)
    started(setting, trial, candidate, reason)
    pruned = False
    foretold: float | None = None
    try:
        trial.start()
        load = setting.load_meter(trial)
        while trial.running:
            load.sample()
            said = forward(setting, trial)
            if not said:
                setting.clock.sleep(POLL_SECONDS)
                continue
            if (
                longest_pass is not None
                and (seconds := _foretold_pass(setting, trial, sample)) > TOO_LONG * longest_pass
            ):
                foretold = seconds
                break
            if best is not None and _hopeless(setting, trial, candidate, sample, best):
                pruned = True
                break
            if _known(setting, trial, candidate, best):
                break
        others = load.others()  # while its processes can still be asked
        disturbed_by = setting.gpu_disturbance()
    finally:
        trial.kill()
    result = conclude(setting, trial, candidate, pruned=pruned)
    result = msgspec.structs.replace(
        result, others_cores=round(others, 2), disturbed_by=disturbed_by, pass_steps=sample.steps
    )
    if foretold is not None:  # it told how long a pass is, and the caller starts it again with a shorter one
        return msgspec.structs.replace(
            result, foretold_pass_seconds=foretold, detail=f"a pass would take {foretold:.0f} s"
        )
    finished(setting, result, baseline_rate)
    return result


def run_memory_trial(setting: Setting, index: int, candidate: Candidate, sample: Sample, *, reason: str) -> TrialResult:
    """Three optimizer steps on the longest rows: what the candidate needs at its worst."""
    return run_steps(setting, index, candidate, sample, MEMORY_STEPS, purpose="memory", reason=reason)


def run_steps(
    setting: Setting,
    index: int,
    candidate: Candidate,
    sample: Sample,
    steps: int,
    *,
    purpose: Purpose,
    reason: str,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> TrialResult:
    """So many optimizer steps and no more; `options` of TRL win over the candidate's."""
    trial = setting.trial(
        index, candidate, sample.path, purpose=purpose, passes=0, warm_up_steps=steps, options=options
    )
    started(setting, trial, candidate, reason)
    try:
        trial.start()
        while trial.running:
            if not forward(setting, trial):
                setting.clock.sleep(POLL_SECONDS)
    finally:
        trial.kill()
    result = conclude(setting, trial, candidate)
    finished(setting, result, None)
    return result


def started(setting: Setting, trial: Trial, candidate: Candidate, reason: str) -> None:
    """Say that a trial starts, and leave its candidate in its folder."""
    trial.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(trial.folder / "candidate.json", to_json(candidate))
    setting.emit(
        TrialStarted(trial=trial.plan.index, label=trial.plan.label, purpose=trial.plan.purpose, reason=reason)
    )


def forward(setting: Setting, trial: Trial) -> list[AnyEvent]:
    """Pass on what the trial said. Its own end is told by `finished`, with the rate."""
    said = trial.poll()
    for event in said:
        if not isinstance(event, Finished | Note):
            setting.emit(msgspec.structs.replace(event, trial=trial.plan.index))
    return said


def keep(setting: Setting, result: TrialResult) -> None:
    """Write `result.json`, from which the trial is known after a resume."""
    write_whole(setting.trial_folder(result.index) / "result.json", to_json(result))


def finished(setting: Setting, result: TrialResult, baseline_rate: float | None) -> None:
    """Write `result.json`, which makes the trial count, and say so."""
    keep(setting, result)
    setting.emit(
        TrialFinished(
            trial=result.index,
            label=result.label,
            purpose=result.purpose,
            outcome=result.outcome,
            where=result.where,
            detail=result.detail,
            rate=result.rate,
            rate_interval=result.rate_interval,
            ratio=result.rate / baseline_rate if result.rate and baseline_rate else None,
            peak_bytes=result.peak_bytes,
            seconds=result.seconds,
            measured_seconds=result.step_seconds,
        )
    )


def disturbed(setting: Setting, candidate: Candidate, others_cores: float) -> bool:
    """Whether other processes had cores that the candidate needs."""
    free = setting.machine.cpu.cores - (candidate.threads or 1) - candidate.workers
    return others_cores > max(0, free) + SLACK_CORES


def conclude(setting: Setting, trial: Trial, candidate: Candidate, *, pruned: bool = False) -> TrialResult:
    """What an ended trial gave."""
    outcome, where, detail = trial.result_outcome()
    passes = passes_of(trial.steps, trial.ended_passes)
    rate: Estimate | None = None
    if passes and outcome in ("ok", "stopped"):
        outcome, where = "ok", None  # stopped because enough was known
        rate = corrected_rate(setting, trial, candidate, passes)
    measured = [step for step in trial.steps if step.pass_index > 0]
    partial = None
    if pruned:
        outcome, where, rate = "pruned", None, None
        detail = "cannot reach the best"
        partial = sum(step.useful_tokens for step in measured) / sum(step.seconds for step in measured)
    elif outcome == "ok" and trial.plan.purpose == "speed" and rate is None:
        outcome, detail = _no_rate(detail)
    instead = _ran_instead(setting, trial, candidate)
    if instead is not None and outcome in ("ok", "pruned"):
        outcome, where, rate, partial = "error", None, None, None
        detail = f"asked for {candidate.attention}, and {instead} ran"
    ended = trial.ended if trial.ended is not None else setting.clock.now()
    return TrialResult(
        index=trial.plan.index,
        purpose=trial.plan.purpose,
        candidate=candidate,
        label=trial.plan.label,
        outcome=outcome,
        where=where,
        detail=detail,
        rate=rate.value if rate else None,
        rate_interval=(rate.low, rate.high) if rate else None,
        partial_rate=partial,
        passes=passes,
        losses=tuple(step.loss for step in trial.steps[:3]),
        steps=len(trial.steps),
        finite_steps=sum(step.loss is not None and math.isfinite(step.loss) for step in trial.steps),
        finite_in_a_row=finite_in_a_row(trial.steps),
        warm_up_steps=len(trial.steps) - len(measured),
        unsteady_steps=warming_up(measured) if rate is not None else 0,
        warm_up_seconds=sum(step.seconds for step in trial.steps if step.pass_index == 0),
        actual_attention=trial.hello.actual_attention if trial.hello else None,
        kernel_revision=trial.hello.kernel_revision if trial.hello else None,
        peak_bytes=trial.peak_bytes(),
        startup_seconds=trial.first_step_at - trial.started if trial.first_step_at is not None else None,
        step_seconds=sum(step.seconds for step in trial.steps),
        step_tokens=sum(step.useful_tokens for step in trial.steps),
        seconds=ended - trial.started,
    )


def finite_in_a_row(steps: Sequence[Step]) -> int:
    """How many of the last steps had a loss and a gradient norm that are finite numbers."""
    whole = itertools.takewhile(lambda step: step.finite and step.loss is not None, reversed(steps))
    return sum(1 for _ in whole)


def _ran_instead(setting: Setting, trial: Trial, candidate: Candidate) -> str | None:
    """The attention that ran in place of another than the job's own: its speed is not the other's, so it counts for
    neither. Where the job's own name stands for another, the gate compares with what the baseline ran."""
    if trial.hello is None or candidate.attention == setting.space.baseline.attention:
        return None
    actual = trial.hello.actual_attention
    return actual if actual != candidate.attention else None


def corrected_rate(setting: Setting, trial: Trial, candidate: Candidate, passes: tuple[Pass, ...]) -> Estimate:
    """The rate over the passes, with the sample's padding and packing corrected to the whole data's, and first steps
    that were still warming up to later ones."""
    passes, steps = steady(passes, [step for step in trial.steps if step.pass_index > 0])
    return rate_of(corrected_passes(setting, candidate, passes, steps), steps)


def corrected_passes(
    setting: Setting, candidate: Candidate, passes: Sequence[Pass], steps: Sequence[Step]
) -> tuple[Pass, ...]:
    """The passes as if padded and packed as the whole data is, from the exact plan of the whole data's lengths."""
    return on_whole_data(passes, fit_step_cost(steps), _work_per_token(setting, candidate))


def _work_per_token(setting: Setting, candidate: Candidate) -> tuple[float, float]:
    """Micro-batches and computed positions per useful token, over the whole data."""
    figures = setting.data.figures(candidate.arrangement)
    # TRL feeds bfd rows without padding: their empty room is computed by nobody
    unpadded = candidate.arrangement.name in ("bfd", "bfd_split")
    positions = figures.useful_tokens if unpadded else figures.computed_positions
    return figures.micro_batches / figures.useful_tokens, positions / figures.useful_tokens


def _no_rate(detail: str | None) -> tuple[Outcome, str]:
    return "error", detail or "it ended before one pass over the sample was complete"


def _foretold_pass(setting: Setting, trial: Trial, sample: Sample) -> float:
    """Seconds a pass will take, from the last step of the warm-up: those before it allocate and compile."""
    steps = [step for step in trial.steps if step.pass_index == 0]
    if len(steps) < trial.plan.warm_up_steps or any(step.pass_index > 0 for step in trial.steps):
        return 0.0
    last, base = steps[-1], setting.space.baseline
    # a step of this one's tokens and padding is not every step
    positions = setting.space.tokens_per_step * _work_per_token(setting, base)[1]
    return last.seconds / (last.useful_tokens + last.padding_tokens) * positions * sample.steps


def _hopeless(setting: Setting, trial: Trial, candidate: Candidate, sample: Sample, best: Estimate) -> bool:
    current = [step for step in trial.steps if step.pass_index == 1]
    if not current or 1 in trial.ended_passes:
        return False
    tokens = sum(step.useful_tokens for step in current)
    positions = tokens + sum(step.padding_tokens for step in current)
    # these steps may be padded more than the data is; it is never pruned for that
    scale = max(1.0, positions / tokens / _work_per_token(setting, candidate)[1]) if tokens else 1.0
    return cannot_reach(current, steps_per_pass=max(2, sample.steps), best_low=best.low, scale=scale)


def _known(setting: Setting, trial: Trial, candidate: Candidate, best: Estimate | None) -> bool:
    passes = passes_of(trial.steps, trial.ended_passes)
    if not passes:
        return False
    estimate = corrected_rate(setting, trial, candidate, passes)
    if best is not None and estimate.high < best.low * CONTENDS:
        return True
    if sum(one.seconds for one in passes) + passes[-1].seconds > LONGEST_SHARE * setting.budget_seconds:
        return True
    return estimate.half_width <= ENOUGH
