"""The winner by the real command: `trl METHOD --config …` in a fresh process, and whether it is as fast as its trials.

Trials are forked from a process that has TRL loaded; this run goes through `trl`, its launcher and a new Python, with
the delivered options on the documents of the trials. Its rate is TRL's own `num_tokens` over its own `train_runtime`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import msgspec

from autotune.child import write_whole
from autotune.children import Child, last_error
from autotune.events import Outcome, TrialStarted
from autotune.plan.space import Candidate
from autotune.search.checking import Checking
from autotune.search.gates import Gate
from autotune.search.measure import POLL_SECONDS, finished
from autotune.search.setting import Setting
from autotune.trial.failures import read_log
from autotune.trial.result import TrialResult, joined
from autotune.trial.runner import environment_difference

NAME = "end to end"
STEPS_SECONDS = 10.0  # of optimizer steps; what `train_runtime` holds beside them is 0.13 s
# A command that skipped the launcher's threads was off by 17 %; two commands in a row differ by some 5 %.
TOLERANCE = 0.15
# Until the first step of a fresh `trl`, beyond what a forked trial takes: importing launcher and script, on 2 cores
FRESH_SECONDS = 12.0
PATIENCE = 3.0  # times what the run should take, and a minute: then it hangs
RESERVED_SHARE = 0.1  # of the budget: with less it runs only where time happens to be left
NUMBER = r"['\"]%s['\"]: ['\"]?([0-9.e+]+)"


class Ran(msgspec.Struct, frozen=True):
    """What a run of the command gave: useful tokens/s, or why it gave none."""

    rate: float | None
    seconds: float
    failure: str | None = None


def command_here() -> Path | None:
    """The `trl` beside this Python, or else on the path."""
    beside = Path(sys.executable).with_name("trl")
    found = str(beside) if beside.exists() else shutil.which("trl")
    return Path(found) if found else None


def seconds_reserved(setting: Setting, result: TrialResult | None) -> float:
    """What the search leaves of its budget for this run: what it takes, or nothing where that is a large part."""
    if setting.trl is None or result is None or not result.passes:
        return 0.0
    seconds = _seconds_foreseen(result, _steps(result))
    return seconds if seconds <= RESERVED_SHARE * setting.budget_seconds else 0.0


def run_end_to_end(
    winner: Candidate, result: TrialResult, reference: TrialResult | None, checking: Checking
) -> Gate | None:
    """Run the winner by the command and compare its rate with that of its trial, `result`; None where no command is.

    Where the command is slower than `TOLERANCE` allows, a trial of the same steps tells whether the machine is; where
    it is slower than the user's own were, a trial of these does. The gate's figure is the command's rate over the
    trial's.
    """
    setting = checking.setting
    if setting.trl is None:
        return None
    steps = _steps(result)
    foreseen = _seconds_foreseen(result, steps)
    if setting.seconds_left() < foreseen:
        return Gate(NAME, True, "not run: no time was left")
    ran = _run(setting, checking.take_index(), winner, checking.sample.path, steps, foreseen)
    if ran is None:
        return Gate(NAME, True, "not run to its end: no time was left")
    if ran.rate is None:
        return Gate(NAME, False, f"`trl {setting.job.method}` did not run: {ran.failure}")
    share = ran.rate / _expected_rate(result, steps)
    told = f"`trl {setting.job.method}` gives {ran.rate:,.0f} useful tokens/s in {steps} steps, {_against(share)}"
    no_time = "no time was left to tell whether the machine is slower now"
    steady = share * joined(result.passes).rate  # without what the first steps took longer
    yours = joined(reference.passes).rate if reference is not None and reference.passes else 0.0
    if share < 1 - TOLERANCE:
        now = _rate_now(winner, steps, checking)
        if now is None and steady >= yours:
            return Gate(NAME, True, f"{told}; {no_time}", share)
        if now is not None:
            share = ran.rate / now
            told += f"; a trial of the same steps gives {now:,.0f} now, {_against(share)}"
            if share < 1 - TOLERANCE:
                return Gate(NAME, False, f"{told}, and must be {1 - TOLERANCE:.0%} at least", share)
    if steady < yours:
        assert reference is not None
        now = _rate_now(setting.space.baseline, _steps(reference), checking)
        if now is None or steady < now:
            when = f"then, and {no_time}" if now is None else "now"
            return Gate(NAME, False, f"{told}; slower than yours, which gives {now or yours:,.0f} {when}", share)
        told += f"; yours gives {now:,.0f} now"
    return Gate(NAME, True, f"{told}; {1 - TOLERANCE:.0%} at least", share)


def _rate_now(candidate: Candidate, steps: int, checking: Checking) -> float | None:
    """Useful tokens/s of so many steps by a trial; None where no time is left for it, or it fails."""
    result = checking.run(candidate, steps, reason="as many steps by a trial: is the machine slower now?")
    if result is None or result.outcome != "ok" or not result.step_seconds:
        return None
    return result.step_tokens / result.step_seconds


def _run(setting: Setting, index: int, winner: Candidate, sample: Path, steps: int, foreseen: float) -> Ran | None:
    """The command, watched; None where the budget ended it. It is ended once it has told its rate: what `trl` does
    after that is to save the model."""
    assert setting.trl is not None
    folder = setting.trial_folder(index)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for stale in ("output.log", "ending.json", "reply.json", "result.json"):
        (folder / stale).unlink(missing_ok=True)
    options = {"max_steps": steps, "logging_strategy": "steps", "logging_steps": steps, "disable_tqdm": True}
    config = folder / "trl.yaml"
    write_whole(config, setting.config(winner, sample, folder / "output", options).encode())
    arguments = ["trl", setting.job.method, "--config", str(config), *setting.job.flags]
    write_whole(folder / "command.txt", (shlex.join(arguments) + "\n").encode())
    label = setting.label(winner)
    setting.emit(TrialStarted(trial=index, label=label, purpose="gate", reason="by the real command"))
    began = setting.clock.now()
    until = began + PATIENCE * foreseen + 60
    child = setting.children.spawn(
        "autotune.trial.command:become",
        {"program": str(setting.trl), "arguments": arguments},
        folder,
        environment=_environment(setting),
        working_folder=setting.job_folder,
    )
    hung = no_time = False
    try:
        while child.alive() and not (hung or no_time) and _rate_told(child) is None:
            setting.clock.sleep(POLL_SECONDS)
            no_time = setting.seconds_left() <= 0
            hung = setting.clock.now() > until
    finally:
        child.kill()
        shutil.rmtree(folder / "output", ignore_errors=True)
    ran = _read(child, seconds=setting.clock.now() - began)
    if ran.rate is None and hung:
        ran = msgspec.structs.replace(ran, failure=f"it was not done in {ran.seconds:.0f} s, {foreseen:.0f} s foreseen")
    unfinished = ran.rate is None and no_time
    outcome: Outcome = "stopped" if unfinished else "ok" if ran.rate is not None else "hung" if hung else "error"
    result = TrialResult(
        index=index,
        purpose="gate",
        candidate=winner,
        label=label,
        outcome=outcome,
        detail=None if unfinished else ran.failure,
        rate=ran.rate,
        seconds=ran.seconds,
    )
    finished(setting, result, None)
    return None if unfinished else ran


def _read(child: Child, *, seconds: float) -> Ran:
    """What the command said, once it has ended."""
    rate = _rate_told(child)
    if rate is not None:
        return Ran(rate, seconds)
    log = child.folder / "output.log"
    error = read_log(_said(child))
    return Ran(None, seconds, error[1] if error is not None else last_error(log))


def tokens_and_seconds(said: str) -> tuple[float, float] | None:
    """What `trl` prints once it is through with its steps: `num_tokens` and `train_runtime`; None before that."""
    runtime = re.findall(NUMBER % "train_runtime", said)
    tokens = re.findall(NUMBER % "num_tokens", said)
    return (float(tokens[-1]), float(runtime[-1])) if tokens and runtime else None


def _rate_told(child: Child) -> float | None:
    """Useful tokens/s by what the command has printed; None until it is through with its steps."""
    told = tokens_and_seconds(_said(child))
    return told[0] / told[1] if told is not None else None


def _said(child: Child) -> str:
    """The whole lines of its log."""
    try:
        text = (child.folder / "output.log").read_text(errors="replace")
    except OSError:
        return ""
    return text[: text.rfind("\n") + 1]


def _environment(setting: Setting) -> dict[str, str | None]:
    """From a child's environment to that of a command started by hand, with the data's cache in the run's folder."""
    wanted = dict(os.environ) | {
        "HF_DATASETS_CACHE": str(setting.folder / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if setting.machine.backend == "cuda":
        wanted["CUDA_VISIBLE_DEVICES"] = setting.machine.gpus[0].uuid
    return environment_difference(wanted, setting.children.environment)


def _steps(result: TrialResult) -> int:
    """Optimizer steps in whole passes over the sample, for at least `STEPS_SECONDS`."""
    a_pass = joined(result.passes)
    passes = max(1, math.ceil(STEPS_SECONDS * len(result.passes) / a_pass.seconds))
    return passes * result.passes[0].steps


def _expected_seconds(result: TrialResult, steps: int) -> float:
    """Of so many steps by the command: at the trial's speed, and what its first steps took longer (allocating,
    compiling)."""
    passes = joined(result.passes)
    a_step = passes.seconds / passes.steps
    longer = result.warm_up_seconds - result.warm_up_steps * a_step
    return steps * a_step + max(0.0, longer)


def _expected_rate(result: TrialResult, steps: int) -> float:
    passes = joined(result.passes)
    return passes.useful_tokens / passes.steps * steps / _expected_seconds(result, steps)


def _seconds_foreseen(result: TrialResult, steps: int) -> float:
    return FRESH_SECONDS + (result.startup_seconds or 1.0) + _expected_seconds(result, steps)


def _against(share: float) -> str:
    return f"{share:.0%} of its trial's"
