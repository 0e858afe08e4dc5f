"""The command line: options, exit codes. Opens the wizard only when asked; imports what it needs when it needs it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autotune import __version__
from autotune.arguments import (
    doctor_options,
    doctor_parser,
    lengths_options,
    lengths_parser,
    options_of,
    parse,
    parse_lengths,
    parser,
    run_argument,
)
from autotune.errors import AutotuneError
from autotune.interruption import ended_by_signals
from autotune.streams import let_go_of_stdout, make_writable

if TYPE_CHECKING:
    from autotune.deliver.narrator import Narrator
    from autotune.events import AnyEvent, RunFinished
    from autotune.folder import Prepared
    from autotune.planning import Plan
    from autotune.session import Options

CANNOT_WRITE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # no room
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR),  # no such place, or not ours
)
LATER_COMMANDS = ("watch", "profile")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    0: a config was written (improved or kept); 1: no trial finished; 2: usage, with a hint; 130: interrupted, the
    best so far written.
    """
    started = time.monotonic()
    given = list(sys.argv[1:] if arguments is None else arguments)
    make_writable()
    try:
        code = _run(given, started)
        sys.stdout.flush()  # what cannot be written is said here, not when Python ends
        return code
    except AutotuneError as error:
        from autotune.deliver.redaction import without_secrets

        print(without_secrets(f"error: {error.what}\nhint: {error.hint}", os.environ), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        when = "" if given[:1] in (["lengths"], ["doctor"]) else " before the first trial"
        resumed = any(one.partition("=")[0] == "--resume" for one in given)
        left = "the run is as it was" if resumed else "nothing was written"
        print(f"interrupted{when}; {left}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout is gone: nothing more to say to it
        let_go_of_stdout()
        return 1
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        let_go_of_stdout()
        only_tells = given[:1] in (["doctor"], ["lengths"], ["report"]) or "--dry-run" in given
        where = "standard output" if only_tells and error.filename is None else error.filename or "a file"
        print(f"error: cannot write {where}: {error.strerror}", file=sys.stderr)
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        do = "make room" if room else "check that the folder is there and yours to write in"
        then = "" if only_tells else ", then go on with `--resume RUN`; what was measured is kept"
        print(f"hint: {do}{then}", file=sys.stderr)
        return 2


def _run(given: list[str], started: float) -> int:
    if not given or given[0] in ("-h", "--help"):
        if given:
            parser().print_help()
            return 0
        return _wizard(given)
    if given[0] == "--version":
        print(f"trl-autotune {__version__}")
        return 0
    command = given[0]
    if command in LATER_COMMANDS:
        from autotune.errors import NotYetError

        raise NotYetError(f"`trl-autotune {command}` is not built yet", hint="`trl-autotune --help` lists what is")
    if command == "doctor":
        return _doctor(given[1:])
    if command == "lengths":
        return _lengths(given[1:])
    if command == "launch":
        return _launch(given[1:])
    if command == "report":
        return _report(given[1:])
    if command.startswith("-"):
        if "--resume" in given:
            return _auto(parse(given), started)
        raise AutotuneError(
            f"the method comes first, and `{command}` is an option",
            hint="for example `trl-autotune sft --config sft.yaml --auto`",
        )
    from autotune.job import check_method
    from autotune.job_yaml import split_config

    check_method(command)
    namespace = parse(given)
    split_config(namespace.arguments)
    if not (namespace.auto or namespace.json or namespace.dry_run or namespace.resume):
        return _wizard(given)
    return _auto(namespace, started)


def _auto(namespace: argparse.Namespace, started: float) -> int:
    from autotune import engine, folder, planning, session

    options = options_of(namespace)
    if options.resume is not None:
        return _resume(options, namespace, started)
    if options.run_folder is not None:
        folder.check_new(options.run_folder)
    else:
        folder.check_new(options.folder / folder.RUNS / "new")
    listener, narrator = _listener(namespace)
    try:
        with ended_by_signals(), session.children_for(options) as (children, options, machine):
            plan = planning.prepare(
                options,
                children,
                machine,
                emit=listener,
                progress=narrator.progress if narrator is not None else None,
            )
            if namespace.dry_run:
                return _dry_run(plan, namespace)
            run = options.run_folder or folder.default_name(plan.prepared.job)
            last = engine.tune(plan, run, children, started=started, emit=listener)
    finally:
        if narrator is not None:
            narrator.close()
    return _after(last, plan, namespace)


def _resume(options: Options, namespace: argparse.Namespace, started: float) -> int:
    from autotune import engine, planning, session

    if namespace.arguments:
        raise AutotuneError(
            f"`--resume` goes on with the job of that run, and `{namespace.arguments[0]}` would change it",
            hint="leave the TRL options out, or start a new run",
        )
    assert options.resume is not None
    listener, narrator = _listener(namespace)
    before = planning.finished_before(options)
    if before is not None:
        if narrator is not None:
            narrator.finished_before(before)
        listener(before)
        return _after(before, planning.resume(options), namespace)
    plan = planning.resume(options)
    try:
        with (
            ended_by_signals(),
            session.children_of(plan.prepared.job, plan.prepared.machine, cold=options.cold) as children,
        ):
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


def _dry_run(plan: Plan, namespace: argparse.Namespace) -> int:
    from autotune import planning

    if namespace.json:
        import json

        print(json.dumps(planning.dry_run(plan), indent=1))
        return 0
    from autotune.deliver.wording import space_lines, what_if_line

    if plan.prepared.machine.what_if:
        print(what_if_line(namespace.machine))
    print("\n".join(space_lines(plan.space, planning.estimated_seconds(plan), plan.prepared.budget_seconds)))
    return 0


def _after(last: RunFinished, plan: Plan, namespace: argparse.Namespace) -> int:
    """What follows a run: the path on stdout, the training if it was asked for, the exit code."""
    if last.outcome == "interrupted":
        if last.config is not None and not namespace.json:
            print(last.config)
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

    run, more = run_argument("launch", arguments[:1]), arguments[1:]
    prepared = folder.read(run)
    config = run / "tuned.yaml"
    if not config.is_file():
        raise AutotuneError(f"`{run}` has no tuned.yaml", hint=f"finish it first: `trl-autotune --resume {run}`")
    if more:
        _check_options(prepared, config.resolve(), more)
    launch(prepared.job, prepared.machine, config.resolve(), more)
    return 0


def _check_options(prepared: Prepared, config: Path, more: list[str]) -> None:
    """Refuse what TRL does not know or take before its launcher prints a hundred lines about it."""
    from autotune import session
    from autotune.job import read_job

    job, machine = prepared.job, prepared.machine
    with ended_by_signals(), session.children_of(job, machine, cold=False) as children:
        read_job(
            job.method,
            ["--config", str(config), *job.flags, *more],
            folder=Path(job.folder),
            children=children,
            accelerator=machine.backend != "cpu",
            cpu_bf16=machine.cpu.bf16,
            for_data=True,
        )


def _report(arguments: list[str]) -> int:
    python = "--python" in arguments
    path = run_argument("report", [one for one in arguments if one != "--python"]) / "report.md"
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


def _doctor(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        doctor_parser().print_help()
        return 0
    namespace = doctor_parser().parse_args(arguments)
    from autotune import session
    from autotune.deliver import doctor, redaction
    from autotune.probe.machine import to_json

    options = doctor_options(namespace)
    working = contextlib.nullcontext() if namespace.machine else doctor.progress(sys.stderr)
    with ended_by_signals(), working:
        machine = redaction.redacted(session.examine(options, model=namespace.model), os.environ)
    if namespace.json:
        sys.stdout.flush()
        sys.stdout.buffer.write(to_json(machine) + b"\n")  # JSON is UTF-8, whatever the terminal takes
    else:
        doctor.show(machine, sys.stdout)
    return 0


def _lengths(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        lengths_parser().print_help()
        return 0
    namespace = parse_lengths(arguments)
    from autotune import data_look, session
    from autotune.deliver.narrator import Narrator
    from autotune.events import Note

    options = lengths_options(namespace)
    quiet = namespace.json and not sys.stderr.isatty()
    narrator = Narrator(sys.stderr)

    def say(topic: Literal["job", "data"], text: str) -> None:
        if not namespace.json:
            narrator(Note(text=text, topic=topic))

    narrator.start()
    try:
        with ended_by_signals(), session.children_for(options) as (children, options, machine):
            found = data_look.look(
                options,
                children,
                machine,
                all_rows=namespace.all_rows,
                say=say,
                progress=None if quiet else narrator.progress,
            )
    finally:
        narrator.close()
    if namespace.json:
        import json

        print(json.dumps(data_look.to_builtins(found), indent=1))
        return 0
    from rich.console import Console

    from autotune.deliver.lengths_screen import print_lengths

    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    print_lengths(found.report, console, found.intervals)
    return 0


def _wizard(given: list[str]) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AutotuneError(
            "the wizard needs a terminal",
            hint=f"tune without it: `trl-autotune {shlex.join(given) or 'sft --config sft.yaml'} --auto`",
        )
    from autotune.errors import NotYetError

    raise NotYetError("the wizard is not built yet", hint="tune without it: add `--auto`")
