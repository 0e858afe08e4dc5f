"""What may be imported where: the engine and its command stay light, and heavy libraries stay in child processes."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("autotune", "profiles", "tui")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Seconds to import, or code that must not run in the engine
HEAVY = {
    "accelerate",
    "datasets",
    "kernels",
    "matplotlib",
    "numpy",
    "pandas",
    "peft",
    "ray",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
    "vllm",
}

# Modules with functions that run in a child. A new one needs its entry here, and a reason to touch these libraries.
RUN_IN_A_CHILD = {
    "autotune/demo_model.py",
    "autotune/job_elsewhere.py",
    "autotune/job_method.py",
    "autotune/job_parser.py",
    "autotune/kernel_revision.py",
    "autotune/preload.py",
    "autotune/probe/abilities.py",
    "autotune/probe/attention.py",
    "autotune/probe/attention_trial.py",
    "autotune/probe/batched.py",
    "autotune/probe/hub_kernels.py",
    "autotune/probe/layer_kernels.py",
    "autotune/probe/model.py",
    "autotune/probe/preferences.py",
    "autotune/probe/preparation.py",
    "autotune/probe/rendering.py",
    "autotune/probe/row_sample.py",
    "autotune/probe/sampling.py",
    "autotune/probe/tokenizer.py",
    "autotune/probe/training_data.py",
    "autotune/trial/document_check.py",
    "autotune/trial/worker.py",
}


def modules_loaded_by(code: str) -> set[str]:
    """The top-level modules in `sys.modules` of a fresh process that ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """The top-level names that import statements among `nodes` name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names.add(node.module.split(".")[0])
    return names


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What of a module is run when it is imported: not the bodies of functions, nor what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from run_at_import(child)


def run_at_all(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from run_at_all(child)


def test_command_line_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import autotune.cli")

    assert "autotune" in loaded
    assert not loaded & (HEAVY | {"optuna", "textual", "rich", "yaml", "ruamel"})


def test_help_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import autotune.cli\nassert autotune.cli.main(['--help']) == 0")

    assert not loaded & (HEAVY | {"optuna", "textual"})


def test_engine_loads_nothing_that_belongs_in_a_child() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.name not in ("__main__.py", "preload.py") and path.is_relative_to(ROOT / "autotune")
    ]
    loaded = modules_loaded_by("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names))

    assert not loaded & ((HEAVY - {"numpy"}) | {"textual"})  # optuna loads numpy


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_imports_stand_in_functions_that_run_in_a_child(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert not imported(run_at_import(tree)) & HEAVY
    if str(path.relative_to(ROOT)) not in RUN_IN_A_CHILD:
        assert not imported(run_at_all(tree)) & HEAVY


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_terminal_app_imports_textual(path: Path) -> None:
    if path.is_relative_to(ROOT / "tui"):
        return
    assert not imported(ast.walk(ast.parse(path.read_text()))) & {"textual", "textual_plot"}


def test_rule_sees_what_it_is_meant_to_see() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import trl\n"
        "try:\n    import torch.cuda\nexcept ImportError:\n    from vllm import LLM\n"
        "class Trainer:\n    import peft\n"
        "def child():\n    import transformers\n"
    )

    assert imported(run_at_import(tree)) & HEAVY == {"torch", "vllm", "peft"}
    assert imported(run_at_all(tree)) & HEAVY == {"torch", "vllm", "peft", "transformers"}


def test_children_named_here_exist() -> None:
    assert {name for name in RUN_IN_A_CHILD if not (ROOT / name).is_file()} == set()


def test_no_name_hides_a_module_that_training_code_imports() -> None:
    """Packages and scripts stand first on `sys.path`, where a `profile.py` or `queue.py` would be found instead."""
    installed = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if set(owners) != {"trl-autotune"} and name.isidentifier()
    }
    taken = set(sys.stdlib_module_names) | HEAVY | (installed - {"tests", "benchmarks", "docs"})
    ours = {*PACKAGES} | {path.stem for path in (ROOT / "benchmarks").glob("*.py")}

    assert {"queue", "profile", "torch", "datasets", "yaml"} <= taken
    assert not ours & taken
    assert not list(ROOT.glob("*.py"))
