"""What one trial gave, as it stands in `result.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from autotune.events import Outcome, Step
from autotune.plan.space import Candidate

Purpose = Literal["speed", "memory", "confirm", "gate"]


class Pass(msgspec.Struct, frozen=True):
    """One complete pass over the sample; seconds of all its steps, tokens, micro-batches."""

    index: int
    steps: int
    seconds: float
    useful_tokens: int
    padding_tokens: int
    micro_batches: int

    @property
    def rate(self) -> float:
        """Useful tokens per second over the whole pass."""
        return self.useful_tokens / self.seconds

    @property
    def fill(self) -> float:
        """Useful tokens over computed positions."""
        return self.useful_tokens / (self.useful_tokens + self.padding_tokens)


def joined(passes: Sequence[Pass]) -> Pass:
    """Several passes as one."""
    return Pass(
        index=passes[0].index,
        steps=sum(one.steps for one in passes),
        seconds=sum(one.seconds for one in passes),
        useful_tokens=sum(one.useful_tokens for one in passes),
        padding_tokens=sum(one.padding_tokens for one in passes),
        micro_batches=sum(one.micro_batches for one in passes),
    )


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """`result.json`. `rate` is useful tokens/s with the sample's padding corrected to the whole data's; null without
    a complete measurement: a failed trial has no score."""

    schema: Literal[1] = 1
    index: int
    purpose: Purpose
    candidate: Candidate
    label: str
    outcome: Outcome
    where: str | None = None
    detail: str | None = None
    rate: float | None = None
    rate_interval: tuple[float, float] | None = None
    foretold_pass_seconds: float | None = None  # of a trial that was stopped because its passes would be too long
    partial_rate: float | None = None  # of a pruned trial: as far as it came
    pass_steps: int = 0  # optimizer steps of the baseline in a pass over the documents of this trial
    passes: tuple[Pass, ...] = ()
    losses: tuple[float | None, ...] = ()  # of the first steps
    steps: int = 0
    finite_steps: int = 0  # whose loss was a finite number
    finite_in_a_row: int = 0  # of the last steps, those whose loss and gradient norm were finite numbers
    warm_up_steps: int = 0  # before the first pass
    unsteady_steps: int = 0  # of the first pass, that were still warming up: they count as the later ones do
    warm_up_seconds: float = 0.0
    actual_attention: str | None = None
    kernel_revision: str | None = None  # the hub kernel's commit, or `local`
    peak_bytes: int | None = None
    others_cores: float = 0.0  # cores that other processes kept busy meanwhile
    disturbed_by: str | None = None  # what else was on the GPU or held it back when the trial had measured
    busy: bool = False  # others had the cores, and it was not measured again: its rate wins nothing
    at_speed: float = 1.0  # of the machine: the rates are those measured times this, where its speed changed later
    startup_seconds: float | None = None  # child start to first optimizer step
    step_seconds: float = 0.0  # inside measured and warm-up steps
    step_tokens: int = 0  # useful ones, in these steps
    seconds: float = 0.0


def passes_of(steps: list[Step], ended: set[int]) -> tuple[Pass, ...]:
    """The complete passes among `steps`; `ended` are the passes whose end was reported. Warm-up (pass 0) is none."""
    passes = []
    for index in sorted(ended):
        own = [step for step in steps if step.pass_index == index]
        if index == 0 or not own:
            continue
        passes.append(
            Pass(
                index=index,
                steps=len(own),
                seconds=sum(step.seconds for step in own),
                useful_tokens=sum(step.useful_tokens for step in own),
                padding_tokens=sum(step.padding_tokens for step in own),
                micro_batches=sum(step.micro_batches for step in own),
            )
        )
    return tuple(passes)
