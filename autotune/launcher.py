"""What `accelerate launch` will set for a job's process, foreseen without importing it.

A library reads such variables when it is imported, so they must be there before the children's server is started,
and asking accelerate itself would take 5 s first. The parse that follows says what they are exactly.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.job_yaml import read_config, split_config

# What accelerate looks at when it works out a process's environment (accelerate 1.15 commands/launch.py).
RELEVANT = ("OMP_", "KMP_", "MPI_", "OMPI_", "MV2_", "ACCELERATE_")

THREADS = "OMP_NUM_THREADS"
LONGEST_SHOWN = 12  # of a value that is no number: what is longer was meant for something else, and may be a secret

# Variables that torchrun and `accelerate launch` set for each process, and the values with which they say nothing
OF_A_PROCESS = {"LOCAL_RANK": ("", "-1"), "RANK": ("", "-1"), "WORLD_SIZE": ("", "1")}

MPI_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def import_environment(arguments: Sequence[str], folder: Path) -> dict[str, str]:
    """The environment in which the libraries of a job have to be imported: `os.environ`, `env:`, OpenMP's variables.

    `arguments` are what follows `trl METHOD`. Takes 20 ms. Raises AutotuneError for a config file that cannot be read.
    Follows accelerate 1.15, `_validate_launch_command` and `prepare_simple_launcher_cmd_env`.
    """
    path, rest = split_config(arguments)
    options: dict[str, Any] = {}
    environment = readable(os.environ)
    if path is not None:
        config = read_config(folder / path, name=path)
        options = config.options
        check_threads(config.environment, place=f"in `env:` of `{path}`")
        environment |= config.environment
    cpu = "--cpu" in rest
    launch_config = _launch_config(_option(rest, options, "accelerate_config", "config_file"), folder, cpu)
    use_cpu = cpu or launch_config.get("use_cpu") is True
    processes = _number(_option(rest, options, "num_processes") or launch_config.get("num_processes"))
    if processes is None and str(launch_config.get("distributed_type", "")).upper() == "NO":
        processes = 1
    threads = _number(_option(rest, options, "num_cpu_threads_per_process"))
    if threads is None:
        given = _number(environment.get(THREADS))
        threads = 1 if given is None or given < 0 else given
        if use_cpu and (processes or 0) >= 1 and not given:
            threads = max(threads, _cores_per_process(environment, processes or 1))
    environment[THREADS] = str(threads)
    if use_cpu:
        environment["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
        environment["KMP_BLOCKTIME"] = "1"
    return environment


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which a training that is started now would be something else than a training.

    Raises AutotuneError for the variables of a process of a distributed launch: with them accelerate waits for the
    other processes (accelerate 1.15, `state.py`, `PartialState`).
    """
    found = [name for name, nothing in OF_A_PROCESS.items() if environment.get(name, "").strip() not in nothing]
    if found:
        are = "is" if len(found) == 1 else "are"
        unset = " ".join(f"-u {name}" for name in found)
        raise AutotuneError(
            f"{_listed(found)} {are} set in the environment: this looks like one process of a distributed launch",
            hint=f"start it by itself, not through `torchrun` or `accelerate launch`: `env {unset} trl-autotune ...`",
        )


def check_threads(environment: Mapping[str, str], *, place: str = "in the environment") -> None:
    """Refuse an OMP_NUM_THREADS that `accelerate launch` cannot read: OpenMP takes a list such as `4,2`, accelerate one
    whole number (accelerate 1.15, `utils/environment.py`, `get_int_from_env`). Raises AutotuneError."""
    text = environment.get(THREADS)
    if text is None or _number(text) is not None:
        return
    first = first_threads(text)
    shown = f"`{text}`" if len(text) <= LONGEST_SHOWN else "something long"
    raise AutotuneError(
        f"`{THREADS}` {place} is {shown}, and `accelerate launch`, which starts TRL's trainings, takes a whole number",
        hint=f"set `{THREADS}={first or 1}`, or unset it",
    )


def first_threads(text: str) -> int | None:
    """The threads of OMP_NUM_THREADS: of a list the first value counts, for there is one level of parallelism
    (OpenMP 5.0, 6.2). None where there is none."""
    number = _number(text.partition(",")[0])
    return number if number is not None and number > 0 else None


def readable(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with an OMP_NUM_THREADS that accelerate can read, or none."""
    changed = dict(environment)
    text = changed.pop(THREADS, None)
    if text is not None:
        number = _number(text) if _number(text) is not None else first_threads(text)
        if number is not None:
            changed[THREADS] = str(number)
    return changed


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join(", ".join(part) for part in (quoted[:-1], quoted[-1:]) if part)


def default_config_file(environment: Mapping[str, str]) -> str:
    """Where `accelerate config` writes, and `accelerate launch` looks when it is given no file."""
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environment.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    return str(home / "accelerate" / "default_config.yaml")


def _option(arguments: Sequence[str], options: Mapping[str, Any], *names: str) -> str | None:
    """What the command line gives last, or else the YAML."""
    found = None
    for name in names:
        for spelling in (name, name.replace("_", "-")):
            for position, argument in enumerate(arguments):
                if argument == f"--{spelling}" and position + 1 < len(arguments):
                    found = arguments[position + 1]
                elif argument.startswith(f"--{spelling}="):
                    found = argument.partition("=")[2]
            if found is None and spelling in options:
                found = str(options[spelling])
    return found


def _launch_config(name: str | None, folder: Path, cpu: bool) -> dict[str, Any]:
    import yaml

    path = None
    if name is not None:
        path = folder / name
        specification = importlib.util.find_spec("trl")  # finds, does not import
        if not path.is_file() and specification is not None and specification.origin is not None:
            path = Path(specification.origin).with_name("accelerate_configs") / f"{name}.yaml"
    elif not cpu:
        path = Path(default_config_file(os.environ))
    try:
        read = yaml.safe_load(path.read_bytes()) if path is not None else None
    except (OSError, yaml.YAMLError, ValueError):
        return {}  # the parse will tell what is wrong with it
    return read if isinstance(read, dict) else {}


def _cores_per_process(environment: Mapping[str, str], processes: int) -> int:
    import psutil

    local = next((size for name in MPI_SIZES if (size := _number(environment.get(name)))), processes)
    return int((psutil.cpu_count(logical=False) or 1) / max(local, 1))


def _number(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
