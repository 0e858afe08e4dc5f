"""The TRL command to speed up: read, checked by TRL's own parser, written back."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from autotune import job_text, job_yaml
from autotune.children import Children
from autotune.errors import AutotuneError, NotYetError
from autotune.launcher import RELEVANT, default_config_file, import_environment, readable

__all__ = ["Job", "Method", "check_method", "effective", "import_environment", "known_method", "read_job", "write_job"]

Method = Literal["sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo"]

PARSE_DEADLINE_SECONDS = 120.0

# What has to be written where the user wrote it: the keys of `model_init_kwargs` win over the options of that name
# (trl 1.16 scripts/sft.py, `model_init_kwargs.update`).
INSIDE_MODEL_INIT_KWARGS = frozenset({"attn_implementation", "dtype"})

# transformers 5.23 renamed these; where both names exist, the new one wins.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}

# The order of a config that the user did not write himself; what is not named follows as it was given.
FIRST_OPTIONS = (
    "model_name_or_path",
    "model_revision",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "datasets",
    "output_dir",
)

# Never kept, so never written: a config that was given no token in its file gets none.
SECRETS = frozenset({"hub_token", "push_to_hub_token"})


class Job(msgspec.Struct, frozen=True):
    """A TRL method with its options, as the user would give them to `trl`.

    `options` and `launcher` hold what was given in the YAML file or on the command line (which wins), TRL's own and
    `accelerate launch`'s apart; `resolved` holds every field of TRL's dataclasses as TRL's parser made them, with
    `additions` applied, tokens left out.
    """

    method: Method
    config_path: str | None
    config_text: str  # "" when there is no file
    command_line: dict[str, Any]  # name -> value, of what stood on the command line, launcher options included
    options: dict[str, Any]
    launcher: dict[str, Any]
    environment: dict[str, str]  # the YAML's `env:`
    folder: str  # where relative paths mean what they meant
    resolved: dict[str, Any]
    launch_environment: dict[str, str]  # what `accelerate launch` sets for the training process, by accelerate itself
    additions: dict[str, Any] = {}  # options this machine needs for the job to start at all, with `addition_reasons`
    addition_reasons: dict[str, str] = {}
    # what libraries read at import and `import_environment` did not foresee: name -> exact value, "" for none
    import_environment_differs: dict[str, str] = {}
    flags: list[str] = []  # launcher options that only the command line can give, as `--cpu`


def known_method(method: str) -> Method:
    """The method, if it is one of TRL's. Raises AutotuneError."""
    known: tuple[Method, ...] = get_args(Method)
    if method not in known:
        near = difflib.get_close_matches(method, known, n=1)
        meant = f"did you mean `{near[0]}`? " if near else ""
        raise AutotuneError(f"unknown method `{method}`", hint=f"{meant}TRL's methods here are {_listed(known)}")
    return known[known.index(method)]


def check_method(method: str) -> Method:
    """The method, if this version tunes it. Raises AutotuneError or NotYetError."""
    if known_method(method) != "sft":
        itself = "TRL has no command for it" if method == "online_dpo" else f"`trl {method}` itself runs as before"
        raise NotYetError(f"tuning `{method}` is not built yet", hint=f"this version tunes `sft`; {itself}")
    return "sft"


def read_job(
    method: str,
    arguments: Sequence[str],
    *,
    folder: Path,
    children: Children,
    accelerator: bool,
    cpu_bf16: bool,
    precision: tuple[str, str] | None = None,
    elsewhere: dict[str, bool] | None = None,
    for_data: bool = False,
) -> Job:
    """Read what follows `trl METHOD` on a command line, with TRL's own parser, in a child.

    `accelerator` says whether there is a GPU that TRL can use, `cpu_bf16` whether the CPU has bf16 arithmetic,
    `precision` what to compute in where the job does not say, with the reason; None leaves it to TRL's default.
    `elsewhere` is what torch would answer on a machine that is not here (`as_torch_sees`); None for this machine.
    With `for_data` the job is read for the sake of its data: it may be of any method, run in several processes, be
    sharded or read a stream.
    Takes about 0.1 s in a forked child, 6 s in a fresh one. Raises AutotuneError for whatever TRL would refuse, and for
    what it would silently ignore;
    NotYetError for jobs that this version cannot tune.
    """
    its_method = known_method(method) if for_data else check_method(method)
    config_path, rest = job_yaml.split_config(arguments)
    config = None
    if config_path is not None:
        config = job_yaml.read_config(folder / config_path, name=config_path)
    own_environment = readable(os.environ)
    names = {name for name in (*own_environment, *children.environment) if name.startswith(RELEVANT)}
    request = {
        "method": its_method,
        "for_data": for_data,
        "arguments": rest,
        "config_name": config_path,
        "config_text": config.text if config else "",
        "config_lines": config.lines if config else {},
        "environment": {name: own_environment.get(name) for name in sorted(names)},
        "default_config_file": default_config_file(own_environment),
        "accelerator": accelerator,
        "cpu_bf16": cpu_bf16,
        "precision": precision,
        "elsewhere": elsewhere,
    }
    parsed = children.call(
        "autotune.job_parser:parse", request, deadline_seconds=PARSE_DEADLINE_SECONDS, working_folder=folder
    )
    file_environment = config.environment if config else {}
    exact = {**own_environment, **file_environment, **parsed["launch_environment"]}
    given = {**parsed["file_options"], **parsed["command_line"]}
    return Job(
        method=its_method,
        config_path=config_path,
        config_text=config.text if config else "",
        command_line=parsed["command_line"],
        options={name: value for name, value in given.items() if name not in parsed["launcher_names"]},
        launcher={name: value for name, value in given.items() if name in parsed["launcher_names"]},
        environment=file_environment,
        folder=str(folder.resolve()),
        resolved=parsed["resolved"],
        launch_environment=parsed["launch_environment"],
        additions=parsed["additions"],
        addition_reasons=parsed["addition_reasons"],
        import_environment_differs={
            name: exact.get(name, "")
            for name in sorted({*exact, *children.environment})
            if name.startswith(("OMP_NUM_THREADS", "KMP_")) and exact.get(name) != children.environment.get(name)
        },
        flags=parsed["flags"],
    )


