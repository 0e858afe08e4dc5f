"""`trl-autotune lengths`: a look at a job's data, of any method, without tuning anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from autotune.children import Children
from autotune.deliver import wording
from autotune.errors import AutotuneError
from autotune.job import Job, read_job
from autotune.plan import lengths_report
from autotune.plan.lengths_report import LengthsReport, job_report
from autotune.plan.sampled import Intervals, intervals_of
from autotune.probe.lengths import kept_lengths, measure_lengths
from autotune.probe.machine import Machine
from autotune.probe.model import probe_model
from autotune.session import Options

Say = Callable[[Literal["job", "data"], str], None]
Progress = Callable[[str, int, int], None]

# The data of a job for a GPU can be looked at where there is none: TRL's parser is told that there is one
ANY_GPU = {"cuda": True, "bf16": True, "tf32": True}


class DataLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the data found; intervals where a sample of the rows was measured."""

    report: LengthsReport
    intervals: Intervals | None


def look(
    options: Options, children: Children, machine: Machine, *, all_rows: bool, say: Say, progress: Progress | None
) -> DataLook:
    """Read the job, measure its rows and plan every arrangement of them. Writes nothing but lengths.

    Raises AutotuneError for what TRL would refuse, and where the data cannot be used.
    """
    job = read_job(
        options.method,
        options.arguments,
        folder=options.folder,
        children=children,
        accelerator=True,
        cpu_bf16=True,
        elsewhere=ANY_GPU if machine.backend == "cpu" else None,
        for_data=True,
    )
    say("job", wording.job_line(job))
    position_limit = _position_limit(job, options, children, say)
    lengths = measure_lengths(
        job.resolved,
        folder=options.folder,
        children=children,
        progress=None if progress is None else lambda done, of: progress("reading the data", done, of),
        method=job.method,
        all_rows=all_rows,
        cache=kept_lengths(),
    )
    report = job_report(lengths, job.resolved, position_limit=position_limit, processes=_processes(job))
    return DataLook(report=report, intervals=intervals_of(report, job.resolved))


def to_builtins(found: DataLook) -> dict[str, Any]:
    """What `lengths --json` prints (schema 1)."""
    told = lengths_report.to_builtins(found.report)
    return told if found.intervals is None else {**told, "intervals": msgspec.to_builtins(found.intervals)}


def _position_limit(job: Job, options: Options, children: Children, say: Say) -> int | None:
    """The model's positions. The data can be told without them: a model that only its method loads is no error."""
    try:
        model = probe_model(
            job.resolved["model_name_or_path"],
            revision=job.resolved.get("model_revision"),
            trust_remote_code=bool(job.resolved.get("trust_remote_code")),
            children=children,
            folder=options.folder,
        )
    except AutotuneError as error:
        if job.method == "sft":
            raise
        say("job", f"the model's positions are not known: {error.what}")
        return None
    return model.max_position_embeddings


def _processes(job: Job) -> int:
    """How many the launcher's options ask for; what an accelerate config file says of it is not looked into."""
    asked = str(job.launcher.get("num_processes") or 1)
    return int(asked) if asked.isdecimal() else 1
