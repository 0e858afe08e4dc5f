"""The options of the command line: argparse for our own, and what is neither is TRL's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.session import Options

GRADES_TO_ALLOW = ("rounded", "changed", "fewer-gpus")

DESCRIPTION = """\
Find the fastest way to run a TRL training on this machine, and write it back as a TRL config.

  trl-autotune sft --config sft.yaml --auto     tune, and write autotune-runs/.../tuned.yaml
  trl-autotune sft --demo --auto                see it work on a small model made on the spot
  trl-autotune launch RUN [TRL options]         train with what a run found
  trl-autotune report RUN [--python]            what a run tried, what won and why; or the winner in Python

METHOD and its options are exactly `trl`'s: put `-autotune` after `trl`."""

LEAST_MEMORY_BYTES = 10**8  # importing TRL alone takes three times that


class Parser(argparse.ArgumentParser):
    """argparse with this project's way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise AutotuneError(message, hint="`trl-autotune --help` lists the options")


def parser() -> Parser:
    made = Parser(
        prog="trl-autotune",
        usage="trl-autotune METHOD [TRL options] --auto [options]\n       trl-autotune launch | report RUN",
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
    add("--gpus", metavar="LIST", default=None, help="which GPUs may be used, as CUDA_VISIBLE_DEVICES takes them")
    add("--memory-limit", metavar="SIZE", default=None, help="the most memory one trial may hold on a CPU, as 8GB")
    add("--cold", action="store_true", help="start every trial as a fresh process instead of forking it")
    add("--demo", action="store_true", help="tune a small model on made-up conversations; needs no network")
    return made


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


def _bytes(text: str) -> int:
    """`8GB`, `512MB`, with or without the B; powers of ten."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    bare = text.upper().removesuffix("B")
    number, unit = (bare[:-1], units[bare[-1]]) if bare[-1:] in units else (bare, 1)
    try:
        value = int(float(number) * unit)
    except (ValueError, OverflowError):
        value = 0
    if value < LEAST_MEMORY_BYTES:
        raise AutotuneError(
            f"`--memory-limit {text}` is not a size", hint="write it as 8GB or 500MB, and as 100MB at least"
        )
    return value
