"""What could run: axes, their choices with grade and reason, and the choices that are out with theirs.

Source of the rules: TRL 1.16 (`trl/trainer/sft_trainer.py`) and transformers 5.22 (`trainer.py`,
`trainer_pt_utils.py`); each is pinned by a test that builds the real thing.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import msgspec

from autotune.plan.checkpointing import FULL, OFF

Grade = Literal["exact", "resampled", "regrouped", "rounded", "changed"]
GRADES: tuple[Grade, ...] = ("exact", "resampled", "regrouped", "rounded", "changed")  # from the safest on
OFFERED: frozenset[Grade] = frozenset({"exact", "resampled", "regrouped"})
ArrangementName = Literal["padded", "batch_rebalance", "bfd", "bfd_split", "wrapped"]

# What a candidate is called by on its own: these, and these where they are switched on
ALWAYS_SAID = ("arrangement", "attention", "checkpointing", "threads")
SAID_WHERE_ON = ("workers", "layer_kernels", "torch_compile", "activation_offloading", "tf32")

# Useful tokens per optimizer step stay within this share of the baseline's mean; beyond it another training results.
TOKENS_PER_STEP_TOLERANCE = 0.10


class Arrangement(msgspec.Struct, frozen=True):
    """How documents become micro-batches: rows per micro-batch, micro-batches per optimizer step, and for packed
    rows their `max_length` in tokens (None for padded ones). `padding_free`: the job's option of that name, with which
    the rows of a micro-batch are laid end to end."""

    name: ArrangementName
    micro_batch: int
    accumulation: int
    row_length: int | None = None
    padding_free: bool = False

    @property
    def packed(self) -> bool:
        return self.row_length is not None

    @property
    def one_row(self) -> bool:
        """Whether the documents of a micro-batch lie in one row, kept apart by their positions (TRL 1.16,
        `sft_trainer.py`: `bfd` and `bfd_split` force `padding_free`)."""
        return self.padding_free or self.name in ("bfd", "bfd_split")

    def __str__(self) -> str:
        name: str = "rebalanced" if self.name == "batch_rebalance" else self.name
        if self.padding_free and not self.packed:
            name = "padding-free" if self.name == "padded" else f"{name} padding-free"
        length = f" {self.row_length}" if self.row_length is not None else ""
        return f"{name}{length}, {self.micro_batch} x {self.accumulation}"


class Candidate(msgspec.Struct, frozen=True):
    """One choice for every axis. None where something is no axis on this machine: it is as the job has it.

    `checkpointing` is one of the names of `autotune.plan.checkpointing`; `prefetch` are batches per worker, None for
    torch's 2; `dtype` is that of the weights, `tf32` whether float32 products are computed in TF32.
    """

    arrangement: Arrangement
    attention: str
    checkpointing: str
    workers: int
    threads: int | None = None
    layer_kernels: bool | None = None
    torch_compile: bool | None = None
    activation_offloading: bool | None = None
    optimizer: str | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    dtype: str | None = None
    tf32: bool | None = None

    def __str__(self) -> str:
        return self.describe()

    def describe(self, other_than: Candidate | None = None) -> str:
        """The choices in words; with `other_than` only the arrangement and what differs from that candidate."""
        parts = {
            "arrangement": str(self.arrangement),
            "attention": self.attention.removeprefix("kernels-community/"),
            "checkpointing": {OFF: "no checkpointing", FULL: "checkpointing"}.get(
                self.checkpointing, f"checkpointing ({self.checkpointing})"
            ),
            "threads": "" if self.threads is None else f"{self.threads} thread{'s' if self.threads > 1 else ''}",
            "workers": f"{self.workers or 'no'} worker{'' if self.workers == 1 else 's'}",
            "layer_kernels": _either(self.layer_kernels, "layer kernels"),
            "torch_compile": _either(self.torch_compile, "torch.compile"),
            "activation_offloading": _either(self.activation_offloading, "activation offloading"),
            "optimizer": self.optimizer or "",
            "prefetch": f"prefetch {self.prefetch or 2}",
            "pin_memory": _either(self.pin_memory, "pinned memory"),
            "dtype": "" if self.dtype is None else f"{self.dtype} weights",
            "tf32": _either(self.tf32, "TF32"),
        }
        if other_than is None:
            said = [name for name in SAID_WHERE_ON if getattr(self, name)]
            parts = {name: part for name, part in parts.items() if name in (*ALWAYS_SAID, *said)}
            return ", ".join(part for part in parts.values() if part)
        return ", ".join(
            part
            for name, part in parts.items()
            if part and (name == "arrangement" or getattr(self, name) != getattr(other_than, name))
        )

    def differences(self, other: Candidate) -> int:
        """On how many axes the two differ."""
        return sum(map(operator.ne, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


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


class Apart(msgspec.Struct, frozen=True):
    """Values of some axes that are not tried together."""

    axes: tuple[str, ...]
    values: tuple[Any, ...]
    reason: str


class Space(msgspec.Struct, frozen=True, dict=True):
    """`mixing`: attention backends that let the documents of a packed row see each other; the two together are grade
    changed, and no candidate unless `mixing_allowed`. `unusable`: the job's attention where it does not run here;
    what has it is no candidate, the baseline aside. `apart`: what is not tried together. `minor`: axes that matter
    little; a candidate differs from the baseline on one of them at most, so that they add to the others' product
    instead of multiplying it."""

    baseline: Candidate
    axes: tuple[Axis, ...]
    tokens_per_step: float  # the baseline's mean of useful tokens per optimizer step
    mixing: tuple[str, ...] = ()
    mixing_allowed: bool = False
    unusable: tuple[str, ...] = ()
    apart: tuple[Apart, ...] = ()
    minor: tuple[str, ...] = ()

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def grade(self, candidate: Candidate) -> Grade:
        """The candidate's grade: that of its least safe choice."""
        grades = [axis.choice(getattr(candidate, axis.name)).grade for axis in self.axes]
        if self._mixes(candidate.arrangement, candidate.attention) and candidate != self.baseline:
            grades.append("changed")
        return max(grades, key=GRADES.index)

    def candidates(self) -> Iterator[Candidate]:
        """Every candidate that may run, the baseline first."""
        names = [axis.name for axis in self.axes]
        fields = {name: getattr(self.baseline, name) for name in self.baseline.__struct_fields__}
        for values in self._combinations():
            yield Candidate(**(fields | dict(zip(names, values, strict=True))))

    @functools.cached_property
    def size(self) -> int:
        return sum(1 for _ in self._combinations())

    def _combinations(self) -> Iterator[tuple[Any, ...]]:
        """The values of the axes, in their order, of every candidate; about 1 us for each that the axes allow."""
        choices = [[choice.value for choice in axis.choices] for axis in self.axes]
        together = self._tests()
        base = tuple(getattr(self.baseline, axis.name) for axis in self.axes)
        for values in itertools.product(*choices):
            if all(test(values) for test in together) or values == base:
                yield values

    def _tests(self) -> list[Callable[[tuple[Any, ...]], bool]]:
        """What the values of a candidate have to pass."""
        place = {axis.name: number for number, axis in enumerate(self.axes)}
        tests: list[Callable[[tuple[Any, ...]], bool]] = []
        attention, arrangement = place.get("attention"), place.get("arrangement")
        if attention is not None and self.unusable:
            tests.append(lambda values: values[attention] not in self.unusable)
        if attention is not None and arrangement is not None and self.mixing and not self.mixing_allowed:
            tests.append(lambda values: not self._mixes(values[arrangement], values[attention]))
        minor = [(place[name], getattr(self.baseline, name)) for name in self.minor if name in place]
        if len(minor) > 1:
            tests.append(lambda values: sum(values[number] != base for number, base in minor) <= 1)
        out: dict[tuple[str, ...], set[Any]] = {}
        for one in self.apart:
            if all(name in place for name in one.axes):
                out.setdefault(one.axes, set()).add(one.values if len(one.values) > 1 else one.values[0])
        tests += [_none_of(operator.itemgetter(*(place[name] for name in axes)), out[axes]) for axes in out]
        return tests

    def _mixes(self, arrangement: Arrangement, attention: str) -> bool:
        # documents of `wrapped` rows see each other with every backend
        return arrangement.one_row and attention in self.mixing


def _none_of(of: Callable[[tuple[Any, ...]], Any], out: set[Any]) -> Callable[[tuple[Any, ...]], bool]:
    return lambda values: of(values) not in out


def _either(value: bool | None, name: str) -> str:
    return "" if value is None else name if value else f"no {name}"


def offered(choices: Collection[Choice], *, allowed: Collection[Grade]) -> tuple[list[Choice], list[Rejected]]:
    """Split choices into those the user allows and those that must be asked for."""
    inside = [choice for choice in choices if choice.grade in allowed]
    outside = [
        Rejected(choice.value, f"grade {choice.grade}: {choice.reason}; ask for it with `--allow {choice.grade}`")
        for choice in choices
        if choice.grade not in allowed
    ]
    return inside, outside
