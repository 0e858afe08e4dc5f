"""The options of the command line: argparse for our own, and what is neither is TRL's."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.probe.overrides import Overrides
    from autotune.session import Options

GRADES_TO_ALLOW = ("rounded", "changed", "fewer-gpus")

DESCRIPTION = """\
Find the fastest way to run a TRL training on this machine, and write it back as a TRL config.

  trl-autotune sft --config sft.yaml --auto     tune, and write autotune-runs/.../tuned.yaml
  trl-autotune sft --demo --auto                see it work on a small model made on the spot
  trl-autotune launch RUN [TRL options]         train with what a run found
  trl-autotune report RUN [--python]            what a run tried, what won and why; or the winner in Python
  trl-autotune doctor [--json]                  what is here, what works, and what keeps it from its best
  trl-autotune lengths METHOD [TRL options]     how long the data's rows are, and what padding and packing make of them

METHOD and its options are exactly `trl`'s: put `-autotune` after `trl`."""

DOCTOR = """\
Say what is here: GPUs, driver, precision, attention backends as they were tried, versions, and what is wrong with them.

  trl-autotune doctor                           one screen
  trl-autotune doctor --json > machine.json     for `trl-autotune METHOD ... --machine machine.json --dry-run`

Both leave out user and host names, the home folder and tokens, so they can be shown to others."""

LENGTHS = """\
Say how long the rows of a job's data are in tokens, as its trainer will see them, what padding and every packing would
make of them, and what is likely to be a mistake. Nothing is trained.

  trl-autotune lengths sft --config sft.yaml    one screen
  trl-autotune lengths dpo --config dpo.yaml --json

METHOD is sft, dpo, kto, reward, grpo, rloo or online_dpo, and its options are exactly `trl`'s."""

GPUS: dict[str, Any] = {
    "metavar": "LIST",
    "default": None,
    "help": "which GPUs may be used, as CUDA_VISIBLE_DEVICES takes them",
}

MOST_CORES = 4096
LEAST_MEMORY_BYTES = 10**8  # importing TRL alone takes three times that
MOST_MEMORY_BYTES = 2**50
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(I)?)?B?")
QUANTITIES = ("--budget", "--cores", "--gpu-memory", "--memory-limit", "--ram", "--trials")


