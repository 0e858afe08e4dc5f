"""Peak memory of a candidate: what a trial will hold at its worst, before it is run, and better after some have run.

A step of a training has moments that hold most in turn: the head's backward pass (all that the layers saved, and the
tiles), the last layers' (all that was saved, the head's gradient), the first layer's (all gradients), and the
optimizer's. The peak is the largest of them; `autotune.plan.held` has the terms.

Resident bytes on a CPU are not live bytes: glibc gives a freed block back only from 32 MiB on. Smaller tensors cost
what they took at their own worst moment though they are gone when the next come, since those are of another size and
find no hole that fits; what else is lost in between is `HEAP_SLACK`. Measured so on five shapes (25 of 26 trainings
within 15 %, all within 16 %) by
`benchmarks/memory.py`: without the rule a training with checkpointing, whose gradients are gone when the tiles come,
came out 21 % low; and without the holes that the inputs kept by checkpointing lie in, eager attention 37 % low.
On a GPU torch's allocator reuses freed blocks across sizes; what it holds beyond them is `GPU_SLACK`, not measured yet.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.job import Job
from autotune.plan.activations import (
    MicroBatch,
    attention_bytes,
    cast_bytes,
    layer_bytes,
    mask_bytes,
    selected_bytes,
    working_bytes,
)
from autotune.plan.checkpointing import parse
from autotune.plan.data import Data
from autotune.plan.head import Head, head_bytes
from autotune.plan.held import HEAP_BLOCK_BYTES, Held, TermName, Terms, peak
from autotune.plan.memory_fit import Factors, Measured, fit
from autotune.plan.recipe import with_state_of
from autotune.plan.space import Candidate
from autotune.plan.training_state import FLOAT_BYTES, TrainingState, precision_of, training_state, widths_of
from autotune.probe.machine import Machine
from autotune.probe.model import ModelShape
from autotune.probe.used import used_gpu

# Estimates. A child forked from the preloaded server holds 320 MiB, and some 90 MiB more once a training of a tiny
# model has touched its libraries. A CUDA context with cuBLAS takes 0.4 to 0.8 GB, by card and driver.
CPU_PROCESS_BYTES = 410 * 2**20
GPU_CONTEXT_BYTES = 600 * 2**20
HEAP_SLACK = 0.05  # of the blocks that glibc keeps
GPU_SLACK = 0.05

# TRL 1.16, `models/activation_offloading.py`, `max_fwd_stash_size`: tensors on their way to the host
OFFLOAD_STASH = 5

STATE_TERMS: tuple[TermName, ...] = ("weights", "gradients", "optimizer_state", "optimizer_step")
HOLES: tuple[TermName, ...] = ("activations", "attention", "working")
FIXED_TERMS: tuple[TermName, ...] = ("process", "generation")


# The axes that memory depends on
DECIDE_MEMORY = ("arrangement", "attention", "checkpointing", "activation_offloading", "optimizer", "dtype")


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes a candidate needs at its worst. `fitted`: trials that have ended were taken into account."""

    total_bytes: int
    terms: Terms
    fitted: bool


class MemoryModel:
    """Estimates for one job on one machine, which get better with every peak that is told.

    `estimate` is of the largest micro-batch of the whole data. A trial that passed over a sample tells its peak with
    the largest micro-batch of that sample. Peaks are as the worker measures them: resident bytes on a CPU, on a GPU
    what torch reserved, which knows nothing of the context or of vLLM.
    """

    def __init__(self, data: Data, model: ModelShape, job: Job, machine: Machine) -> None:
        self._data = data
        self._model = model
        self._job = job
        self._machine = machine
        self._measured: list[Measured] = []
        self._factors = Factors()
        self._terms: dict[tuple[Any, ...], Terms] = {}  # by what a candidate's memory depends on

    def tell(
        self,
        candidate: Candidate,
        peak_bytes: int,
        *,
        micro_batch: MicroBatch | None = None,
        out_of_memory: bool = False,
    ) -> None:
        """A trial has held `peak_bytes`, or ran out of memory there and needs more."""
        terms = self.terms(candidate) if micro_batch is None else self._terms_of(candidate, micro_batch)
        self.tell_terms(terms, peak_bytes, out_of_memory=out_of_memory)

    def tell_terms(self, terms: Terms, peak_bytes: int, *, out_of_memory: bool = False) -> None:
        """The same, of a training that the formula gave these terms for."""
        fixed, state, batch = _parts(terms)
        if self._machine.backend != "cpu":
            fixed = 0
        self._measured.append(Measured(fixed, state, batch, peak_bytes, at_least=out_of_memory))
        self._factors = fit(self._measured)

    def terms(self, candidate: Candidate) -> Terms:
        """By the formula alone."""
        key = tuple(getattr(candidate, name) for name in DECIDE_MEMORY)
        found = self._terms.get(key)
        if found is None:
            largest = largest_micro_batch(candidate, self._data, self._machine)
            found = self._terms[key] = self._terms_of(candidate, largest)
        return found

    def estimate(self, candidate: Candidate) -> MemoryEstimate:
        """By the formula, its parts brought to what was measured."""
        terms = self.terms(candidate)
        if self._measured:
            terms = _scaled(terms, self._factors)
        return MemoryEstimate(terms.total, terms, fitted=bool(self._measured))

    def _terms_of(self, candidate: Candidate, micro_batch: MicroBatch) -> Terms:
        return terms_of(candidate, micro_batch, self._model, self._job, self._machine)


