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

from autotune.job_yaml import read_config, split_config

# What accelerate looks at when it works out a process's environment (accelerate 1.15 commands/launch.py).
RELEVANT = ("OMP_", "KMP_", "MPI_", "OMPI_", "MV2_", "ACCELERATE_")

MPI_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def import_environment(arguments: Sequence[str], folder: Path) -> dict[str, str]:
    """The environment in which the libraries of a job have to be imported: `os.environ`, `env:`, OpenMP's variables.

    `arguments` are what follows `trl METHOD`. Takes 20 ms. Raises AutotuneError for a config file that cannot be read.
    Follows accelerate 1.15, `_validate_launch_command` and `prepare_simple_launcher_cmd_env`.
    """
    path, rest = split_config(arguments)
    options: dict[str, Any] = {}
    environment = dict(os.environ)
    if path is not None:
        config = read_config(folder / path, name=path)
        options = config.options
        environment |= config.environment
    cpu = "--cpu" in rest
    launch_config = _launch_config(_option(rest, options, "accelerate_config", "config_file"), folder, cpu)
    use_cpu = cpu or launch_config.get("use_cpu") is True
    processes = _number(_option(rest, options, "num_processes") or launch_config.get("num_processes"))
    if processes is None and str(launch_config.get("distributed_type", "")).upper() == "NO":
        processes = 1
    threads = _number(_option(rest, options, "num_cpu_threads_per_process"))
    if threads is None:
        given = _number(environment.get("OMP_NUM_THREADS"))
        threads = 1 if given is None else given
        if use_cpu and (processes or 0) >= 1 and not given:
            threads = max(threads, _cores_per_process(environment, processes or 1))
    environment["OMP_NUM_THREADS"] = str(threads)
    if use_cpu:
        environment["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
        environment["KMP_BLOCKTIME"] = "1"
    return environment


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
