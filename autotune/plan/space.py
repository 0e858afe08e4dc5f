"""What could run: axes, their choices with grade and reason, and the choices that are out with theirs.

Source of the rules: TRL 1.16 (`trl/trainer/sft_trainer.py`) and transformers 5.22 (`trainer.py`,
`trainer_pt_utils.py`); each is pinned by a test that builds the real thing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec

Grade = Literal["exact", "resampled", "regrouped", "rounded", "changed"]
GRADES: tuple[Grade, ...] = ("exact", "resampled", "regrouped", "rounded", "changed")  # from the safest on
OFFERED: frozenset[Grade] = frozenset({"exact", "resampled", "regrouped"})
ArrangementName = Literal["padded", "batch_rebalance", "bfd", "bfd_split", "wrapped"]

# Useful tokens per optimizer step stay within this share of the baseline's mean; beyond it another training results.
TOKENS_PER_STEP_TOLERANCE = 0.10


class Arrangement(msgspec.Struct, frozen=True):
    """How documents become micro-batches: rows per micro-batch, micro-batches per optimizer step, and for packed
    rows their `max_length` in tokens (None for padded ones)."""

    name: ArrangementName
    micro_batch: int
    accumulation: int
    row_length: int | None = None

    @property
    def packed(self) -> bool:
        return self.row_length is not None

    def __str__(self) -> str:
        name = "rebalanced" if self.name == "batch_rebalance" else self.name
        length = f" {self.row_length}" if self.row_length is not None else ""
        return f"{name}{length}, {self.micro_batch} x {self.accumulation}"


class Candidate(msgspec.Struct, frozen=True):
    """One choice for every axis. `threads` is None where the machine's threads are no axis."""

    arrangement: Arrangement
    attention: str
    checkpointing: bool
    workers: int
    threads: int | None = None

    def __str__(self) -> str:
        return self.describe()

    def describe(self, other_than: Candidate | None = None) -> str:
        """The choices in words; with `other_than` only the arrangement and what differs from that candidate."""
        parts = {
            "arrangement": str(self.arrangement),
            "attention": self.attention.removeprefix("kernels-community/"),
            "checkpointing": "checkpointing" if self.checkpointing else "no checkpointing",
            "threads": "" if self.threads is None else f"{self.threads} thread{'s' if self.threads > 1 else ''}",
            "workers": f"{self.workers or 'no'} worker{'' if self.workers == 1 else 's'}",
        }
        if other_than is None and not self.workers:
            parts["workers"] = ""
        same = [name for name in parts if other_than and getattr(self, name) == getattr(other_than, name)]
        for name in same:
            if name != "arrangement":
                parts[name] = ""
        return ", ".join(part for part in parts.values() if part)

    def differences(self, other: Candidate) -> int:
        """On how many axes the two differ."""
        return sum(getattr(self, name) != getattr(other, name) for name in self.__struct_fields__)


class Choice(msgspec.Struct, frozen=True):
    value: Any
    grade: Grade
    reason: str


class Rejected(msgspec.Struct, frozen=True):
    value: Any
    reason: str


class Axis(msgspec.Struct, frozen=True):
    """One thing that may be set. The baseline's own value is always the first choice."""

    name: str  # the field of `Candidate`
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...] = ()

    def choice(self, value: Any) -> Choice:
        return next(choice for choice in self.choices if choice.value == value)


class Space(msgspec.Struct, frozen=True):
    """`mixing`: attention backends that let the documents of a packed row see each other; the two together are grade
    changed, and no candidate unless `mixing_allowed`. `unusable`: the job's attention where it does not run here;
    what has it is no candidate, the baseline aside."""

    baseline: Candidate
    axes: tuple[Axis, ...]
    tokens_per_step: float  # the baseline's mean of useful tokens per optimizer step
    mixing: tuple[str, ...] = ()
    mixing_allowed: bool = False
    unusable: tuple[str, ...] = ()

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def grade(self, candidate: Candidate) -> Grade:
        """The candidate's grade: that of its least safe choice."""
        grades = [axis.choice(getattr(candidate, axis.name)).grade for axis in self.axes]
        if self._mixes(candidate) and candidate != self.baseline:
            grades.append("changed")
        return max(grades, key=GRADES.index)

    def candidates(self) -> Iterator[Candidate]:
        """Every candidate that may run, the baseline first."""
        names = [axis.name for axis in self.axes]
        for values in itertools.product(*([choice.value for choice in axis.choices] for axis in self.axes)):
            candidate = msgspec.structs.replace(self.baseline, **dict(zip(names, values, strict=True)))
            if candidate == self.baseline or self._may_run(candidate):
                yield candidate

    def _may_run(self, candidate: Candidate) -> bool:
        return candidate.attention not in self.unusable and (self.mixing_allowed or not self._mixes(candidate))

    def _mixes(self, candidate: Candidate) -> bool:
        # documents of `wrapped` rows see each other with every backend
        return candidate.arrangement.name in ("bfd", "bfd_split") and candidate.attention in self.mixing

    @property
    def size(self) -> int:
        if self.unusable or (self.mixing and not self.mixing_allowed):
            return sum(1 for _ in self.candidates())
        return math.prod(len(axis.choices) for axis in self.axes)


def offered(choices: Collection[Choice], *, allowed: Collection[Grade]) -> tuple[list[Choice], list[Rejected]]:
    """Split choices into those the user allows and those that must be asked for."""
    inside = [choice for choice in choices if choice.grade in allowed]
    outside = [
        Rejected(choice.value, f"grade {choice.grade}: {choice.reason}; ask for it with `--allow {choice.grade}`")
        for choice in choices
        if choice.grade not in allowed
    ]
    return inside, outside
