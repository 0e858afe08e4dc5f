"""Reads a job with TRL's own parser. Runs in a child: this is where TRL, transformers and accelerate are imported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.job_additions import needed_here
from autotune.job_elsewhere import pretend
from autotune.job_limits import check_model_and_data, check_number, check_packing, refuse_not_yet
from autotune.job_method import count_processes, parser_of
from autotune.job_refusals import Refusals, refuse_strays
from autotune.job_values import SCRIPT, fits, is_jsonable, jsonable, shown, takes, type_hints, without_secrets


def parse(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Parse a job as `trl METHOD` does; what `autotune.job.read_job` asks for. The working folder is the job's."""
    return _Parse(request, folder).answer()


class _Parse:
    def __init__(self, request: dict[str, Any], folder: Path) -> None:
        from accelerate.commands.launch import launch_command_parser

        self.request = request
        self.folder = folder
        self.arguments: list[str] = request["arguments"]
        self.make_parser = parser_of(request["method"])
        self.parser = self.make_parser(prog=f"trl {request['method']}")
        self.actions: dict[str, argparse.Action] = {}
        for action in self.parser._actions:
            if action.dest != "help":
                self.actions.setdefault(action.dest, action)
        self.hints = type_hints(self.parser.dataclass_types)
        self.launcher: dict[str, argparse.Action] = {
            option.lstrip("-").replace("-", "_"): action
            for action in launch_command_parser()._actions
            for option in action.option_strings
            if option.startswith("--") and action.dest != "help"
        }
        self.refusals = Refusals(self.parser.prog, self.actions, self.launcher, self.hints)

    def answer(self) -> dict[str, Any]:
        _set_environment(self.request["environment"])
        if self.request["elsewhere"] is not None:
            pretend(self.request["elsewhere"])
        file_options, launcher_names = self.check_file()
        command_line, flags, remaining_names = self.read_command_line()
        launcher_names |= remaining_names
        for name, value in command_line.items():
            check_number(name, value)
        given = {**file_options, **command_line}
        additions, reasons = needed_here(
            given,
            accelerator=self.request["accelerator"],
            cpu_bf16=self.request["cpu_bf16"],
            precision=self.request["precision"],
        )
        environment_before = {**os.environ, **self.file_environment()}
        if self.request["for_data"]:
            count_processes(given.get("num_processes"))
        *configs, from_file, from_command_line = self.trl_parse(additions)
        resolved = self.resolved(configs)
        launch_arguments, launch_environment = self.launch(from_file + from_command_line, environment_before)
        if not self.request["for_data"]:
            refuse_not_yet(resolved, launch_arguments)
        check_model_and_data(resolved)
        check_packing(resolved)
        return {
            "file_options": without_secrets(jsonable(file_options)),
            "command_line": without_secrets(command_line),
            "launcher_names": sorted(launcher_names),
            "flags": flags,
            "additions": additions,
            "addition_reasons": reasons,
            "resolved": resolved,
            "launch_environment": launch_environment,
        }

    # --- what is in the file ---------------------------------------------------------------------------------------

    def check_file(self) -> tuple[dict[str, Any], set[str]]:
        """The file's options and which of them are the launcher's. Raises for what TRL would refuse or misread."""
        import yaml

        options: dict[str, Any] = yaml.safe_load(self.request["config_text"] or "{}")
        options.pop("env", None)
        read: dict[str, Any] = {}
        launcher_names: set[str] = set()
        for key, value in options.items():
            place = f"`{self.request['config_name']}` line {self.request['config_lines'].get(key, '?')}: "
            if key in self.actions:
                self.check_value(key, value, place)
                read[key] = value
                continue
            name = key.replace("-", "_")
            if name != "accelerate_config":
                if name not in self.launcher:
                    raise self.refusals.unknown(key, place)
                if self.launcher[name].nargs == 0:
                    raise AutotuneError(
                        f"{place}`{key}` is a switch of `accelerate launch`, which TRL cannot pass on from a file",
                        hint=f"remove the line and give `--{name}` on the command line",
                    )
            read[name] = value
            launcher_names.add(name)
        return read, launcher_names

    def check_value(self, name: str, value: Any, place: str) -> None:
        """Check what argparse does not: of defaults it converts strings only, and never compares them to `choices`."""
        action = self.actions[name]
        hint = self.hints.get(name, Any)
        if isinstance(value, str):
            if action.type is not None and action.nargs != "+":
                try:
                    value = self.parser._get_value(action, value)
                except argparse.ArgumentError as error:
                    said = error.message.removesuffix(".")
                    raise AutotuneError(f"{place}`{name}`: {said}", hint=takes(name, hint, action)) from None
        elif value is None and not fits(None, hint):
            raise AutotuneError(f"{place}`{name}` has no value", hint="give it one, or remove the line")
        elif value is not None and action.choices is None and not fits(value, hint):
            raise AutotuneError(f"{place}`{name}` cannot be {shown(value)}", hint=takes(name, hint, action))
        check_number(name, value, place)
        if action.choices is None or value is None:
            return
        for one in value if isinstance(value, list) else [value]:
            if one not in action.choices or isinstance(one, bool):
                hint_text = takes(name, hint, action)
                if isinstance(one, bool):
                    hint_text += '; YAML reads a bare `no`, `off`, `yes` and `on` as true or false, so quote it: `"no"`'
                raise AutotuneError(f"{place}`{name}` cannot be {shown(one)}", hint=hint_text)

    # --- what is on the command line -------------------------------------------------------------------------------

    def read_command_line(self) -> tuple[dict[str, Any], list[str], set[str]]:
        """What the command line gives, as TRL's parser and accelerate's read it; switches; the launcher's names."""
        parser = self.make_parser(prog=self.parser.prog)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
            action.required = False
        with self.refusals.of(parser):
            namespace, remaining = parser.parse_known_args(self.arguments)
        given = {name: jsonable(value) for name, value in vars(namespace).items()}
        for name in self.dictionaries():
            if isinstance(given.get(name), str) and given[name].startswith("{"):
                given[name] = self.as_dictionary(name, given[name])
        launcher, flags = self.read_launcher_options(remaining)
        return given | launcher, flags, set(launcher)

    def dictionaries(self) -> set[str]:
        return {name for kind in self.parser.dataclass_types for name in getattr(kind, "_VALID_DICT_FIELDS", ())}

    def as_dictionary(self, name: str, text: str) -> Any:
        from transformers.training_args import _convert_str_dict

        try:
            return _convert_str_dict(json.loads(text))
        except ValueError as error:
            raise AutotuneError(f"`{name}` is no JSON: {error}", hint=f"write `--{name} '{{\"key\": 1}}'`") from None

    def read_launcher_options(self, remaining: list[str]) -> tuple[dict[str, Any], list[str]]:
        from accelerate.commands.launch import launch_command_parser

        for argument in remaining:
            name = argument[2:].partition("=")[0]
            if (
                argument.startswith("--")
                and name
                and name.replace("-", "_") not in (*self.launcher, "accelerate_config")
            ):
                raise self.refusals.unknown(name, "")
        read: dict[str, Any] = {}
        if "--accelerate_config" in remaining:
            position = remaining.index("--accelerate_config")
            if position + 1 == len(remaining):
                raise AutotuneError("`--accelerate_config` is given without a value", hint="give a name or a file")
            read["accelerate_config"] = remaining[position + 1]
            remaining = remaining[:position] + remaining[position + 2 :]
        parser = launch_command_parser()
        for action in parser._actions:
            if action.option_strings:
                action.default = argparse.SUPPRESS
        with self.refusals.of(parser):
            found = vars(parser.parse_args([*remaining, SCRIPT]))
        refuse_strays(found)
        flags = []
        for name, value in found.items():
            if name in ("training_script", "training_script_args", "nondefault"):
                continue
            read[name] = jsonable(value)
            if any(action.dest == name and action.nargs == 0 for action in parser._actions):
                flags.append(f"--{name}")
        return read, flags

    # --- TRL's own parse -------------------------------------------------------------------------------------------

    def trl_parse(self, additions: dict[str, Any]) -> list[Any]:
        arguments = [*self.arguments]
        for name, value in additions.items():
            arguments += [f"--{name}", str(value)]
        if self.request["config_name"] is not None:
            # the very text that was checked, whatever happens to the file meanwhile
            config = self.folder / "config.yaml"
            config.write_text(self.request["config_text"], encoding="utf-8", newline="")
            arguments = ["--config", str(config), *arguments]
        with self.refusals.of(self.parser):
            return list(
                self.parser.parse_args_and_config(
                    arguments, return_remaining_strings=True, separate_remaining_strings=True
                )
            )

    def file_environment(self) -> dict[str, str]:
        import yaml

        values = yaml.safe_load(self.request["config_text"] or "{}").get("env", {})
        return {str(name): str(value) for name, value in values.items()}

    def resolved(self, configs: Iterable[Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for config in configs:
            for field in dataclasses.fields(config):
                value = getattr(config, field.name, None)
                if field.init and is_jsonable(value):
                    truth = self.hints[field.name] in (bool, bool | None) and isinstance(value, int)  # YAML's 0 and 1
                    fields[field.name] = bool(value) if truth else jsonable(value)
        return dict(without_secrets(fields))

    def launch(
        self, remaining: list[str], environment_before: dict[str, str]
    ) -> tuple[argparse.Namespace, dict[str, str]]:
        """What `accelerate launch` would do: its own arguments, and the variables it sets for the process."""
        from accelerate.commands import launch
        from accelerate.commands.config import config_args
        from accelerate.utils.launch import prepare_simple_launcher_cmd_env
        from trl.cli.accelerate_config import resolve_accelerate_config_argument

        # trl imports accelerate before it reads `env:`, so an HF_HOME there does not move this file
        for module in (launch, config_args):
            module.default_config_file = self.request["default_config_file"]
        parser = launch.launch_command_parser()
        with self.refusals.of(parser):
            arguments = parser.parse_args([*resolve_accelerate_config_argument(remaining), SCRIPT])
            refuse_strays(vars(arguments))
            arguments, _, _ = launch._validate_launch_command(arguments)
            _, environment = prepare_simple_launcher_cmd_env(arguments)
        changed = {name: value for name, value in environment.items() if environment_before.get(name) != value}
        return arguments, {**changed, "OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}


def _set_environment(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
