"""The command line: options, exit codes. Opens the wizard only when asked; imports what it needs when it needs it."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune import __version__
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.deliver.narrator import Narrator
    from autotune.engine import Options, Plan
    from autotune.events import AnyEvent, RunFinished

GRADES_TO_ALLOW = ("rounded", "changed", "fewer-gpus")

DESCRIPTION = """\
Find the fastest way to run a TRL training on this machine, and write it back as a TRL config.

  trl-autotune sft --config sft.yaml --auto     tune, and write autotune-runs/.../tuned.yaml
  trl-autotune sft --demo --auto                see it work on a small model made on the spot
  trl-autotune launch RUN [TRL options]         train with what a run found
  trl-autotune report RUN [--python]            what a run tried, what won and why; or the winner in Python

METHOD and its options are exactly `trl`'s: put `-autotune` after `trl`."""

CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # no room
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR),  # no such place, or not ours
)
LEAST_MEMORY_BYTES = 10**8  # importing TRL alone takes three times that
LATER_COMMANDS = ("watch", "doctor", "lengths", "profile")


class _Parser(argparse.ArgumentParser):
    """argparse with this project's way of saying what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise AutotuneError(message, hint="`trl-autotune --help` lists the options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    0: a config was written (improved or kept); 1: no trial finished; 2: usage, with a hint; 130: interrupted, the
    best so far written.
    """
    started = time.monotonic()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given, started)
    except AutotuneError as error:
        print(f"error: {error.what}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted before the first trial; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout is gone: nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: cannot write {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        do = "make room" if room else "check that the folder is there and yours to write in"
        print(f"hint: {do}, then go on with `--resume RUN`; what was measured is kept", file=sys.stderr)
        return 2


def _run(given: list[str], started: float) -> int:
    if not given or given[0] in ("-h", "--help"):
        if given:
            _parser().print_help()
            return 0
        return _wizard(given)
    if given[0] == "--version":
        print(f"trl-autotune {__version__}")
        return 0
    command = given[0]
    if command in LATER_COMMANDS:
        from autotune.errors import NotYetError

        raise NotYetError(f"`trl-autotune {command}` is not built yet", hint="`trl-autotune --help` lists what is")
    if command == "launch":
        return _launch(given[1:])
    if command == "report":
        return _report(given[1:])
    if command.startswith("-"):
        if "--resume" in given:
            return _auto(_parse(given), started)
        raise AutotuneError(
            f"the method comes first, and `{command}` is an option",
            hint="for example `trl-autotune sft --config sft.yaml --auto`",
        )
    from autotune.job import check_method

    check_method(command)
    namespace = _parse(given)
    if not (namespace.auto or namespace.json or namespace.dry_run or namespace.resume):
        return _wizard(given)
    return _auto(namespace, started)


def _parser() -> _Parser:
    parser = _Parser(
        prog="trl-autotune",
        usage="trl-autotune METHOD [TRL options] --auto [options]\n       trl-autotune launch | report RUN",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    add = parser.add_argument_group("tuning").add_argument
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
    return parser


def _parse(given: list[str]) -> argparse.Namespace:
    """Our own options by argparse; what it does not know is TRL's."""
    method = None if given[0].startswith("-") else given[0]
    namespace, rest = _parser().parse_known_args(given if method is None else given[1:])
    namespace.method = method
    namespace.arguments = rest
    return namespace


def _options(namespace: argparse.Namespace) -> Options:
    from autotune.engine import Options

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


def _auto(namespace: argparse.Namespace, started: float) -> int:
    from autotune import engine, folder

    options = _options(namespace)
    if options.resume is not None:
        return _resume(options, namespace, started)
    if options.run_folder is not None:
        folder.check_new(options.run_folder)
    else:
        folder.check_new(options.folder / folder.RUNS / "new")
    listener, narrator = _listener(namespace)
    try:
        with engine.ended_by_signals(), engine.children_for(options) as (children, options, machine):
            plan = engine.prepare(
                options,
                children,
                machine,
                emit=listener,
                progress=narrator.progress if narrator is not None else None,
            )
            if namespace.dry_run:
                return _dry_run(plan, as_json=namespace.json)
            run = options.run_folder or folder.default_name(plan.prepared.job)
            last = engine.tune(plan, run, children, started=started, emit=listener)
    finally:
        if narrator is not None:
            narrator.close()
    return _after(last, plan, namespace)


def _resume(options: Options, namespace: argparse.Namespace, started: float) -> int:
    from autotune import engine

    if namespace.arguments:
        raise AutotuneError(
            f"`--resume` goes on with the job of that run, and `{namespace.arguments[0]}` would change it",
            hint="leave the TRL options out, or start a new run",
        )
    assert options.resume is not None
    plan = engine.resume(options)
    listener, narrator = _listener(namespace)
    try:
        with engine.ended_by_signals(), engine.children_of(plan, cold=options.cold) as children:
            last = engine.tune(plan, options.resume, children, started=started, emit=listener, resumed=True)
    finally:
        if narrator is not None:
            narrator.close()
    return _after(last, plan, namespace)


def _listener(namespace: argparse.Namespace) -> tuple[Callable[[AnyEvent], None], Narrator | None]:
    """JSON lines on stdout, or words on stderr."""
    if namespace.json:
        from autotune.events import encode_line

        def write(event: AnyEvent) -> None:
            sys.stdout.buffer.write(encode_line(event))
            sys.stdout.buffer.flush()

        return (lambda event: None) if namespace.dry_run else write, None
    from autotune.deliver.narrator import Narrator

    narrator = Narrator(sys.stderr)
    narrator.start()
    return narrator, narrator


def _dry_run(plan: Plan, *, as_json: bool) -> int:
    from autotune import engine

    if as_json:
        import json

        print(json.dumps(engine.dry_run(plan), indent=1))
        return 0
    from autotune.deliver.wording import space_lines

    print("\n".join(space_lines(plan.space)))
    return 0


def _after(last: RunFinished, plan: Plan, namespace: argparse.Namespace) -> int:
    """What follows a run: the path on stdout, the training if it was asked for, the exit code."""
    if last.outcome == "interrupted":
        return 130
    assert last.config is not None
    if namespace.launch:
        from autotune.deliver.files import launch

        sys.stderr.flush()
        launch(plan.prepared.job, plan.prepared.machine, Path(last.config).resolve())
    if not namespace.json:
        print(last.config)
    return 0


def _launch(arguments: list[str]) -> int:
    from autotune import folder
    from autotune.deliver.files import launch

    run, more = _run_argument("launch", arguments[:1]), arguments[1:]
    prepared = folder.read(run)
    config = run / "tuned.yaml"
    if not config.is_file():
        raise AutotuneError(f"`{run}` has no tuned.yaml", hint=f"finish it first: `trl-autotune --resume {run}`")
    launch(prepared.job, prepared.machine, config.resolve(), more)
    return 0


def _report(arguments: list[str]) -> int:
    python = "--python" in arguments
    path = _run_argument("report", [one for one in arguments if one != "--python"]) / "report.md"
    try:
        text = path.read_text()
    except OSError:
        raise AutotuneError(
            f"there is no `{path}`", hint="a run writes it when it ends; `--resume` ends one that was cut short"
        ) from None
    if python:
        parts = text.split("```python\n")
        text = parts[1].partition("```")[0] if len(parts) > 1 else "# nothing to change: yours is kept\n"
    print(text, end="")
    return 0


def _run_argument(command: str, arguments: list[str]) -> Path:
    parser = _Parser(prog=f"trl-autotune {command}", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    return Path(parser.parse_args(arguments).run)


def _wizard(given: list[str]) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AutotuneError(
            "the wizard needs a terminal",
            hint=f"tune without it: `trl-autotune {shlex.join(given) or 'sft --config sft.yaml'} --auto`",
        )
    from autotune.errors import NotYetError

    raise NotYetError("the wizard is not built yet", hint="tune without it: add `--auto`")


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