def _parts(terms: Terms) -> tuple[int, int, int]:
    """What no choice changes, what the trained parameters take, and what the micro-batch takes."""
    fixed = sum(getattr(terms, name) for name in FIXED_TERMS)
    state = sum(getattr(terms, name) for name in STATE_TERMS)
    return fixed, state, terms.total - fixed - state


def _scaled(terms: Terms, factors: Factors) -> Terms:
    changed: dict[str, int] = {}
    for name in terms.__struct_fields__:
        value = getattr(terms, name)
        if name == "process":
            changed[name] = max(0, round(value + factors.fixed_bytes))
        elif name not in FIXED_TERMS:
            changed[name] = round(value * (factors.state if name in STATE_TERMS else factors.batch))
    return msgspec.structs.replace(terms, **changed)


def largest_micro_batch(candidate: Candidate, data: Data, machine: Machine) -> MicroBatch:
    """The micro-batch of the data with the most positions, as attention sees it."""
    arrangement = candidate.arrangement
    figures = data.figures(arrangement)
    rows, positions = max(1, figures.largest_rows), max(1, figures.largest_positions)
    if arrangement.one_row:
        return MicroBatch(1, positions, masked=not _variable_length(candidate.attention, machine))
    padded = rows > 1 and figures.useful_tokens < figures.computed_positions
    return MicroBatch(rows, -(-positions // rows), masked=padded)


def moments(
    candidate: Candidate, micro_batch: MicroBatch, model: ModelShape, job: Job, machine: Machine
) -> dict[str, list[Held]]:
    """What is held at each moment of a step, from the second step on."""
    job = with_state_of(job, candidate)
    on_cpu = machine.backend == "cpu"
    precision = precision_of(job, model, on_cpu=on_cpu)
    widths = widths_of(model)
    state = training_state(job, model, on_cpu=on_cpu)
    head = head_bytes(
        positions=micro_batch.positions,
        hidden=model.hidden_size,
        vocabulary=model.vocabulary,
        precision=precision,
        trains=state.trains_head,
        triton=machine.backend in ("cuda", "rocm", "xpu"),
    )
    positions = float(micro_batch.positions)
    layer = positions * layer_bytes(model, precision, state)
    attention = attention_bytes(candidate.attention, model, precision, state, micro_batch)
    cast = cast_bytes(model, precision, state)
    # a quantised weight is unpacked for one product alone
    unpacked = float(model.hidden_size * widths.intermediate * precision.compute) if state.quantised else 0.0
    between = positions * model.hidden_size * precision.residual
    mask = mask_bytes(candidate.attention, precision, micro_batch)
    block = positions * widths.intermediate * precision.compute
    scores = float(micro_batch.rows) * micro_batch.length**2
    attention_block = scores * (model.attention_heads or 1) * FLOAT_BYTES if candidate.attention == "eager" else block
    weight_block = float(model.hidden_size * widths.intermediate * precision.weight)

    always = [
        Held("process", CPU_PROCESS_BYTES if on_cpu else GPU_CONTEXT_BYTES),
        Held("weights", state.weights),
        Held("optimizer_state", state.optimizer_state),
        *_generation(job, machine),
    ]
    one_layer = [
        Held("activations", layer, block),
        Held("attention", attention, attention_block),
        Held("casts", cast + unpacked, weight_block),
        Held("working", working_bytes(candidate.attention, model, precision, micro_batch), block),
    ]
    how = parse(candidate.checkpointing)
    checkpointed = how.layers(model.layers)
    whole = model.layers - checkpointed
    saved = [Held("attention", mask, mask)] if how.every else []
    if checkpointed:
        inputs = 0.0 if how.offload and not on_cpu else between  # in host memory
        selected = selected_bytes(candidate.attention, model, precision, micro_batch) if how.selective else 0.0
        saved += [
            Held("activations", checkpointed * inputs, between),
            Held("attention", checkpointed * selected, selected),
        ]
    if whole:
        saved += [
            Held("activations", whole * layer, block),
            Held("attention", whole * attention + (0.0 if how.every else mask), attention_block),
            Held("casts", whole * cast, weight_block),
        ]
    if candidate.activation_offloading and not on_cpu:
        saved = _moved(saved)
    recomputed = one_layer if how.every else [one_layer[-1]]
    first_layer = [Held("activations", between, between), *one_layer]
    kept = candidate.arrangement.accumulation > 1  # gradients of the micro-batches before
    body, vocabulary = _gradients(state, model, head, weight_block)
    before = [*body, *vocabulary] if kept else []
    again = [Held("head", head.gradient, head.gradient)]  # added to the gradient that is there, and freed
    return {
        "head": [
            *always,
            *before,
            *saved,
            *([Held("head", head.saved, between), Held("head", head.tiles, head.tile)]),
            *again,
        ],
        "last layer": [*always, *(before or vocabulary), *saved, *recomputed],
        "first layer": [*always, *body, *vocabulary, *first_layer, *(again if kept or model.tied_embeddings else [])],
        "optimizer": [*always, *body, *vocabulary, Held("optimizer_step", state.optimizer_step, state.largest)],
    }


def _moved(saved: list[Held]) -> list[Held]:
    """What stays on the device of activations that are moved to the host: those on their way (TRL 1.16)."""
    most = OFFLOAD_STASH * max(one.block_bytes for one in saved)
    return [Held("activations", min(most, sum(one.bytes for one in saved)), max(one.block_bytes for one in saved))]


def _gradients(
    state: TrainingState, model: ModelShape, head: Head, weight_block: float
) -> tuple[list[Held], list[Held]]:
    """Gradients of the layers, and of embedding and head."""
    vocabulary = 0.0
    if state.trains_head:
        copies = 1 if model.tied_embeddings or state.adapters is not None else 2
        vocabulary = min(float(state.gradients), copies * head.gradient)
    return (
        [Held("gradients", state.gradients - vocabulary, weight_block)],
        [Held("gradients", vocabulary, head.gradient)],
    )


def _generation(job: Job, machine: Machine) -> list[Held]:
    """vLLM in the trainer's process takes its fraction of the whole card (TRL 1.16, `vllm_gpu_memory_utilization`)."""
    resolved = job.resolved
    if not resolved.get("use_vllm") or resolved.get("vllm_mode") != "colocate" or not machine.gpus:
        return []
    share = float(resolved.get("vllm_gpu_memory_utilization") or 0.0)
    used = used_gpu(machine.gpus)
    return [] if used is None else [Held("generation", share * used.memory_bytes)]


def terms_of(candidate: Candidate, micro_batch: MicroBatch, model: ModelShape, job: Job, machine: Machine) -> Terms:
    """The terms at the peak, the allocator's slack among them."""
    keeps = float(HEAP_BLOCK_BYTES) if machine.backend == "cpu" else 0.0
    held = moments(candidate, micro_batch, model, job, machine)
    found = peak(held, keeps_blocks_below=keeps)
    if machine.backend == "cpu":
        kept = max(sum(one.bytes for one in each if 0 < one.block_bytes < keeps) for each in held.values())
        slack = HEAP_SLACK * kept
        how = parse(candidate.checkpointing)
        if how.every:
            # the input of the next layer, which is kept, lies in the hole that this one's largest temporary left
            blocks = [one.block_bytes for one in held["last layer"] if one.term in HOLES and one.block_bytes < keeps]
            slack += how.layers(model.layers) * max(blocks, default=0.0)
    else:
        slack = GPU_SLACK * (found.total - found.process - found.generation)
    return msgspec.structs.replace(found, slack=round(slack))


def _variable_length(attention: str, machine: Machine) -> bool:
    return any(backend.name == attention and backend.packing == "variable length" for backend in machine.attention)