class Parser(argparse.ArgumentParser):
    """argparse with this project's way of saying what is wrong."""

    command = "trl-autotune"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, which takes `-1GB` for an option: a negative quantity is a value, and refused as one."""
        joined: list[str] = []
        for argument in args or ():
            if joined and joined[-1] in QUANTITIES and re.match(r"-\.?\d", argument):
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        return super().parse_known_args(joined, namespace)

    def error(self, message: str) -> NoReturn:
        raise AutotuneError(message, hint=f"`{self.command} --help` lists the options")


def parser() -> Parser:
    made = Parser(
        prog="trl-autotune",
        usage="trl-autotune METHOD [TRL options] --auto [options]\n       trl-autotune launch | report RUN\n"
        "       trl-autotune doctor [--json]\n       trl-autotune lengths METHOD [TRL options] [--json]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="store_true", help="print the version")
    add = made.add_argument_group("tuning").add_argument
    add("--auto", action="store_true", help="tune without asking anything")
    add("--budget", metavar="TIME", default=None, help="wall time of everything, as 90s, 10m or 2h (default: 10m)")
    add("--trials", metavar="N", type=int, default=None, help="the most candidates to measure")
    add("--json", action="store_true", help="JSON lines on stdout instead of words on stderr")
    add("--dry-run", action="store_true", help="say what would be tried, and start no trial")
    add("--launch", action="store_true", help="train with the result when the tuning is done")
    add("--run-folder", metavar="DIR", type=Path, default=None, help="the run's own folder, new or empty")
    add("--resume", metavar="DIR", type=Path, default=None, help="go on with an interrupted run")
    add(
        "--allow",
        metavar="GRADES",
        default="",
        help="also offer choices that change the result: rounded (lower precision), changed (what is learnt)",
    )
    add("--gpus", **GPUS)
    add("--memory-limit", metavar="SIZE", default=None, help="the most memory one trial may hold on a CPU, as 8GB")
    add("--cold", action="store_true", help="start every trial as a fresh process instead of forking it")
    add("--demo", action="store_true", help="tune a small model on made-up conversations; needs no network")
    _add_machine_options(made)
    return made


def doctor_parser() -> Parser:
    made = Parser(
        prog="trl-autotune doctor",
        usage="trl-autotune doctor [options]",
        description=DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.command = "trl-autotune doctor"
    made.add_argument("--json", action="store_true", help="the machine as one JSON object, which `--machine` takes")
    made.add_argument("--model", metavar="NAME", default=None, help="try attention with this model's heads")
    made.add_argument("--gpus", **GPUS)
    made.add_argument("--cold", action="store_true", help="try attention in fresh processes instead of forked ones")
    _add_machine_options(made)
    return made


def lengths_parser() -> Parser:
    made = Parser(
        prog="trl-autotune lengths",
        usage="trl-autotune lengths METHOD [TRL options] [options]",
        description=LENGTHS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.command = "trl-autotune lengths"
    made.add_argument("--json", action="store_true", help="one JSON object on stdout")
    made.add_argument("--all-rows", action="store_true", help="measure every row of large data, not a sample of them")
    made.add_argument("--cold", action="store_true", help="work in fresh processes instead of forked ones")
    made.add_argument("--demo", action="store_true", help="look at the conversations of `sft --demo`")
    return made


def parse_lengths(given: list[str]) -> argparse.Namespace:
    """As `parse`, for what follows `trl-autotune lengths`."""
    if not given or given[0].startswith("-"):
        raise AutotuneError(
            "`lengths` needs a method first", hint="for example `trl-autotune lengths sft --config sft.yaml`"
        )
    namespace, rest = lengths_parser().parse_known_args(given[1:])
    for_tuning = {option for action in parser()._actions for option in action.option_strings}
    for name in (argument.partition("=")[0] for argument in rest):
        if name in for_tuning:
            raise AutotuneError(f"`{name}` is for tuning, and `lengths` only looks at the data", hint="leave it out")
    namespace.method = given[0]
    namespace.arguments = rest
    return namespace


def lengths_options(namespace: argparse.Namespace) -> Options:
    from autotune.session import Options

    return Options(
        method=namespace.method,
        arguments=tuple(namespace.arguments),
        folder=Path.cwd(),
        cold=namespace.cold,
        demo=namespace.demo,
    )


def _add_machine_options(made: Parser) -> None:
    add = made.add_argument_group("the machine, where the probe is wrong or another is meant").add_argument
    add("--gpu-memory", metavar="SIZE", default=None, help="the most memory that each GPU counts as having, as 40GB")
    add("--precision", metavar="NAME", default=None, help="bf16, fp16 or float32, where the job does not say")
    add("--ram", metavar="SIZE", default=None, help="the machine's memory, as 64GB")
    add("--cores", metavar="N", default=None, help="the CPU's cores")
    add(
        "--machine",
        metavar="FILE",
        type=_machine_file,
        default=None,
        help="another machine, as `doctor --json` tells it there",
    )


def _machine_file(text: str) -> Path:
    if not text:  # a `Path` would make it the working folder
        raise AutotuneError("`--machine` is given without a file", hint="`trl-autotune doctor --json` makes one")
    return Path(text)


def parse(given: list[str]) -> argparse.Namespace:
    """Our own options by argparse; what it does not know is TRL's."""
    method = None if given[0].startswith("-") else given[0]
    namespace, rest = parser().parse_known_args(given if method is None else given[1:])
    namespace.method = method
    namespace.arguments = rest
    return namespace


