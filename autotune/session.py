"""One use of the engine: the server that children are forked from, in the environment of the job's launch, and how
signals end what is going on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from autotune.children import ChildError, Children
from autotune.errors import AutotuneError
from autotune.job import Job, import_environment, known_method
from autotune.launcher import check_environment, check_threads
from autotune.plan.space import Grade
from autotune.probe.attention import probe_attention
from autotune.probe.builds import expected_attention
from autotune.probe.facts import Problem
from autotune.probe.gpus import choose_gpus
from autotune.probe.layer_kernels import probe_layer_kernels
from autotune.probe.machine import Machine, for_one_gpu, probe_machine, read_machine
from autotune.probe.overrides import Overrides, overridden, with_gpus
from autotune.probe.used import used_gpu


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for, beside TRL's own options (`arguments`)."""

    method: str
    arguments: tuple[str, ...]
    folder: Path  # where relative paths start
    budget_seconds: float | None = None  # 10 minutes, or for a run that is resumed what it was given
    trial_limit: int | None = None
    allowed: tuple[Grade, ...] = ()
    run_folder: Path | None = None
    resume: Path | None = None
    gpus: str | None = None
    memory_limit_bytes: int | None = None
    cold: bool = False
    demo: bool = False
    starts_trials: bool = False
    machine: Path | None = None  # plan for the machine of this file
    overrides: Overrides = Overrides()


def machine_for(options: Options, environment: Mapping[str, str] = os.environ) -> Machine:
    """The machine here as a job in `environment` sees it, or that of `--machine`, with what the user said instead of
    the probe. Raises AutotuneError."""
    if options.machine is not None:
        machine = with_gpus(read_machine(options.machine), options.gpus)
        return overridden(machine, options.overrides)
    machine = probe_machine(_with_gpus(environment, options.gpus))
    if options.gpus is not None and machine.backend != "cuda":
        raise AutotuneError(
            f"`--gpus {options.gpus}` names no GPU that can be used here",
            hint="; ".join(problem.what for problem in machine.problems) or "leave it out to tune on the CPU",
        )
    return overridden(machine, options.overrides)


def examine(options: Options, *, model: str | None) -> Machine:
    """The machine with its attention backends and layer kernels, tried with the heads of `model`. One that is not here
    keeps what its file tells of them; where it tells nothing, attention is as it should be there.

    A probe that breaks is one problem more: what else is known is worth telling. Takes 6 s and on a GPU a minute.
    Raises AutotuneError when the model cannot be read.
    """
    machine = machine_for(options)
    if machine.what_if and model is not None:
        raise AutotuneError(
            "`--model` names what attention is tried with, and nothing can be tried on a machine that is not here",
            hint="leave out `--model`, or run `trl-autotune doctor --model` there",
        )
    if machine.what_if and machine.attention and options.overrides.precision is None:
        return machine
    if machine.what_if:
        return msgspec.structs.replace(machine, attention=expected_attention(machine))
    environment = _with_gpus(os.environ, options.gpus)
    used = used_gpu(machine.gpus)
    if machine.backend == "cuda" and used is not None:
        environment["CUDA_VISIBLE_DEVICES"] = used.uuid
    try:
        with Children(environment, cold=options.cold) as children:
            told = None if model is None else {"model": model}
            attention = probe_attention(
                machine, job_attention=None, model=told, folder=options.folder, children=children
            )
            machine = msgspec.structs.replace(machine, attention=attention)
            layers = probe_layer_kernels(machine, model=told, folder=options.folder, children=children)
            return msgspec.structs.replace(machine, layer_kernels=layers)
    except ChildError as error:
        kernels = "layer kernels" if machine.attention else "attention"
        broken = Problem(what=f"{kernels} could not be tried: {error.what}", hint=error.hint)
        return msgspec.structs.replace(machine, problems=(*machine.problems, broken))


@contextlib.contextmanager
def children_for(options: Options) -> Iterator[tuple[Children, Options, Machine]]:
    """Start the server in the job's launch environment; its log goes with it."""
    known_method(options.method)
    check_environment(os.environ)
    if options.starts_trials:
        check_threads(os.environ)
    arguments = list(options.arguments)
    if options.demo and "--config" in arguments:
        raise AutotuneError("`--demo` brings a config of its own", hint="leave out `--demo` or `--config`")
    if options.demo and options.method != "sft":
        raise AutotuneError(f"`--demo` is a training of `sft`, not of `{options.method}`", hint="write `sft --demo`")
    of_the_job = import_environment(arguments, options.folder)
    machine = for_one_gpu(machine_for(options, of_the_job))
    environment = _with_gpus(of_the_job, None if machine.what_if else options.gpus)
    if machine.what_if:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # what is here must not answer for what is not
    elif machine.backend == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = machine.gpus[0].uuid  # one card for now; the fork server inherits it
    with Children(environment, cold=options.cold) as children:
        if options.demo:
            from autotune.demo import build_demo, cache_folder

            demo = build_demo(cache_folder(), children, accelerator=machine.backend != "cpu")
            options = msgspec.structs.replace(options, arguments=("--config", str(demo.config), *arguments))
        yield children, options, machine


@contextlib.contextmanager
def children_of(job: Job, machine: Machine, *, cold: bool) -> Iterator[Children]:
    """The server for a run that is resumed, in the launch environment its job had."""
    at_import = {name: value for name, value in job.launch_environment.items() if name.startswith(("OMP_", "KMP_"))}
    environment = {**os.environ, **job.environment, **at_import}
    if machine.backend == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = machine.gpus[0].uuid
    check_environment(os.environ)
    check_threads(os.environ)
    with Children(environment, cold=cold) as children:
        yield children


def _with_gpus(environment: Mapping[str, str], gpus: str | None) -> dict[str, str]:
    """The environment as it would be with `--gpus`; `all` are those that it leaves already.

    Raises AutotuneError where `gpus` names none that is here.
    """
    chosen = dict(environment)
    if gpus is not None and gpus != "all":
        chosen["CUDA_VISIBLE_DEVICES"] = choose_gpus(gpus)
    return chosen
