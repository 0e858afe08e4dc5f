"""`--demo`: a model, a tokenizer and data to tune on, made on this machine without a network."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from autotune.child import write_whole
from autotune.children import Children

BUILD_SECONDS = 120.0  # a deadline; with TRL loaded it takes 0.5 s

CONFIG = """\
# What `trl-autotune sft --demo` tunes: a TRL config like any other. Nothing in it is there to be slow: what it does
# not name is TRL's default, such as 8 conversations at a time, padded, with activation checkpointing.

# A Qwen3 of 1.6 million parameters with random weights
model_name_or_path: {model}

# 2000 made-up conversations. Half are under 100 tokens and a few near 2000, as in real chat data
datasets:
  - path: json
    data_files: {data}

# Longer conversations are cut off here: one in twenty-five
max_length: 512
num_train_epochs: 1

# Where `trl sft --config` with this file would save the model
output_dir: trl-autotune-demo-output
report_to: none
"""

ON_CPU = """
# There is no GPU here: train on the CPU, in float32
use_cpu: true
bf16: false
"""


class DemoFiles(msgspec.Struct, frozen=True):
    """What `--demo` trains and with what."""

    model: Path
    data: Path
    config: Path


def cache_folder() -> Path:
    """Where the demo's files are kept: `$XDG_CACHE_HOME/trl-autotune`, or `~/.cache/trl-autotune`."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "trl-autotune"


def build_demo(folder: Path, children: Children, *, accelerator: bool) -> DemoFiles:
    """Make the demo's files below `folder`, once; later calls find them there. Raises ChildError.

    `accelerator` says whether the config may leave device and precision to TRL. Several builds at a time are safe:
    each works in a folder of its own and the first to be done is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / f"demo-{_edition()}"
    if not _whole(home):
        _build(home, children)
    files = DemoFiles(
        model=home / "model",
        data=home / "conversations.jsonl",
        config=home / ("sft.yaml" if accelerator else "sft-cpu.yaml"),
    )
    text = CONFIG.format(model=_quoted(files.model), data=_quoted(files.data)) + ("" if accelerator else ON_CPU)
    write_whole(files.config, text.encode())
    return files


def _edition() -> str:
    """Changes with the code that makes the files, so that an older build is never taken for this one."""
    digest = hashlib.sha256()
    for name in ("demo_model.py", "demo_text.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:8]


def _build(home: Path, children: Children) -> None:
    building = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        children.call("autotune.demo_model:make", {"into": str(building)}, deadline_seconds=BUILD_SECONDS)
        write_whole(building / "complete.json", json.dumps(_sizes(building)).encode())
        _put_in_place(building, home)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, home: Path) -> None:
    """Rename `building` to `home`, unless somebody else's whole build is there by now."""
    with contextlib.suppress(OSError):  # a folder that is not empty cannot be renamed over
        building.rename(home)
        return
    if _whole(home):
        return
    torn = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        with contextlib.suppress(FileNotFoundError):  # another build may have moved it away first
            home.rename(torn)
        with contextlib.suppress(OSError):
            building.rename(home)
    finally:
        shutil.rmtree(torn, ignore_errors=True)


def _whole(home: Path) -> bool:
    """Whether every file of a build is there with the size it was written with."""
    try:
        written = json.loads((home / "complete.json").read_bytes())
        return isinstance(written, dict) and all((home / name).stat().st_size == size for name, size in written.items())
    except (OSError, ValueError):
        return False


def _sizes(home: Path) -> dict[str, int]:
    return {str(path.relative_to(home)): path.stat().st_size for path in sorted(home.rglob("*")) if path.is_file()}


def _quoted(path: Path) -> str:
    """The path as a YAML string: JSON's strings are YAML's double-quoted ones."""
    return json.dumps(str(path), ensure_ascii=False)
