"""What was found, in words a person likes to read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autotune.job import Job, effective
from autotune.job_limits import unscalable, weights_dtype
from autotune.plan.data import Data
from autotune.plan.lengths_report import LengthsReport, percentiles, sampling_seed, to_builtins
from autotune.plan.space import Space
from autotune.probe.facts import Fact
from autotune.probe.machine import AMPERE, AttentionBackend, Machine
from autotune.probe.used import used_gpu
from autotune.search.found import UNSURE
from autotune.search.statistics import Estimate
from autotune.search.training import duration

HUB = "kernels-community/"  # where the kernels come from that are named without a place
seconds = duration
EMULATES = "emulates bf16, which is slow"
QUOTED = re.compile(r",? ?`[^`]+`")


def rate(value: float) -> str:
    """Tokens per second: `930`, `4.71k`, `43.0k`."""
    if value < 999.5:
        return f"{value:.0f}"
    thousands = value / 1000
    return f"{thousands:.2f}k" if thousands < 9.995 else f"{thousands:.1f}k"


def gigabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f} GB"


def ratio(estimate: Estimate) -> str:
    """`2.61x (2.57 to 2.66)`, or that it is not known."""
    if not estimate.known:
        return f"not known ({UNSURE})"
    return f"{estimate.value:.2f}x ({estimate.low:.2f} to {estimate.high:.2f})"


def data_name(job: Job) -> str:
    """The data as the user names it."""
    resolved = job.resolved
    mixture = resolved.get("datasets") or []
    names = [_one_data_name(entry) for entry in mixture] or [str(resolved.get("dataset_name"))]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _one_data_name(entry: dict[str, Any]) -> str:
    files = entry.get("data_files")
    while isinstance(files, dict | list) and files:
        files = next(iter(files.values())) if isinstance(files, dict) else files[0]
    if isinstance(files, str):
        return Path(files).name
    return str(entry.get("name") or entry.get("path"))


def job_line(job: Job) -> str:
    """What is tuned."""
    source = f"   ({job.config_path})" if job.config_path else ""
    return f"{job.method}  {job.resolved['model_name_or_path']}  on  {data_name(job)}{source}"


def job_attention(job: Job) -> str | None:
    """The attention implementation the user asked for."""
    value = effective(job, "attn_implementation")
    return str(value) if value is not None else None


def precision(job: Job, machine: Machine) -> Fact:
    """What the job computes in, and who decided: the user, TRL's default, or the machine."""
    resolved = job.resolved
    value = "bf16" if resolved.get("bf16") else "fp16" if resolved.get("fp16") else "float32"
    added = next((job.addition_reasons[name] for name in ("bf16", "fp16") if name in job.additions), None)
    if added is not None:
        return Fact(value, added)
    if any(name in job.options for name in ("bf16", "fp16")):
        return Fact(value, "as your job has it")
    if value != machine.precision.value:
        return Fact(value, "TRL's default")
    told = "TRL's default" in machine.precision.reason  # where the precision is not probed
    return Fact(value, machine.precision.reason if told else f"TRL's default, and {machine.precision.reason}")


def precision_notes(job: Job, machine: Machine, *, checkpoint_dtype: str | None = None) -> list[str]:
    """What a person who chose the precision should know; nothing is changed, since it was chosen.

    torch accepts bf16 below Ampere and emulates it (torch 2.13, `torch.cuda.is_bf16_supported`).
    """
    notes = []
    computes = precision(job, machine)
    written = [name for name in ("bf16", "fp16") if name in job.options]
    if "precision" in machine.overridden and written and computes.value != machine.precision.value:
        notes.append(
            f"`--precision {machine.precision.value}` has no effect: your job says "
            f"`{written[0]}: {str(job.options[written[0]]).lower()}`, and that stays"
        )
    used = used_gpu(machine.gpus)
    on_gpu = machine.backend == "cuda" and not job.resolved.get("use_cpu")
    if not on_gpu or used is None or used.compute_capability is None or used.compute_capability >= AMPERE:
        return notes
    if computes.value == "bf16":
        who = "your job has `bf16: true`" if written else "bf16 is asked for"
        number = f"{used.compute_capability[0]}.{used.compute_capability[1]}"
        held = weights_dtype(job.resolved, checkpoint_dtype)
        if unscalable(job.resolved, checkpoint_dtype) is None:
            rest = "`fp16: true` is native there; not changed, since you asked for it"
        else:
            who = who if written else f"no `fp16: true` is added over {held} weights, whose gradients it cannot scale"
            rest = "`fp16: true` with `dtype: float32` is native there; not changed, since you asked for these weights"
        notes.append(f"{who}, and compute capability {number} {EMULATES}; {rest}")
    return notes


