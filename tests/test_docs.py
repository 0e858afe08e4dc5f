"""The documentation names only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import __version__

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def code_in(page: Path) -> str:
    """The fenced blocks and the inline code of a Markdown page."""
    text = page.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


@pytest.fixture(scope="module")
def help_text() -> str:
    """What `trl-autotune --help` says and, for the options that each has alone, that of `doctor` and `lengths`."""
    commands = [[sys.executable, "-m", "autotune", *command, "--help"] for command in ([], ["doctor"], ["lengths"])]
    return "\n".join(
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout for command in commands
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z0-9-]+)", code_in(page)))

    assert {"demo", "test", "check"} <= targets
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path, help_text: str) -> None:
    """TRL's own options are written with underscores, save `--config`; they are TRL's to explain."""
    flags = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", code_in(page)) if "_" not in flag}
    known = set(re.findall(r"--[a-z][a-z0-9-]*", help_text)) | {"--config"}

    assert flags <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_readme_starts_with_the_name_and_how_to_see_it_work() -> None:
    text = (ROOT / "README.md").read_text()

    assert text.startswith("# trl-autotune\n")
    assert "make demo" in code_in(ROOT / "README.md")


def test_this_version_is_in_the_changelog() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