def options_of(namespace: argparse.Namespace) -> Options:
    from autotune.session import Options

    if namespace.trials is not None and namespace.trials < 1:
        raise AutotuneError("`--trials` must be at least 1", hint="the first trial is your own settings")
    allowed = [grade.strip() for grade in namespace.allow.split(",") if grade.strip()]
    for grade in allowed:
        if grade not in GRADES_TO_ALLOW:
            raise AutotuneError(
                f"`--allow {grade}` is not known", hint=f"allowed values are {', '.join(GRADES_TO_ALLOW[:2])}"
            )
        if grade == "fewer-gpus":
            from autotune.errors import NotYetError

            raise NotYetError("`--allow fewer-gpus` is not built yet", hint="jobs are tuned on one GPU for now")
    if namespace.machine is not None and not namespace.dry_run:
        raise AutotuneError(
            "`--machine` is about a machine that is not here, where nothing can be tried",
            hint="add `--dry-run` to see what would be tried there",
        )
    overrides = _overrides(namespace)
    if namespace.resume is not None and (overrides.options or namespace.machine):
        option = (*overrides.options, "--machine")[0]
        raise AutotuneError(
            f"`{option}` comes too late: a run that is resumed goes on with the machine as it was seen then",
            hint="leave it out, or start a new run",
        )
    return Options(
        method=namespace.method or "sft",
        arguments=tuple(namespace.arguments),
        folder=Path.cwd(),
        budget_seconds=None if namespace.budget is None else _seconds(namespace.budget),
        trial_limit=namespace.trials,
        allowed=tuple(allowed),
        run_folder=namespace.run_folder,
        resume=namespace.resume,
        gpus=namespace.gpus,
        memory_limit_bytes=None if namespace.memory_limit is None else _bytes(namespace.memory_limit),
        cold=namespace.cold,
        demo=namespace.demo,
        starts_trials=not namespace.dry_run,
        machine=namespace.machine,
        overrides=overrides,
    )


def doctor_options(namespace: argparse.Namespace) -> Options:
    from autotune.session import Options

    return Options(
        method="",
        arguments=(),
        folder=Path.cwd(),
        gpus=namespace.gpus,
        cold=namespace.cold,
        machine=namespace.machine,
        overrides=_overrides(namespace),
    )


def _overrides(namespace: argparse.Namespace) -> Overrides:
    from autotune.probe.overrides import Overrides

    memory, ram, cores = namespace.gpu_memory, namespace.ram, namespace.cores
    return Overrides(
        gpu_memory_bytes=None if memory is None else _bytes(memory, option="--gpu-memory"),
        precision=namespace.precision,
        ram_bytes=None if ram is None else _bytes(ram, option="--ram"),
        cores=None if cores is None else _cores(cores),
    )


def run_argument(command: str, arguments: list[str]) -> Path:
    parser = Parser(prog=f"trl-autotune {command}", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    return Path(parser.parse_args(arguments).run)


def _seconds(text: str) -> float:
    """`90s`, `10m`, `1.5h` or plain seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise AutotuneError(f"`--budget {text}` is not a duration", hint="write it as 90s, 10m or 2h")
    return value


def _cores(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_CORES:
        raise AutotuneError(
            f"`--cores {text}` is no number of cores", hint=f"give a whole number from 1 to {MOST_CORES}"
        )
    return int(text)


def _bytes(text: str, *, option: str = "--memory-limit") -> int:
    """`8GB`, `512MB`, with or without the B, in powers of ten; `8GiB`, `512MiB` in powers of two."""
    found = SIZE.fullmatch(text.strip().upper()) if text.isascii() and len(text) < 40 else None
    value = 0
    if found is not None:
        power = 1 + "KMGT".index(found[2]) if found[2] else 0
        value = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if not LEAST_MEMORY_BYTES <= value <= MOST_MEMORY_BYTES:
        raise AutotuneError(
            f"`{option} {text}` is not a size",
            hint="write it as 8GB, 8GiB or 500MB, and as 100MB at least"
            if value < LEAST_MEMORY_BYTES
            else "no machine has more than 1,000 TB",
        )
    return value
