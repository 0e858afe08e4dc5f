"""What the user takes away: tuned.yaml, launch.sh, profile.yaml, report.md."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autotune.child import write_whole
from autotune.deliver import grades
from autotune.deliver.report import report
from autotune.job import Job, write_job
from autotune.plan import recipe
from autotune.plan.lengths_report import percentiles
from autotune.probe.machine import Machine
from autotune.search.found import Found
from autotune.search.setting import Setting
from autotune.trial.result import TrialResult
from profiles import Profile, to_yaml
from profiles.profile import Evidence, ValidFor

SO_FAR = (
    "The fastest so far (#{number}) of a run that has not ended: neither confirmed nor checked to be the same training"
)


class Delivered(msgspec.Struct, frozen=True):
    options: dict[str, Any]  # what differs from the job
    config: Path | None
    profile: Path | None


def write(setting: Setting, found: Found, folder: Path, *, seconds: float) -> Delivered:
    """Write all the files of a run that has ended, each whole. Without a candidate that ran there is only a report."""
    changes = recipe.changes(setting.job, setting.space, found.winner)
    options = {change.name: change.value for change in changes}
    config: Path | None = None
    profile: Path | None = None
    if found.outcome != "failed":
        config = folder / "tuned.yaml"
        write_whole(config, tuned_yaml(setting.job, setting.machine, changes).encode())
        launch = folder / "launch.sh"
        write_whole(launch, launch_script(setting.job, setting.machine, config.resolve()).encode())
        launch.chmod(0o700)
        profile = folder / "profile.yaml"
        write_whole(profile, to_yaml(profile_of(setting, found, recipe.portable(changes))).encode())
    write_whole(folder / "report.md", report(setting, found, changes, seconds=seconds).encode())
    return Delivered(options, config, profile)


def write_so_far(setting: Setting, fastest: TrialResult | None, folder: Path) -> None:
    """Write tuned.yaml of a run that goes on, so that it is there if the run is killed: `fastest` surely beat the job's
    own settings, and is neither confirmed nor checked. None takes it away."""
    config = folder / "tuned.yaml"
    if fastest is None:
        config.unlink(missing_ok=True)
        return
    changes = recipe.changes(setting.job, setting.space, fastest.candidate)
    text = tuned_yaml(setting.job, setting.machine, changes)
    write_whole(config, f"# {SO_FAR.format(number=fastest.index)}\n{text}".encode())


def tuned_yaml(job: Job, machine: Machine, changes: list[recipe.Change]) -> str:
    """The user's YAML with the speed options changed, each with grade and reason beside it."""
    options: dict[str, Any] = {change.name: change.value for change in changes}
    reasons = {change.name: f"{grades.label(change.grade)}: {change.reason}" for change in changes}
    if machine.backend == "cuda" and len(machine.gpus) > 1:
        # `trl` would start a process on every card; what was measured is one process on this one
        options |= {"num_processes": 1, "env": {"CUDA_VISIBLE_DEVICES": machine.gpus[0].uuid}}
        reasons["num_processes"] = "tuned on one card"
    return write_job(job, options, reasons)


def launch_script(job: Job, machine: Machine, config: Path) -> str:
    """A shell script that runs the tuned config where the job's relative paths mean what they meant."""
    command = shlex.join(["trl", job.method, "--config", str(config), *job.flags])
    lines = [
        "#!/usr/bin/env bash",
        "# Runs the tuned training as it was measured; further TRL options can be added behind it",
        "set -euo pipefail",
        f"cd {shlex.quote(job.folder)}",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
    ]
    if machine.backend == "cuda":
        lines.append(f"export CUDA_VISIBLE_DEVICES={shlex.quote(machine.gpus[0].uuid)}")
    return "\n".join([*lines, f'exec {command} "$@"', ""])


def launch(job: Job, machine: Machine, config: Path, more: Sequence[str] = ()) -> None:
    """Become `trl` with the tuned config and `more` options: its own output, its own exit code. Does not return."""
    environment = dict(os.environ)
    if machine.backend == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = machine.gpus[0].uuid
    beside = Path(sys.executable).with_name("trl")
    os.chdir(job.folder)
    arguments = ["trl", job.method, "--config", str(config), *job.flags, *more]
    if beside.exists():
        os.execve(beside, arguments, environment)
    os.execvpe("trl", arguments, environment)


def profile_of(setting: Setting, found: Found, options: dict[str, Any]) -> Profile:
    """The portable result: no path, no name of person, host or private data."""
    machine, model, speedup = setting.machine, setting.model, found.speedup
    gpus = [
        {
            "name": gpu.name,
            "compute_capability": list(gpu.compute_capability or ()),
            "memory_bytes": gpu.memory_bytes,
            "count": 1,
        }
        for gpu in machine.gpus[:1]
    ]
    names = ("trl", "transformers", "torch", "accelerate", "peft", "kernels", "vllm")
    return Profile(
        method=setting.job.method,
        options=options,
        placement={"processes": 1},
        valid_for=ValidFor(
            gpus=tuple(gpus),
            cpu=None if gpus else {"name": machine.cpu.name, "cores": machine.cpu.cores},
            versions={**{name: machine.versions.get(name) for name in names}, "driver": machine.driver},
            model={
                "architecture": model.architecture,
                "parameters": model.parameters,
                "layers": model.layers,
                "hidden_size": model.hidden_size,
                "vocabulary": model.vocabulary,
            },
            lengths={"percentiles": percentiles(setting.data.lengths), "max_length": setting.data.max_length},
            overridden=machine.overridden,
        ),
        evidence=Evidence(
            rate_unit="useful tokens/s",
            baseline_rate=_figures(found.baseline.rate) if found.baseline and found.baseline.rate else None,
            best_rate=_figures(found.best.rate) if found.best and found.best.rate else None,
            speedup=_figures(speedup.value) if speedup else None,
            speedup_interval=(_figures(speedup.low), _figures(speedup.high)) if speedup else None,
            trials=len(found.results),
            grade=setting.space.grade(found.winner),
            differences=tuple(grades.differences(setting.space, found.winner)),
            gates={gate.name: gate.detail if gate.value is None else _figures(gate.value) for gate in found.gates},
        ),
        measured=time.strftime("%Y-%m-%d"),
    )


def _figures(value: float) -> float:
    """Four significant digits: more were not measured."""
    return float(f"{value:.4g}")
