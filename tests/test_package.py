"""The wheel: what is in it, that it works where it is installed, and that it asks for versions that fit together."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from autotune import __version__
from autotune.children import Children

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = {
    canonicalize_name(requirement.name): Version(next(iter(requirement.specifier)).version)
    for requirement in map(Requirement, re.findall(r"^[^#\s].*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
}


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    information = f"trl_autotune-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"autotune", "tui", "profiles", information}
    assert {Path(name).suffix for name in names if not name.startswith(information)} <= {
        ".py",
        ".tcss",
        ".typed",
        ".yaml",
    }
    assert {"autotune/py.typed", "tui/py.typed", "profiles/py.typed", f"{information}/licenses/LICENSE"} <= set(names)
    sources = {
        str(path.relative_to(ROOT))
        for package in ("autotune", "tui", "profiles")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".tcss", ".yaml")
    }
    assert sources <= set(names)


def test_installed_command_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, folder=tmp_path)
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    )
    # the dependencies are those of this environment; its own `.pth` files, an editable install among them, are not read
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    where = run(python, "-c", "import autotune, tui, profiles; print(autotune.__file__)", folder=elsewhere)
    assert Path(where.strip()).is_relative_to(environment)
    help_text = run(environment / "bin" / "trl-autotune", "--help", folder=elsewhere)
    assert "--auto" in help_text
    assert run(environment / "bin" / "trl-autotune", "--version", folder=elsewhere).split() == [
        "trl-autotune",
        __version__,
    ]
    assert list(elsewhere.iterdir()) == []


def test_every_tested_version_is_within_its_range() -> None:
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name.startswith("types-"):
            continue
        assert name in CONSTRAINTS, name
        assert requirement.specifier.contains(CONSTRAINTS[name]), f"{requirement} is tested with {CONSTRAINTS[name]}"


def test_tested_versions_carry_no_mark_of_one_machine() -> None:
    text = (ROOT / "constraints.txt").read_text()

    assert "@" not in text
    assert "/" not in text
    assert "+" not in text
    assert "trl-autotune=" not in text


def test_kernels_is_chosen_by_transformers_own_bounds() -> None:
    """Each transformers accepts one minor of kernels; only its extra names that one, so ours must go through it."""
    ours = {Requirement(text).name: Requirement(text) for text in PROJECT["dependencies"]}
    theirs = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("transformers") or [])
        if requirement.name == "kernels"
        and requirement.marker is not None
        and requirement.marker.evaluate({"extra": "kernels"})
    ]

    assert ours["transformers"].extras == {"kernels"}
    assert ours["kernels"].specifier.contains(CONSTRAINTS[canonicalize_name("kernels")])
    assert theirs
    for requirement in theirs:
        assert requirement.specifier.contains(CONSTRAINTS[canonicalize_name("kernels")])


def look_for_kernels(request: dict[str, Any], folder: Path) -> bool:
    """In a child: whether transformers would load kernels from the hub."""
    from transformers.utils import is_kernels_available

    return bool(is_kernels_available())


def test_transformers_takes_the_installed_kernels(children: Children) -> None:
    assert children.call("tests.test_package:look_for_kernels", {}, deadline_seconds=60) is True