def what_if_line(file: Path | None) -> str:
    """The first line of a plan for a machine that is not here."""
    return f"what-if: the machine of `{file}` is not here; nothing was tried, and attention is as it is expected there"


def kernels_line(machine: Machine) -> str:
    """Which attention backends can be used, and why the others cannot."""
    usable = [f"{one.name} ({one.packing})" for one in machine.attention if one.usable]
    out = "; ".join(_out(names, reason) for names, reason in attention_out(machine.attention))
    expected = "expected: " if machine.what_if else ""
    return f"{expected}{', '.join(usable)}" + (f"   not usable: {out}" if out else "")


def attention_out(backends: Iterable[AttentionBackend]) -> list[tuple[list[str], str]]:
    """The backends that cannot be used, by their reason; where it names another thing of each, it is told without."""
    alike: dict[str, list[AttentionBackend]] = {}
    for one in backends:
        if not one.usable:
            alike.setdefault(QUOTED.sub("", one.reason).strip(), []).append(one)
    found = []
    for same, group in alike.items():
        reason = group[0].reason if len({one.reason for one in group}) == 1 else same
        names = [one.name.removeprefix(HUB) for one in group]
        found.append((names, reason.removeprefix("expected: ")))
    return found


def _out(names: list[str], reason: str) -> str:
    shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return f"{shown} ({reason.removeprefix(names[0]).strip() if len(names) == 1 else reason})"


def data_line(data: Data) -> str:
    """The lengths, and what the job's `max_length` does to them."""
    lengths = data.lengths
    at = percentiles(lengths)
    line = f"{lengths.rows:,} rows   median {at['50']:,} tokens   99 %: {at['99']:,}   longest {at['100']:,}"
    if lengths.rows_measured < lengths.rows:
        line += f"   (from {lengths.rows_measured:,} random rows)"
    if data.max_length is not None:
        total = sum(lengths.tokens) * data.kept.weight
        share = data.kept.dropped_tokens / total if total else 0.0
        line += f"   max_length {data.max_length:,} drops {share:.1%} of tokens" if share else ""
    return line


def plan_line(space: Space, estimate_seconds: float, budget_seconds: float) -> str:
    """How much there is to try."""
    axes = sum(len(axis.choices) > 1 for axis in space.axes)
    budget = seconds(budget_seconds)
    ends = f"about {seconds(estimate_seconds)} (est.), at most the budget of {budget}"
    return (
        f"{space.size} candidate{'' if space.size == 1 else 's'}, {axes} ax{'i' if axes == 1 else 'e'}s; "
        f"{ends if estimate_seconds < 0.9 * budget_seconds else f'at most the budget of {budget}'}"
    )


def lengths_json(data: Data, report: Callable[..., LengthsReport], job: Job) -> dict[str, Any]:
    """`lengths.json` of the run folder."""
    resolved = job.resolved
    return to_builtins(
        report(
            data.lengths,
            max_length=data.max_length,
            micro_batch=resolved["per_device_train_batch_size"],
            accumulation=resolved["gradient_accumulation_steps"],
            truncation_mode=resolved["truncation_mode"],
            num_proc=resolved.get("dataset_num_proc"),
            shuffled=bool(resolved.get("shuffle_dataset")),
            seed=sampling_seed(resolved),
            in_order=resolved.get("train_sampling_strategy") == "sequential",
        )
    )


def space_lines(space: Space, estimate_seconds: float, budget_seconds: float) -> list[str]:
    """How long it may take, and every axis with its choices and what is out, for `--dry-run`."""
    lines = [plan_line(space, estimate_seconds, budget_seconds)]
    for axis in space.axes:
        lines += ["", axis.name]
        lines += [f"  {choice.value}  ({choice.grade}) {choice.reason}" for choice in axis.choices]
        lines += [f"  not {rejected.value}: {rejected.reason}" for rejected in axis.rejected]
    if space.apart:
        together: dict[str, list[str]] = {}  # reason -> values
        for one in space.apart:
            values = " with ".join(f"{name} {value}" for name, value in zip(one.axes, one.values, strict=True))
            together.setdefault(one.reason, []).append(values)
        lines += ["", "not together"]
        lines += [f"  {values}: {reason}" for reason, every in together.items() for values in every]
    return lines
