"""A prediction of what a candidate costs, in terms that can be fitted to what trials measure.

Seconds per useful token = ((arithmetic + attention) / threads^e + overhead) * (1 + recomputed) * rest, with

* arithmetic: 6 floating-point operations per parameter and computed position (Kaplan et al. 2020, section 2.1);
* attention: 12 per layer, hidden unit, position and position attended to, half of it where the mask is causal only;
* overhead: a fixed time per layer and micro-batch, during which nothing is computed;
* recomputed: the share of forward and backward that checkpointing runs again;
* rest: what the other axes do (`autotune.plan.axis_costs`).

The constants below are orders of magnitude for a CPU core and a data-centre GPU, never shown as a measurement. By
themselves they are good for the order in which the first candidates are tried; `autotune.search.cost_fit` brings them
to what was measured.
"""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from autotune.plan import axis_costs
from autotune.plan.checkpointing import parse
from autotune.plan.data import Data
from autotune.plan.space import Arrangement, Candidate
from autotune.probe.machine import Machine
from autotune.probe.model import ModelShape

Scores = Literal["causal", "dense mask", "written", "variable length"]

PASSES = 6.0  # operations per parameter and position, forward and backward
CPU_CORE_FLOPS = 4.0e10
GPU_FLOPS = 1.5e14
CPU_LAYER_OVERHEAD_SECONDS = 4.0e-4
GPU_LAYER_OVERHEAD_SECONDS = 3.0e-4
THREAD_EXPONENT = 0.8  # n threads do n^0.8 times the work of one
# What attention costs by what it does with its scores, against knowing its mask to be causal
SCORES: dict[Scores, float] = {
    "causal": 1.0,
    "dense mask": 3.0,  # reads the mask from memory
    "written": 6.0,  # eager: writes the scores to memory
    "variable length": 0.5,  # of each document alone
}


class Terms(msgspec.Struct, frozen=True):
    """What a candidate's seconds per useful token are made of, by the constants: on one thread, nothing recomputed.

    `again` is the share of forward and backward that is recomputed, `rest` the factor of all other axes.
    """

    arithmetic: float
    attention: float = 0.0
    scores: Scores = "causal"
    overhead: float = 0.0
    again: float = 0.0
    threads: int = 1
    rest: float = 1.0

    @property
    def seconds(self) -> float:
        """Predicted seconds per useful token."""
        computed = (self.arithmetic + self.attention) / float(self.threads) ** THREAD_EXPONENT
        seconds: float = (computed + self.overhead) * (1.0 + self.again) * self.rest
        return seconds


class CostModel:
    """The terms of any candidate on one machine; what candidates share is computed once."""

    def __init__(self, data: Data, model: ModelShape, machine: Machine) -> None:
        self._data = data
        self._model = model
        self._machine = machine
        self._shared: dict[tuple[Arrangement, str], Terms] = {}

    def terms(self, candidate: Candidate) -> Terms:
        """The terms of a candidate, about 5 us each."""
        key = (candidate.arrangement, candidate.attention)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._compute(*key)
        again = _again(candidate.checkpointing)
        return Terms(
            shared.arithmetic,
            shared.attention,
            shared.scores,
            shared.overhead,
            again,
            (candidate.threads or 1) if self._machine.backend == "cpu" else 1,
            axis_costs.factor(candidate, self._machine) / (1.0 + again),
        )

    def _compute(self, arrangement: Arrangement, attention: str) -> Terms:
        model, figures = self._model, self._data.figures(arrangement)
        useful, micro_batches = max(1, figures.useful_tokens), max(1, figures.micro_batches)
        # TRL feeds packed rows without padding; `computed_positions` counts their empty room too
        one_row = arrangement.one_row
        positions = float(figures.useful_tokens if one_row else figures.computed_positions)
        variable_length = self._variable_length(attention)
        if one_row and not variable_length:
            attended = positions / micro_batches  # all rows of a micro-batch are one long row with a block mask
        elif one_row:
            attended = self._mean_tokens
        else:
            attended = positions / micro_batches / arrangement.micro_batch
        scores = _scores(attention, one_row=one_row, variable_length=variable_length)
        products = 2.0 * PASSES * model.layers * model.hidden_size * positions * attended * SCORES[scores]
        on_cpu = self._machine.backend == "cpu"
        speed = CPU_CORE_FLOPS if on_cpu else GPU_FLOPS
        overhead = CPU_LAYER_OVERHEAD_SECONDS if on_cpu else GPU_LAYER_OVERHEAD_SECONDS
        return Terms(
            PASSES * model.parameters * positions / speed / useful,
            products / speed / useful,
            scores,
            overhead * model.layers * micro_batches / useful,
        )

    @functools.cached_property
    def _mean_tokens(self) -> float:
        tokens = self._data.lengths.tokens
        return sum(tokens) / max(1, len(tokens))

    def _variable_length(self, attention: str) -> bool:
        backends = self._machine.attention
        return any(one.name == attention and one.packing == "variable length" for one in backends)


def seconds_per_token(candidate: Candidate, data: Data, model: ModelShape, machine: Machine) -> float:
    """Predicted seconds per useful token, by the constants."""
    return CostModel(data, model, machine).terms(candidate).seconds


@functools.lru_cache(maxsize=256)
def _again(checkpointing: str) -> float:
    how = parse(checkpointing)
    if how.every == 0:
        return 0.0
    return axis_costs.RECOMPUTED / how.every * (axis_costs.WITHOUT_ATTENTION if how.selective else 1.0)


def _scores(attention: str, *, one_row: bool, variable_length: bool) -> Scores:
    if variable_length:
        return "variable length"
    if attention == "eager":
        return "written"
    return "dense mask" if one_row else "causal"
