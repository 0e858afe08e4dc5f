"""What TRL's and accelerate's parsers say no to, said as an error with a hint."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from autotune.errors import AutotuneError
from autotune.job_values import SCRIPT, takes

# What `trl-autotune` itself takes on the command line, for the hint to a name that is nearly one of these
TUNER_OPTIONS = (
    "allow", "auto", "budget", "cold", "cores", "demo", "dry-run", "gpu-memory", "gpus", "json", "launch", "machine",
    "memory-limit", "precision", "ram", "resume", "run-folder", "trials",
)  # fmt: skip


class Refusals:
    """Knows the options of TRL (`actions`, with their type `hints`) and of `accelerate launch` (`launcher`)."""

    def __init__(
        self,
        program: str,
        actions: dict[str, argparse.Action],
        launcher: dict[str, argparse.Action],
        hints: dict[str, Any],
    ) -> None:
        self.program = program
        self.actions = actions
        self.launcher = launcher
        self.hints = hints
        self.names = [*actions, *launcher, "accelerate_config", "config", "env"]

    @contextlib.contextmanager
    def of(self, parser: argparse.ArgumentParser) -> Iterator[None]:
        """Turn whatever TRL or accelerate says into an error with a hint."""

        def refuse(message: str) -> NoReturn:
            found = re.fullmatch(r"argument (?:--)?([\w-]+)[^:]*: (.*)", message, re.DOTALL)
            if found is None:
                raise AutotuneError(message.removesuffix("."), hint=self.help_hint())
            name = found[1].replace("-", "_")
            action = self.actions.get(name) or self.launcher.get(name)
            hint = takes(name, self.hints.get(name, Any), action) if action else self.help_hint()
            raise AutotuneError(f"`{name}`: {found[2].removesuffix('.')}", hint=hint)

        parser.error = refuse  # type: ignore[method-assign]
        try:
            yield
        except AutotuneError:
            raise
        except SystemExit:
            raise AutotuneError(
                "`--help` is given: there is nothing to tune", hint=f"`{self.program} --help` explains the options"
            ) from None
        except Exception as error:
            raise AutotuneError(_sentence(error), hint=self.named_hint(str(error))) from error

    def unknown(self, name: str, place: str) -> AutotuneError:
        names = self.names if place else [*self.names, *TUNER_OPTIONS]  # those stand in no file
        near = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.6)
        meant = f"--{near[0]}" if near and near[0] not in self.names else near[0] if near else None
        hint = (
            f"did you mean `{meant}`?" if meant else f"neither TRL nor `accelerate launch` has it; {self.help_hint()}"
        )
        return AutotuneError(f"{place}unknown option `{name}`", hint=hint)

    def help_hint(self) -> str:
        return f"`{self.program} --help` lists the options"

    def named_hint(self, message: str) -> str:
        if "bf16/gpu" in message:
            return "there is no GPU here: write `use_cpu: true`"
        words = dict.fromkeys(
            word for word in re.findall(r"\w+", message) if "_" in word or word in ("bf16", "fp16", "tf32")
        )
        named = [f"`{word}`" for word in words if word in self.actions]
        return f"change {' or '.join(named)}" if named else self.help_hint()


def refuse_strays(found: dict[str, Any]) -> None:
    script, after = found["training_script"], found["training_script_args"]
    if script != SCRIPT or after:
        raise AutotuneError(
            f"unexpected argument `{script}`",
            hint="options begin with `--`; put quotes around a value that holds spaces",
        )


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__).removesuffix(".")
