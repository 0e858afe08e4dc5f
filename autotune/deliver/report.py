"""report.md: what was tried, what won and why, what it saves, and what was out and why."""

from __future__ import annotations

from typing import Any

from autotune import earlier
from autotune.deliver import grades, wording
from autotune.job import INSIDE_MODEL_INIT_KWARGS
from autotune.plan.recipe import Change
from autotune.plan.space import Candidate
from autotune.probe.machine import describe
from autotune.search.failures import describe_failure
from autotune.search.found import Found, why_kept
from autotune.search.setting import Setting
from autotune.search.training import epoch_seconds
from autotune.trial.failures import first_traceback
from autotune.trial.result import TrialResult


def report(setting: Setting, found: Found, changes: list[Change], *, seconds: float) -> str:
    """The whole report, as Markdown."""
    parts = [
        f"# {headline(found)}",
        _job(setting),
        _comparison(setting, found),
        _changed(changes),
        _python(setting, changes),
        _same(setting, found),
        _tried(setting, found),
        _in_turns(setting, found),
        _failed(setting, found),
        _out(setting, found),
        _search(found),
        _time(found, seconds),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(found: Found) -> str:
    """The result in one line."""
    if found.outcome == "failed":
        return "No trial finished"
    if found.outcome == "kept":
        return f"Your settings are kept: {why_kept(found)}"
    if found.best is None:
        return "Interrupted before a trial was done: your settings as they were"
    if found.speedup is None:
        return "Yours did not run here, and this does"
    if found.outcome == "interrupted" and all(one.candidate == found.winner for one in found.results):
        return "Interrupted before another setting was measured: your settings as they were"
    unconfirmed = "" if found.confirmed_rounds else ", not confirmed"
    interrupted = " (interrupted)" if found.outcome == "interrupted" else ""
    busy = ", on a busy machine" if found.busy else ""
    if not found.speedup.known:
        return f"Faster than yours; by how much is {wording.ratio(found.speedup)}{unconfirmed}{interrupted}"
    return f"{wording.ratio(found.speedup)} as fast as yours{unconfirmed}{busy}{interrupted}"


def _job(setting: Setting) -> str:
    job, machine = setting.job, setting.machine
    precision = wording.precision(job, machine)
    lines = [
        f"* job: {wording.job_line(job).replace('  ', ' ')}",
        f"* machine: {describe(machine)}; {precision.value}: {precision.reason}",
        f"* data: {wording.data_line(setting.data)}",
    ]
    if setting.earlier is not None:
        lines.append(f"* {earlier.line(setting.earlier)}")
    lines += [f"* added so that it runs here: `{name}: {value}`" for name, value in job.additions.items()]
    return "\n".join(lines)


def _comparison(setting: Setting, found: Found) -> str:
    best, baseline = found.best, found.baseline
    if best is None or best.rate is None:
        return ""
    rows = ["| | useful tokens/s | one epoch | memory |", "|---|---|---|---|"]
    base_candidate = setting.space.baseline
    memory = {result.candidate: result for result in found.memory}
    if baseline is not None and baseline.rate is not None:
        rows.append(_row("yours", setting, baseline, memory))
    else:
        failed = next((one for one in found.results if one.candidate == base_candidate), None)
        why = describe_failure(failed) if failed is not None else "it was not tried"
        rows.append(_cells("yours", f"did not run: {why}", "", ""))
    if best.candidate != base_candidate:
        rows.append(_row("tuned", setting, best, memory))
    return "\n".join(rows)


def _row(name: str, setting: Setting, result: TrialResult, memory: dict[Candidate, TrialResult]) -> str:
    assert result.rate is not None
    epoch = wording.seconds(epoch_seconds(setting, result.candidate, result.rate))
    worst = memory.get(result.candidate, result)
    held = wording.gigabytes(worst.peak_bytes)
    return _cells(f"{name}: {result.candidate}", wording.rate(result.rate), epoch, held)


def _cells(*cells: object) -> str:
    """A row of a Markdown table; an error's text may hold what would end a cell."""
    escaped = [" ".join(str(cell).replace("|", "\\|").splitlines()) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _changed(changes: list[Change]) -> str:
    if not changes:
        return ""
    rows = ["## What changed", "", "| option | was | is | grade | why |", "|---|---|---|---|---|"]
    rows += [
        _cells(f"`{change.name}`", _value(change.was), _value(change.value), change.grade, change.reason)
        for change in changes
    ]
    return "\n".join(rows)


def _value(value: Any) -> str:
    return "-" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _python(setting: Setting, changes: list[Change]) -> str:
    """The winner as the call that TRL's guides show; what only the launcher takes is said beside it."""
    resolved = setting.job.resolved
    arguments: dict[str, Any] = {}
    launcher: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for change in changes:
        if change.name in INSIDE_MODEL_INIT_KWARGS:
            model[change.name] = change.value
        elif change.name == "model_init_kwargs":
            model |= change.value
        elif change.name in resolved:
            arguments[change.name] = change.value
        else:
            launcher[change.name] = change.value
    if model:
        arguments["model_init_kwargs"] = {**(resolved.get("model_init_kwargs") or {}), **model}
    for name, value in setting.job.additions.items():
        arguments.setdefault(name, value)
    body = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    threads = launcher.get("num_cpu_threads_per_process")
    before = "" if threads is None else f"torch.set_num_threads({threads})  # before training\n\n"
    text = f"## In Python\n\n```python\n{before}SFTConfig(\n    # your own options, and\n{body})\n```"
    return text if arguments or launcher else ""


def _same(setting: Setting, found: Found) -> str:
    told = [
        *grades.differences(setting.space, found.winner),
        *(f"{gate.name}: {gate.detail}" for gate in found.gates),
    ]
    heading = grades.heading(setting.space.grade(found.winner))
    return "\n".join([f"## {heading}", "", *(f"* {text}" for text in told)]) if told else ""


def _tried(setting: Setting, found: Found) -> str:
    base = setting.space.baseline
    baseline = next((one for one in found.results if one.candidate == base), None)  # as measured beside these
    rows = [
        "## What was tried",
        "",
        "| # | setting | grade | useful tokens/s | against yours | memory | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(found.results, key=lambda one: (one.busy, -(one.rate or 0.0), one.index))
    for result in ordered:
        rate = wording.rate(result.rate) if result.rate else ""
        against = f"{result.rate / baseline.rate:.2f}x" if result.rate and baseline and baseline.rate else ""
        outcome = "ok" if result.outcome == "ok" else _outcome(result)
        outcome += "; the machine was busy" if result.busy else ""
        if result.rate and result.at_speed != 1.0 and result.candidate != base:  # yours was measured anew
            outcome += f"; est.: {wording.rate(result.rate / result.at_speed)} was measured before the machine changed"
        grade, memory = setting.space.grade(result.candidate), wording.gigabytes(result.peak_bytes)
        rows.append(_cells(result.index, result.label, grade, rate, against, memory, outcome))
    return "\n".join(rows)


def _in_turns(setting: Setting, found: Found) -> str:
    """What was measured again for the speed-up that is told, also where nothing came of it."""
    if not found.in_turns:
        return ""
    reference = found.in_turns[0]
    rows = ["## Measured in turns", "", "| setting | useful tokens/s | against yours | outcome |", "|---|---|---|---|"]
    for result in found.in_turns:
        rate = wording.rate(result.rate) if result.rate else ""
        against = f"{result.rate / reference.rate:.2f}x" if result.rate and reference.rate else ""
        rows.append(_cells(result.label, rate, against, "ok" if result.outcome == "ok" else _outcome(result)))
    if found.busy:
        rows += ["", "Other processes had the cores in every round."]
    return "\n".join(rows)


def _outcome(result: TrialResult) -> str:
    if result.outcome == "pruned":
        return "stopped early: it could not reach the best"
    return describe_failure(result)


def _failed(setting: Setting, found: Found) -> str:
    """The commonest failure with the traceback of its first trial, as that trial printed it."""
    failed = [one for one in found.results if one.outcome in ("oom", "error", "killed", "hung")]
    if not failed:
        return ""
    reasons = [describe_failure(one) for one in failed]
    reason = max(reasons, key=reasons.count)
    first = failed[reasons.index(reason)]
    log = setting.trial_folder(first.index) / "output.log"
    said = log.read_text(errors="replace") if log.exists() else ""
    traceback = first_traceback(said, of=first.detail)
    times = f"{reasons.count(reason)} of {len(failed)} failures" if len(failed) > 1 else "the only failure"
    lines = ["## What failed most", "", f"{times}, first in #{first.index}: {_plain(reason)}"]
    if traceback is not None:
        fence = "````" if "```" in traceback else "```"
        lines += ["", f"{fence}text", traceback, fence]
    return "\n".join(lines)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _out(setting: Setting, found: Found) -> str:
    rows = ["## What was out, and why", "", "| axis | value | reason |", "|---|---|---|"]
    rows += [
        _cells(axis.name, rejected.value, rejected.reason) for axis in setting.space.axes for rejected in axis.rejected
    ]
    rows += [_cells("", candidate, reason) for candidate, reason in found.ruled_out.items()]
    return "\n".join(rows) if len(rows) > 4 else ""


def _search(found: Found) -> str:
    """Why the search ended where it did, and how far its predictions can be trusted."""
    changed = sorted(one.index for one in found.results if one.at_speed != 1.0)
    lines = [
        f"* it ended: {found.ended}" if found.ended else "",
        f"* {found.predicted}" if found.predicted else "",
        "* the machine changed its speed meanwhile: the figures of "
        f"{', '.join(f'#{index}' for index in changed)} are brought to that of its end"
        if changed
        else "",
    ]
    said = [line for line in lines if line]
    return "\n".join(["## How the search went", "", *said]) if said else ""


def _time(found: Found, seconds: float) -> str:
    trials = [*(one for one in found.results if one.index >= found.session_index), *found.set_aside]
    session = "all" if found.session_index == 0 else "this session, to which these figures belong"
    inside = sum(result.step_seconds for result in trials)
    starting = sum(result.startup_seconds or 0.0 for result in trials)
    search = found.search_seconds
    if not search:
        return ""
    rest = max(0.0, search - inside - starting)
    lines = [
        "## Where the time went",
        "",
        f"* {wording.seconds(seconds)} in {session}, {wording.seconds(search)} of it searching and "
        f"{wording.seconds(found.confirm_seconds)} confirming",
        f"* of the search: {inside / search:.0%} inside measured and warm-up steps, {starting / search:.0%} starting "
        f"trials, {rest / search:.0%} elsewhere: reading results, ending trials",
    ]
    if found.set_aside:
        count = len(found.set_aside)
        trials_of_it = "one trial was" if count == 1 else f"{count} trials were"
        took = wording.seconds(sum(one.seconds for one in found.set_aside))
        lines.append(f"* {trials_of_it} for other ends or beside others, and counted for nothing else: {took} of it")
    return "\n".join(lines)
