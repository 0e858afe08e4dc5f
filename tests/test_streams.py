"""What the command writes where a terminal, an encoding or a pipe is not as one would like; what it never writes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.deliver.redaction import narrated, without_secrets

MACHINES = Path(__file__).parent / "data" / "machines"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine file with names that ASCII lacks."""
    document = json.loads((MACHINES / "t4.json").read_text())
    document["gpus"][0]["name"] = "NVIDIA 日本 🚀"
    path = tmp_path / "Maschine-ü.json"
    path.write_text(json.dumps(document))
    return path


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """`AUTOTUNE` is the command; with bash's redirections."""
    whole = command.replace("AUTOTUNE", f"{shlex.quote(sys.executable)} -m autotune")
    return subprocess.run(
        ["bash", "-c", whole],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("arguments", ["", "--json"])
def test_characters_that_cannot_be_written_are_replaced_and_json_is_utf_8(machine: Path, arguments: str) -> None:
    told = shell(f"AUTOTUNE doctor --machine {machine} {arguments}", PYTHONIOENCODING="ascii")
    assert (told.returncode, told.stderr) == (0, b"")
    if arguments:
        assert json.loads(told.stdout)["gpus"][0]["name"] == "NVIDIA 日本 🚀"
    else:
        assert b"NVIDIA ?? ?" in told.stdout


def test_an_error_about_a_name_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    told = shell(f"AUTOTUNE doctor --machine {tmp_path}/ü.json", PYTHONIOENCODING="ascii:strict")
    assert told.returncode == 2
    assert told.stderr.startswith(b"error: cannot read the machine file")
    assert told.stderr.count(b"\n") == 2


@pytest.mark.parametrize("command", ["doctor --machine MACHINE", "doctor --machine MACHINE --json", "--version",
                                     "--help", "doctor --machine nowhere.json", "report nowhere", ""])  # fmt: skip
@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_ends_no_command_in_a_traceback(command: str, closed: str, machine: Path) -> None:
    told = shell(f"AUTOTUNE {command.replace('MACHINE', str(machine))} {closed}")
    assert told.returncode in (0, 2)
    assert b"Traceback" not in told.stderr
    assert b"Exception ignored" not in told.stderr


def test_what_is_told_of_a_full_disk_is_about_what_was_asked_for(machine: Path) -> None:
    told = shell(f"AUTOTUNE doctor --machine {machine} > /dev/full")
    assert told.returncode == 2
    assert told.stderr == b"error: cannot write standard output: No space left on device\nhint: make room\n"


@pytest.mark.parametrize("columns", ["0", "1", "39"])
def test_at_least_40_columns_are_assumed(columns: str, machine: Path) -> None:
    told = shell(f"AUTOTUNE doctor --machine {machine}", COLUMNS=columns)
    assert max(len(line) for line in told.stdout.decode().splitlines()) == 40
    assert "precision" in told.stdout.decode()


# --- secrets ------------------------------------------------------------------------------------------------------


def test_an_error_tells_no_secret_that_was_given(machine: Path, tmp_path: Path) -> None:
    told = shell(
        f"AUTOTUNE doctor --machine {tmp_path}/{TOKEN}/swordfish-1234/x.json",
        MY_API_KEY="swordfish-1234",
    )
    assert told.returncode == 2
    assert TOKEN.encode() not in told.stderr
    assert b"swordfish-1234" not in told.stderr
    assert f"cannot read the machine file `{tmp_path}/***/***/x.json`".encode() in told.stderr


def test_passwords_of_addresses_are_no_part_of_a_message() -> None:
    said = without_secrets("cannot reach https://user:password@host.example:8080/x, as s3cr3t-value", {})
    assert said == "cannot reach https://***@host.example:8080/x, as s3cr3t-value"
    assert without_secrets("as s3cr3t-value", {"DB_PASSWORD": "s3cr3t-value"}) == "as ***"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sft  /data/alice/.cache/model  (/data/alice/sft.yaml)", "sft  ~/.cache/model  (~/sft.yaml)"),
        ("`/data/alice/x` and /data/alice", "`~/x` and /data/alice"),
        ("/backup/data/alice/x /data/alicette/x", "/backup/data/alice/x /data/alicette/x"),
    ],
)
def test_the_home_folder_is_a_tilde_in_lines_to_read(text: str, told: str) -> None:
    assert narrated(text, {"HOME": "/data/alice/"}) == told
    assert narrated(text, {}) == narrated(text, {"HOME": "/"}) == text
