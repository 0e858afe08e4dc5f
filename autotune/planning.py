"""What a run does before its first trial: read the job, look at machine, kernels and data, lay out the space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autotune import earlier
from autotune import folder as run_folder
from autotune.children import Children
from autotune.deliver import wording
from autotune.errors import AutotuneError
from autotune.events import AnyEvent, Note, RunFinished, Topic
from autotune.folder import Prepared
from autotune.job import Job, read_job
from autotune.job_limits import check_half_weights, unscalable
from autotune.plan import cost, findings
from autotune.plan.axes import build_space
from autotune.plan.data import Data
from autotune.plan.memory import MemoryModel
from autotune.plan.memory_room import Outlook, free_bytes_of, outlook
from autotune.plan.precision import attention_precision
from autotune.plan.space import OFFERED, Grade, Space
from autotune.probe.abilities import probe_abilities
from autotune.probe.attention import probe_attention
from autotune.probe.attention_names import malformed
from autotune.probe.builds import expected_attention
from autotune.probe.layer_kernels import probe_layer_kernels
from autotune.probe.lengths import kept_lengths, measure_lengths
from autotune.probe.machine import Machine, as_torch_sees, describe
from autotune.probe.model import ModelShape, probe_model
from autotune.probe.overrides import asked_precision, precision_to_add
from autotune.probe.used import used_gpu, used_line
from autotune.search.confirm import least_seconds
from autotune.search.end_to_end import command_here
from autotune.search.setting import Setting
from autotune.search.start import MOST_OTHERS
from autotune.session import Options

DEFAULT_BUDGET_SECONDS = 600.0
MEMORY_SHARE = 0.9  # of the memory that is free, for one trial on a CPU

Listener = Callable[[AnyEvent], None]
Progress = Callable[[str, int, int], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `prepare` gives: everything up to the first trial."""

    prepared: Prepared
    data: Data
    space: Space
    memory: Outlook | None = None
    notes: tuple[Note, ...] = ()


def prepare(
    options: Options, children: Children, machine: Machine, *, emit: Listener, progress: Progress | None = None
) -> Plan:
    """Read the job, look at model, kernels and data, and plan. Starts no trial and writes nothing but lengths."""
    notes: list[Note] = []
    emit = _keeping(emit, notes)
    job = _read(options, children, machine, precision_to_add(machine))
    note(emit, "job", wording.job_line(job))
    resolved = job.resolved
    model = probe_model(
        resolved["model_name_or_path"],
        revision=resolved.get("model_revision"),
        trust_remote_code=bool(resolved.get("trust_remote_code")),
        children=children,
        folder=options.folder,
    )
    if asked_precision(machine) is None and "fp16" in job.additions and unscalable(resolved, model.dtype):
        job = _read(options, children, machine, None)
        resolved = job.resolved
    for name, value in job.additions.items():
        note(emit, "job", f"`{name}: {str(value).lower()}` added: {job.addition_reasons[name]}")
    if job.import_environment_differs and not children.cold:
        different = ", ".join(f"{name}={value}" for name, value in job.import_environment_differs.items())
        raise AutotuneError(
            f"this job's launcher sets {different}, which a forked trial cannot take over",
            hint="run again with `--cold`: every trial is then a fresh process",
        )
    precision = wording.precision(job, machine)
    note(emit, "machine", f"{describe(machine)}   {precision.value}: {precision.reason}")
    for text in wording.precision_notes(job, machine, checkpoint_dtype=model.dtype):
        note(emit, "machine", text)
    used = used_line(machine.gpus, there=machine.what_if)
    if used is not None:
        note(emit, "machine", used)
    for problem in machine.problems:
        note(emit, "machine", f"{problem.what}; {problem.hint}")
    if machine.backend != "cpu":
        check_half_weights(resolved, checkpoint_dtype=model.dtype)
    machine = _with_kernels(job, machine, model, options.folder, children)
    _check_attention(job, machine)
    note(emit, "kernels", wording.kernels_line(machine))
    lengths = measure_lengths(
        resolved,
        folder=options.folder,
        children=children,
        progress=None if progress is None else lambda done, of: progress("reading the data", done, of),
        cache=kept_lengths(),
    )
    data = Data(job, lengths, model)
    if not data.kept.tokens:
        raise AutotuneError(
            f"none of the {lengths.rows:,} rows has a token left that bears loss",
            hint=f"at `max_length: {data.max_length}` the prompts alone fill every row; TRL would drop them all",
        )
    note(emit, "data", wording.data_line(data))
    for problem in findings.warnings(
        lengths,
        data.kept,
        data.packed(job.resolved["per_device_train_batch_size"], job.resolved["gradient_accumulation_steps"]),
        max_length=data.max_length,
        position_limit=model.max_position_embeddings,
    ):
        note(emit, "data", f"{problem.what}; {problem.hint}")
    allowed: frozenset[Grade] = OFFERED | set(options.allowed)
    space = build_space(job, machine, data, allowed=allowed)
    memory_limit = options.memory_limit_bytes
    if memory_limit is None and machine.backend == "cpu":
        memory_limit = int(MEMORY_SHARE * machine.free_ram_bytes)  # a trial must not take the box down
    prepared = Prepared(
        job=job,
        machine=machine,
        model=model,
        lengths=lengths,
        allowed=tuple(sorted(allowed)),
        budget_seconds=options.budget_seconds or DEFAULT_BUDGET_SECONDS,
        trial_limit=options.trial_limit,
        memory_limit_bytes=memory_limit,
    )
    if not machine.what_if:
        prepared = msgspec.structs.replace(
            prepared, earlier=earlier.find(prepared, space, options.folder / run_folder.RUNS)
        )
    if prepared.earlier is not None:
        note(emit, "plan", earlier.line(prepared.earlier))
    memory = outlook(space, MemoryModel(data, model, job, machine), free_bytes_of(machine, memory_limit))
    note(emit, "plan", str(memory))
    return Plan(prepared=prepared, data=data, space=space, memory=memory, notes=tuple(notes))