def effective(job: Job, name: str) -> Any:
    """The value of an option as it takes effect; None for one that the installed TRL does not have."""
    inside = job.resolved.get("model_init_kwargs")
    if name in INSIDE_MODEL_INIT_KWARGS and isinstance(inside, dict) and name in inside:
        return inside[name]
    return job.resolved.get(name, job.launcher.get(name))


def write_job(job: Job, changes: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """The job's YAML with `changes`, as TRL reads it; `reasons` become comments beside the lines they concern.

    The user's text stays; options of the command line are written in, then the job's additions, then the changes.
    `env` in `changes` is a mapping that is merged into the YAML's `env:`. None clears an option that is given or
    that TRL has a default for, and leaves out others. Line ends are those of the user's file, so write it with
    `newline=""`. What cannot stand in a YAML file is in `job.flags`.
    """
    import yaml

    written: dict[str, Any] = (yaml.safe_load(job.config_text) if job.config_text else None) or {}
    comments: dict[job_text.OptionPath, str] = {}

    def put(name: str, value: Any, reason: str | None) -> None:
        if name == "model_init_kwargs" and isinstance(value, dict):
            value = _with_written(written.get(name), value)
        for path in _places(job, written, name):
            _set(written, path, value)
            comments.pop(path, None)
            if reason:
                comments[path] = reason

    for name, value in _in_order(job.command_line, job.config_text):
        if name not in SECRETS and f"--{name}" not in job.flags:
            put(name, value, "from the command line" if job.config_text else None)
    for name, value in job.additions.items():
        put(name, value, job.addition_reasons.get(name))
    for name, value in changes.items():
        if name == "env":
            before = written.get("env") or {}
            written["env"] = {**before, **{key: str(part) for key, part in value.items()}}
            for key in value:
                comments["env", key] = reasons.get(key) or reasons.get("env", "")
        elif value is not None or _is_given(job, written, name):
            put(name, value, reasons.get(name))
    return job_text.merge(job.config_text, written, {path: reason for path, reason in comments.items() if reason})


def _is_given(job: Job, written: dict[str, Any], name: str) -> bool:
    """Whether None has to be written to take effect: something is written, or TRL's own default is something."""
    return job.resolved.get(name) is not None or any(_has(written, path) for path in _places(job, written, name))


def _with_written(before: Any, value: dict[str, Any]) -> dict[str, Any]:
    """What is written stays where the new value does not say otherwise: a job that was read has lost its tokens."""
    if isinstance(before, str) and before.startswith("{"):
        before = json.loads(before)
    if not isinstance(before, dict):
        return value
    return before | {key: part for key, part in value.items() if part is not None or key not in before}


def _in_order(options: Mapping[str, Any], config_text: str) -> Iterable[tuple[str, Any]]:
    if config_text:
        return options.items()
    first = [name for name in FIRST_OPTIONS if name in options]
    return [(name, options[name]) for name in (*first, *(name for name in options if name not in first))]


def _places(job: Job, written: dict[str, Any], name: str) -> list[job_text.OptionPath]:
    """Where an option has to stand to take effect."""
    if name in INSIDE_MODEL_INIT_KWARGS:
        inside = written.get("model_init_kwargs")
        if isinstance(inside, str) and inside.startswith("{"):
            inside = json.loads(inside)
        if isinstance(inside, dict) and name in inside:
            written["model_init_kwargs"] = dict(inside)
            return [("model_init_kwargs", name)]
    for old, new in RENAMED.items():
        if name in (old, new):
            names = [new] if new in job.resolved else [old]
            # the old name, where the user wrote it, must not say something else
            return [(one,) for one in dict.fromkeys([*names, *(one for one in (old, new) if one in written)])]
    dashed = name.replace("_", "-")  # accelerate launch takes its options with dashes, too
    return [(dashed if dashed in written and name not in written else name,)]


def _set(options: dict[str, Any], path: job_text.OptionPath, value: Any) -> None:
    for part in path[:-1]:
        options = options[part]
    options[path[-1]] = value


def _has(options: dict[str, Any], path: job_text.OptionPath) -> bool:
    for part in path[:-1]:
        options = options[part]
    return path[-1] in options


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
