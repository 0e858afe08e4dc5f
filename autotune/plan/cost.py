"""A prediction of what a candidate costs, good for one thing: the order in which candidates are tried.

Seconds per useful token = (arithmetic + attention + overhead) / useful tokens, with

* arithmetic: 6 floating-point operations per parameter and computed position (Kaplan et al. 2020, section 2.1);
* attention: 12 per layer, hidden unit, position and position attended to, half of it where the mask is causal only;
* overhead: a fixed time per layer and micro-batch, during which nothing is computed;

all of it times what the other axes do (`autotune.plan.axis_costs`), as checkpointing, which runs forward passes twice.

The constants below are orders of magnitude for a CPU core and a data-centre GPU, never shown as a measurement.
"""

from __future__ import annotations

from autotune.plan import axis_costs
from autotune.plan.data import Data
from autotune.plan.space import Candidate
from autotune.probe.machine import Machine
from autotune.probe.model import ModelShape

PASSES = 6.0  # operations per parameter and position, forward and backward
CPU_CORE_FLOPS = 4.0e10
GPU_FLOPS = 1.5e14
CPU_LAYER_OVERHEAD_SECONDS = 4.0e-4
GPU_LAYER_OVERHEAD_SECONDS = 3.0e-4
THREAD_EXPONENT = 0.8  # n threads do n^0.8 times the work of one
DENSE_MASK_FACTOR = 3.0  # attention that reads its mask from memory instead of knowing it to be causal
EAGER_FACTOR = 6.0  # attention that writes its scores to memory
VARIABLE_LENGTH_FACTOR = 0.5


def seconds_per_token(candidate: Candidate, data: Data, model: ModelShape, machine: Machine) -> float:
    """Predicted seconds per useful token."""
    arrangement = candidate.arrangement
    figures = data.figures(arrangement)
    micro_batches = max(1, figures.micro_batches)
    # TRL feeds packed rows without padding; `computed_positions` counts their empty room too
    dense_rows = arrangement.one_row
    positions = float(figures.useful_tokens if dense_rows else figures.computed_positions)
    variable_length = _variable_length(candidate.attention, machine)
    if dense_rows and not variable_length:
        attended = positions / micro_batches  # all rows of a micro-batch are one long row with a block mask
    elif dense_rows:
        attended = sum(data.lengths.tokens) / max(1, len(data.lengths.tokens))
    else:
        attended = positions / micro_batches / arrangement.micro_batch
    arithmetic = PASSES * model.parameters * positions
    attention = (
        2.0
        * PASSES
        * model.layers
        * model.hidden_size
        * positions
        * attended
        * _attention_factor(candidate.attention, dense=dense_rows, variable_length=variable_length)
    )
    if machine.backend == "cpu":
        speed = CPU_CORE_FLOPS * float(candidate.threads or 1) ** THREAD_EXPONENT
        overhead = CPU_LAYER_OVERHEAD_SECONDS
    else:
        speed, overhead = GPU_FLOPS, GPU_LAYER_OVERHEAD_SECONDS
    fixed = overhead * model.layers * micro_batches
    seconds: float = (arithmetic + attention) / speed + fixed
    seconds *= axis_costs.factor(candidate, machine)
    return seconds / max(1, figures.useful_tokens)


def _variable_length(attention: str, machine: Machine) -> bool:
    return any(backend.name == attention and backend.packing == "variable length" for backend in machine.attention)


def _attention_factor(attention: str, *, dense: bool, variable_length: bool) -> float:
    if variable_length:
        return VARIABLE_LENGTH_FACTOR
    if attention == "eager":
        return EAGER_FACTOR
    return DENSE_MASK_FACTOR if dense else 1.0
