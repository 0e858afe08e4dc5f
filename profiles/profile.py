"""`profile.yaml`: the tuned options, what they were measured on, and the evidence. Nothing else has to travel."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ValidFor(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether the profile can be used elsewhere as it is."""

    gpus: tuple[dict[str, Any], ...]
    cpu: dict[str, Any] | None
    versions: dict[str, str | None]
    model: dict[str, Any]
    lengths: dict[str, Any]
    overridden: tuple[str, ...] = ()  # facts about the machine that its user gave instead of the probe


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    rate_unit: Literal["useful tokens/s", "completions/s"]
    baseline_rate: float | None
    best_rate: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    trials: int
    grade: str  # of the options: how far the training they give may be from the one without them
    differences: tuple[str, ...] = ()  # what is not as in that, for grades that had to be asked for
    gates: dict[str, float | str] = {}


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of `profile.yaml`. `options` are TRL options that the tuner chose; no path, name or token is in it."""

    schema: Literal[1] = 1
    method: str
    options: dict[str, Any]
    placement: dict[str, Any]
    valid_for: ValidFor
    evidence: Evidence
    measured: str  # date, YYYY-MM-DD


def to_yaml(profile: Profile) -> str:
    """The profile as YAML, with a line on top that says what it is."""
    import yaml

    document = msgspec.to_builtins(profile)
    if not profile.valid_for.overridden:
        del document["valid_for"]["overridden"]
    text = yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
    return f"# A tuned profile of trl-autotune: TRL options, what they were measured on, and the evidence\n{text}"