def _keeping(emit: Listener, notes: list[Note]) -> Listener:
    """The listener, which keeps the notes beside."""

    def keep(event: AnyEvent) -> None:
        if isinstance(event, Note):
            notes.append(event)
        emit(event)

    return keep


def _read(options: Options, children: Children, machine: Machine, precision: tuple[str, str] | None) -> Job:
    return read_job(
        options.method,
        options.arguments,
        folder=options.folder,
        children=children,
        accelerator=machine.backend != "cpu",
        cpu_bf16=machine.cpu.bf16 or asked_precision(machine) == "bf16",
        precision=precision,
        elsewhere=as_torch_sees(machine) if machine.what_if else None,
    )


def _with_kernels(job: Job, machine: Machine, model: ModelShape, folder: Path, children: Children) -> Machine:
    """The machine with what the installed versions can do for this model, its attention backends and layer kernels,
    tried where the machine is here."""
    asked = wording.job_attention(job)
    computes = attention_precision(job, model)
    named = {
        "model": job.resolved["model_name_or_path"],
        "revision": job.resolved.get("model_revision"),
        "trust_remote_code": bool(job.resolved.get("trust_remote_code")),
    }
    abilities = probe_abilities(model=named, folder=folder, children=children)  # a what-if runs what is installed here
    machine = msgspec.structs.replace(machine, abilities=abilities)
    if machine.what_if:
        expected = expected_attention(machine, job_attention=asked, precision=computes)
        return msgspec.structs.replace(machine, attention=expected)
    heads = {
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim,
    }
    return msgspec.structs.replace(
        machine,
        attention=probe_attention(
            machine,
            job_attention=asked,
            model=named | heads,
            precision=computes,
            folder=folder,
            children=children,
        ),
        layer_kernels=probe_layer_kernels(machine, model=named, folder=folder, children=children),
    )


