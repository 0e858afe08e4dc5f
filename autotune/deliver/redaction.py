"""What is about the machine and nothing about its people: no user, host, home, token, command line or process id."""

from __future__ import annotations

import os
import platform
import pwd
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.probe.machine import Machine

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|CREDENTIAL|ACCESS_KEY", re.IGNORECASE)
LEAST_SECRET = 6  # a shorter value would be found in words
# Hugging Face's, OpenAI's, GitHub's and GitLab's tokens, whatever variable or file they came from
TOKEN = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-)[A-Za-z0-9_-]{8,}")
URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
HOME_OF_ANYONE = re.compile(r"(/home/|/Users/)[^/\s'\"`:;,)]+")
PROCESS_NUMBER = re.compile(r" \(pid \d+\)")  # as problems of GPUs tell it
FREE_TEXT = ("reason", "what", "hint")
# users and hosts by these names are nobody, and their names are words that an explanation needs
NOBODY = frozenset({"root", "user", "users", "admin", "ubuntu", "debian", "nobody", "localhost", "localdomain", "home"})


class Names(msgspec.Struct, frozen=True):
    """What must not be told."""

    homes: tuple[str, ...]
    people: tuple[str, ...]
    hosts: tuple[str, ...]
    secrets: tuple[str, ...]


def redacted(machine: Machine, environment: Mapping[str, str]) -> Machine:
    """The machine for others to see. `environment` tells the home folder, names and tokens, beside the system."""
    return msgspec.convert(_walk(msgspec.to_builtins(machine), _names(environment), field=""), Machine)


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """A text for the user's own screen, which may be copied to others: without tokens, the passwords of addresses and
    the values of variables that hold secrets."""
    return _without(text, _secrets(environment))


def narrated(text: str, environment: Mapping[str, str]) -> str:
    """The same with `~` for the home folder, for lines that nobody copies into a shell."""
    text = without_secrets(text, environment)
    home = environment.get("HOME", "").rstrip("/")
    return re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=/)", "~", text) if home.startswith("/") else text


def _secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    values = {value.strip() for name, value in environment.items() if SECRET_NAME.search(name)}
    return _longest_first(value for value in values if len(value) >= LEAST_SECRET)


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return URL_CREDENTIALS.sub("***@", TOKEN.sub("***", text))


def _names(environment: Mapping[str, str]) -> Names:
    try:
        entry = pwd.getpwuid(os.getuid())
        system_home, system_user = entry.pw_dir, entry.pw_name
    except KeyError:  # a container's user need not be in its password file
        system_home, system_user = "", ""
    homes = {environment.get("HOME", ""), system_home}
    homes |= {str(Path(home).resolve()) for home in homes if home}
    hosts = {platform.node(), environment.get("HOSTNAME", "")}
    hosts |= {host.partition(".")[0] for host in hosts}
    people = {environment.get("USER", ""), environment.get("LOGNAME", ""), system_user}
    return Names(
        homes=_longest_first(home.rstrip("/") for home in homes if home.count("/") and home.rstrip("/")),
        people=_longest_first(name for name in people if len(name) > 1 and name not in NOBODY),
        hosts=_longest_first(name for name in hosts if len(name) > 2 and name not in NOBODY),
        secrets=_secrets(environment),
    )


def _longest_first(texts: Any) -> tuple[str, ...]:
    return tuple(sorted(set(texts), key=lambda text: (-len(text), text)))


def _walk(value: Any, names: Names, *, field: str) -> Any:
    if isinstance(value, str):
        return _text(value, names, free=field in FREE_TEXT)
    if isinstance(value, list | tuple):
        if field == "processes":
            value = [{**process, "pid": None, "name": _program(process["name"])} for process in value]
        return [_walk(one, names, field=field) for one in value]
    if isinstance(value, dict):
        return {name: _walk(one, names, field=name) for name, one in value.items()}
    return value


def _text(text: str, names: Names, *, free: bool) -> str:
    text = _without(text, names.secrets)
    for home in names.homes:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = HOME_OF_ANYONE.sub(r"\1<user>", text)
    if not free:
        return text
    text = PROCESS_NUMBER.sub("", text)
    for kind, found in (("<user>", names.people), ("<host>", names.hosts)):
        for name in found:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", kind, text)
    return text


def _program(name: str | None) -> str | None:
    """The program of a process: some tell their whole command line where a name is asked for."""
    words = (name or "").split()
    return words[0].rpartition("/")[2] or None if words else None
