"""Trials that failed: why; and where all failed in the same way, who would tell whether what they share is why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autotune.plan.space import Candidate
from autotune.trial.result import TrialResult

FEWEST_ALIKE = 2
ARITHMETIC = ("layer_kernels", "torch_compile", "activation_offloading", "optimizer", "dtype", "tf32")


def describe_failure(result: TrialResult) -> str:
    """Why a trial did not run, in words: "out of memory in backward"."""
    words = {"oom": "out of memory", "error": "an error", "killed": "killed", "hung": "no sign of life"}
    what = words.get(result.outcome, result.outcome)
    where = f" in {result.where}" if result.where else ""
    detail = f" ({result.detail})" if result.detail else ""
    return f"{what}{where}{detail}"


def fail_alike(results: Sequence[TrialResult]) -> bool:
    """Whether several ran, none worked, and all say the same, which is not that memory ran out."""
    failures = {(result.outcome, result.where, result.detail) for result in results}
    alike = len(results) >= FEWEST_ALIKE and len(failures) == 1
    return alike and results[0].outcome in ("error", "killed", "hung")


def common_to_all(results: Iterable[TrialResult]) -> frozenset[tuple[str, object]]:
    """What every candidate that was tried has: one of these may be why all failed."""
    traits = [_traits(result.candidate) for result in results]
    return frozenset.intersection(*traits) if traits else frozenset()


def most_unlike(results: Sequence[TrialResult], candidates: Collection[Candidate]) -> Candidate | None:
    """The first candidate that has the fewest traits of all that failed; None where every one has all of them."""
    common = common_to_all(results)
    chosen = min(candidates, key=lambda one: len(common & _traits(one)), default=None)
    return chosen if chosen is not None and not common <= _traits(chosen) else None


def _traits(candidate: Candidate) -> frozenset[tuple[str, object]]:
    arrangement = candidate.arrangement
    return frozenset(
        {
            ("packed", arrangement.packed),
            ("arrangement", arrangement.name),
            ("attention", candidate.attention),
            ("checkpointing", candidate.checkpointing),
            ("workers", candidate.workers > 0),
            ("threads", candidate.threads),
            *((name, getattr(candidate, name)) for name in ARITHMETIC),
        }
    )