def _check_attention(job: Job, machine: Machine) -> None:
    """Refuse an attention whose name stands for nothing; one that is known and cannot run here gives way to others."""
    asked = wording.job_attention(job)
    named = next((one for one in machine.attention if one.name == asked), None)
    if asked is None or named is None or named.usable or named.reason != malformed(asked):
        return
    usable = ", ".join(f"`{one.name}`" for one in machine.attention if one.usable)
    raise AutotuneError(f"`attn_implementation: {asked}` {named.reason}", hint=f"usable here: {usable}")


def resume(options: Options) -> Plan:
    """The plan of an earlier run, with its budget anew, or this command's."""
    assert options.resume is not None
    prepared = run_folder.read(options.resume)
    prepared = msgspec.structs.replace(
        prepared,
        budget_seconds=options.budget_seconds or prepared.budget_seconds,
        trial_limit=options.trial_limit if options.trial_limit is not None else prepared.trial_limit,
    )
    data = Data(prepared.job, prepared.lengths, prepared.model)
    space = build_space(prepared.job, prepared.machine, data, allowed=prepared.allowed)  # type: ignore[arg-type]
    return Plan(prepared=prepared, data=data, space=space)


def finished_before(options: Options) -> RunFinished | None:
    """How the run to be resumed ended, where it did and these options give it no more time or trials than it had."""
    assert options.resume is not None
    prepared = run_folder.read(options.resume)
    longer = (options.budget_seconds or 0.0) > prepared.budget_seconds
    more = prepared.trial_limit is not None and (options.trial_limit or 0) > prepared.trial_limit
    return None if longer or more else run_folder.finished(options.resume)


def dry_run(plan: Plan) -> dict[str, Any]:
    """What would be tried, as one object (design: `--dry-run --json`); seconds are an estimate."""
    prepared, space = plan.prepared, plan.space
    machine = prepared.machine
    used = used_gpu(machine.gpus)
    return {
        "schema": 1,
        **({"what_if": True} if machine.what_if else {}),
        "method": prepared.job.method,
        "machine": describe(machine),
        "gpu": None if used is None else {"index": used.index, "uuid": used.uuid, "name": used.name},
        "overridden": list(machine.overridden),
        "precision": msgspec.to_builtins(wording.precision(prepared.job, machine)),
        "memory": msgspec.to_builtins(plan.memory),
        "notes": [{"topic": one.topic, "text": one.text} for one in plan.notes],
        "candidates": space.size,
        "estimate": {"seconds": round(estimated_seconds(plan))},
        "axes": msgspec.to_builtins(space.axes),
        "apart": msgspec.to_builtins(space.apart),
    }


def estimated_seconds(plan: Plan) -> float:
    """A rough estimate of the whole run: the budget, or less where there are few candidates."""
    prepared, space = plan.prepared, plan.space
    per_token = cost.seconds_per_token(space.baseline, plan.data, prepared.model, prepared.machine)
    a_trial = 3.0 + 12 * per_token * space.tokens_per_step
    trials = min(space.size, prepared.trial_limit or space.size)
    if prepared.earlier is not None and not prepared.earlier.changed:
        trials = min(trials, 2 + MOST_OTHERS)
    confirmation = least_seconds(prepared.budget_seconds) if trials > 1 else 0.0
    return min(prepared.budget_seconds, a_trial * (trials + 6) + confirmation)


def setting_of(plan: Plan, folder: Path, children: Children, *, emit: Listener, started: float) -> Setting:
    """What a search over the plan is given; its trials are in `folder`."""
    prepared = plan.prepared
    return Setting(
        job=prepared.job,
        machine=prepared.machine,
        model=prepared.model,
        data=plan.data,
        space=plan.space,
        children=children,
        folder=folder.resolve(),
        emit=emit,
        budget_seconds=prepared.budget_seconds,
        trial_limit=prepared.trial_limit,
        memory_limit_bytes=prepared.memory_limit_bytes,
        started=started,
        seed=prepared.seed,
        trl=command_here(),
        earlier=prepared.earlier,
    )


def note(emit: Listener, topic: Topic, text: str) -> None:
    emit(Note(text=text, topic=topic))
