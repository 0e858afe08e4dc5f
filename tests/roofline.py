"""Made-up timings of GPU-sized jobs, by a simple roofline: no measurement of anything.

They give the search something to find that has the size of real jobs: compute and memory bandwidth as the vendor
publishes them, a fixed time for each kernel that is launched, attention with and without variable lengths, memory by
`autotune.plan.memory`. What is slower than what on a real GPU they do not tell.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from autotune import planning, session
from autotune.children import Children
from autotune.plan.activations import MicroBatch
from autotune.plan.data import Data
from autotune.plan.memory import MemoryModel
from autotune.plan.order import random_order
from autotune.plan.space import Arrangement, Candidate
from autotune.planning import Plan
from autotune.probe.lengths import Lengths
from autotune.probe.machine import Machine, for_one_gpu, read_machine
from autotune.probe.model import ModelShape
from autotune.search.samples import Sample, draw, first_pass_steps
from benchmarks.replay import ReplaySetting
from benchmarks.sweep_table import Layout, Measured, StepShape, Swept, Table, narrowed, with_axes
from tests import tiny

MACHINES = Path(__file__).parent / "data" / "machines"
AXES = ("arrangement", "attention", "checkpointing", "workers")
PASSES = 2
REPETITIONS = 3
STEP_NOISE, TRIAL_NOISE = 0.015, 0.008  # of a step's time, and of all times of a trial


class Chip(NamedTuple):
    """A GPU by its vendor's figures: dense half-precision operations and bytes, each per second."""

    machine: str  # recorded, in tests/data/machines
    flops: float
    bandwidth: float


# NVIDIA's data sheets: T4 (65 TFLOPS mixed precision, 320 GB/s), A100 80GB SXM (312 TFLOPS, 2,039 GB/s), H200 SXM
# (1,979 TFLOPS with sparsity, half of that without, 4.8 TB/s)
CHIPS = {
    "T4": Chip("t4", 65e12, 320e9),
    "A100": Chip("8x-a100", 312e12, 2.039e12),
    "H200": Chip("h200", 989e12, 4.8e12),
}
REACHED = 0.45  # of the published operations
LAUNCH_SECONDS = 6e-6
LAYER_KERNELS = 45  # launched for a layer's forward and backward pass
COLLATE_SECONDS = 3e-3  # for a micro-batch, in the step where no worker does it
FULL = 0.97  # of the free memory: what needs more does not run to its end
MEMORY_FACTOR = 1.07  # of the formula: it is off by as much, and the search must find that out


class Size(NamedTuple):
    """A model's config, and what its job says."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    options: str
    start_seconds: float


LORA = "use_peft: true\nlora_r: 16\nlora_target_modules: all-linear\n"
# Of documents up to 2,400 tokens `max_length` cuts some, and whole packed rows are not near enough to a step of 8;
# where nothing is cut, rows of many lengths are packed
CUT = "max_length: 2048\nper_device_train_batch_size: 8\n"
WHOLE = "max_length: 2560\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 4\n"
JOBS = {
    "LoRA 7B": Size(32, 4096, 11008, 32, 32, 32000, CUT + LORA, 14.0),
    "full 1.5B": Size(28, 1536, 8960, 12, 2, 151936, WHOLE, 9.0),
    "LoRA 1.5B": Size(28, 1536, 8960, 12, 2, 151936, CUT + LORA, 9.0),
}
COMMON = """\
model_name_or_path: model
datasets: [{path: json, data_files: rows.jsonl, split: train}]
output_dir: output
report_to: none
"""


def plan_for(chip: str, size: str, folder: Path, children: Children) -> Plan:
    """The real plan of a job on a recorded machine that is not here, for the axes that the table has."""
    its = JOBS[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": its.layers,
        "hidden_size": its.hidden,
        "intermediate_size": its.intermediate,
        "num_attention_heads": its.heads,
        "num_key_value_heads": its.key_value_heads,
        "vocab_size": its.vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": size != "LoRA 7B",
    }
    (folder / "model").mkdir(parents=True, exist_ok=True)
    tiny.make_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(config))
    lengths = tiny.lengths(2000, seed=3, median=300, longest=2400)
    tiny.write_rows(folder / "rows.jsonl", ({"input_ids": [7] * length} for length in lengths))
    (folder / "sft.yaml").write_text(COMMON + its.options)
    machine = for_one_gpu(read_machine(MACHINES / f"{CHIPS[chip].machine}.json"))
    options = session.Options(method="sft", arguments=("--config", "sft.yaml"), folder=folder)
    plan = planning.prepare(options, children, machine, emit=lambda _event: None)
    return msgspec.structs.replace(plan, space=with_axes(plan.space, AXES))


def table_of(chip: str, size: str, plan: Plan, folder: Path) -> Table:
    """A table of every candidate, with out-of-memory entries."""
    nothing = Table(
        name=f"{size} on {chip}",
        kind="made up",
        date="",
        prepared=plan.prepared,
        axes=AXES,
        sample_rows=(0,),
        sample_steps=1,
        passes=PASSES,
        layouts=(),
        swept=(),
    )
    setting = ReplaySetting(nothing, plan, folder, budget_seconds=600.0, seed=0)
    sample = draw(setting, first_pass_steps(setting))
    made = _Maker(CHIPS[chip], JOBS[size], plan, sample)
    swept = tuple(made.swept(candidate) for candidate in plan.space.candidates() if _plain(candidate))
    return msgspec.structs.replace(
        nothing, sample_rows=sample.row_numbers, sample_steps=sample.steps, layouts=tuple(made.layouts), swept=swept
    )


def with_space_of(plan: Plan, table: Table) -> Plan:
    """The plan with the candidates of the table."""
    return msgspec.structs.replace(plan, space=narrowed(plan.space, [one.candidate for one in table.swept]))


Documents = list[int]  # their tokens


class _Maker:
    """Makes the entries of one table."""

    def __init__(self, chip: Chip, size: Size, plan: Plan, sample: Sample) -> None:
        self.layouts: dict[Layout, int] = {}
        self._chip = chip
        self._size = size
        self._plan = plan
        kept = plan.data.kept
        tokens = dict(zip(kept.row_numbers, kept.tokens, strict=True))
        self._tokens = [tokens[number] for number in sample.row_numbers]
        self._chance = random.Random(7)
        prepared = plan.prepared
        data = Data(prepared.job, _rows_of(prepared.lengths, sample.row_numbers), prepared.model)
        self._on_sample = MemoryModel(data, prepared.model, prepared.job, prepared.machine)
        self._on_all = MemoryModel(plan.data, prepared.model, prepared.job, prepared.machine)
        self._batches: dict[Arrangement, list[list[list[Documents]]]] = {}

    def swept(self, candidate: Candidate) -> Swept:
        passes = self._passes(candidate.arrangement)
        peak = self._peak_bytes(self._on_sample, candidate)
        free = self._machine.gpus[0].free_bytes
        if peak > FULL * free:
            told = Measured(
                outcome="oom",
                where="backward",
                detail="OutOfMemoryError: CUDA out of memory",
                seconds=self._size.start_seconds + 2.0,
                peak_bytes=free,
            )
            return Swept(candidate, (told,) * REPETITIONS, "oom")
        on_longest = self._peak_bytes(self._on_all, candidate) > FULL * free
        layout = tuple(tuple(_shape(candidate.arrangement, step) for step in steps) for steps in passes)
        place = self.layouts.setdefault(layout, len(self.layouts))
        exact = [[self._step_seconds(candidate, step) for step in steps] for steps in passes]
        measured = tuple(self._measured(candidate, exact, place, peak) for _ in range(REPETITIONS))
        return Swept(candidate, measured, "oom" if on_longest else "ok")

    @property
    def _machine(self) -> Machine:
        return self._plan.prepared.machine

    def _measured(self, candidate: Candidate, exact: list[list[float]], layout: int, peak_bytes: int) -> Measured:
        chance = self._chance
        of_trial = chance.lognormvariate(0.0, TRIAL_NOISE)
        seconds = tuple(
            tuple(one * of_trial * chance.lognormvariate(0.0, STEP_NOISE) for one in steps) for steps in exact
        )
        start = self._size.start_seconds * chance.uniform(0.95, 1.1)
        return Measured(
            outcome="ok",
            layout=layout,
            step_seconds=seconds,
            losses=(2.0,),
            startup_seconds=start,
            seconds=start + sum(map(sum, seconds)),
            peak_bytes=peak_bytes,
            attention=candidate.attention,
        )

    def _peak_bytes(self, memory: MemoryModel, candidate: Candidate) -> int:
        """As torch would reserve them."""
        terms = memory.terms(candidate)
        return round(MEMORY_FACTOR * (terms.total - terms.process))

    def _passes(self, arrangement: Arrangement) -> list[list[list[Documents]]]:
        """Per pass, per step, per micro-batch: its documents. Pass 0 are the first two steps, as in a trial."""
        found = self._batches.get(arrangement)
        if found is None:
            orders = [random_order(len(self._tokens), 42 + number) for number in range(PASSES + 1)]
            whole = [list(self._steps(arrangement, order)) for order in orders]
            found = self._batches[arrangement] = [whole[0][:2], *whole[1:]]
        return found

    def _steps(self, arrangement: Arrangement, order: Sequence[int]) -> Iterator[list[Documents]]:
        tokens = [self._tokens[place] for place in order]
        rows = _packed(tokens, arrangement.row_length) if arrangement.row_length else [[one] for one in tokens]
        a_step = arrangement.micro_batch * arrangement.accumulation
        for start in range(0, len(rows), a_step):
            step = rows[start : start + a_step]
            if arrangement.name == "batch_rebalance":
                step.sort(reverse=True)
            yield [
                [one for row in step[first : first + arrangement.micro_batch] for one in row]
                for first in range(0, len(step), arrangement.micro_batch)
            ]

    def _step_seconds(self, candidate: Candidate, step: list[Documents]) -> float:
        model, trains_all = self._plan.prepared.model, not self._plan.prepared.job.resolved.get("use_peft")
        optimizer = 28.0 * model.parameters / self._chip.bandwidth if trains_all else 1e-3
        return optimizer + sum(self._micro_batch_seconds(candidate, documents) for documents in step)

    def _micro_batch_seconds(self, candidate: Candidate, documents: Documents) -> float:
        model, chip = self._plan.prepared.model, self._chip
        batch = _micro_batch(candidate, documents, self._machine)
        again = 1.0 if _recomputes(candidate) else 0.0
        one_row = _one_row(candidate.arrangement)
        by_document = one_row and not batch.masked
        scores = float(sum(one * one for one in documents) if by_document else batch.rows * batch.length**2)
        causal = 0.5 if by_document or not batch.masked else 1.0  # a mask that is read hides what need not be computed
        # forward, backward to the inputs and, where all weights train, to these
        products = (2.0 if self._plan.prepared.job.resolved.get("use_peft") else 3.0) + again
        operations = 2.0 * model.parameters * batch.positions * products
        operations += 4.0 * model.layers * model.hidden_size * scores * causal * (3.0 + again)
        moved = 2.0 * model.parameters * (2.0 + again) + 2.0 * 30 * model.layers * model.hidden_size * batch.positions
        if candidate.attention == "eager":
            moved += 10.0 * model.layers * _heads(model) * batch.rows * float(batch.length) ** 2
        computed = operations / (REACHED * chip.flops) + 0.3 * moved / chip.bandwidth
        launched = LAUNCH_SECONDS * LAYER_KERNELS * model.layers * (1.0 + again / 3.0)
        collated = 0.0 if candidate.workers else COLLATE_SECONDS
        return max(computed, moved / chip.bandwidth, launched) + collated


def _rows_of(lengths: Lengths, numbers: Sequence[int]) -> Lengths:
    """The lengths of these rows alone."""
    changed = {
        name: tuple(getattr(lengths, name)[number] for number in numbers)
        for name in ("tokens", "first_loss", "last_loss", "loss_tokens")
    }
    return msgspec.structs.replace(lengths, rows=len(numbers), row_numbers=(), **changed)


def _plain(candidate: Candidate) -> bool:
    """Whether it checkpoints every layer or none: the roofline knows no way between."""
    return _recomputes(candidate) or str(candidate.checkpointing) in ("off", "False")


def _recomputes(candidate: Candidate) -> bool:
    return str(candidate.checkpointing) in ("full", "True")


def _one_row(arrangement: Arrangement) -> bool:
    """Whether the documents of a micro-batch lie end to end."""
    return arrangement.packed or bool(getattr(arrangement, "padding_free", False))


def _heads(model: ModelShape) -> int:
    return model.attention_heads or 1


def _micro_batch(candidate: Candidate, documents: Documents, machine: Machine) -> MicroBatch:
    if _one_row(candidate.arrangement):
        variable = any(
            one.name == candidate.attention and one.packing == "variable length" for one in machine.attention
        )
        return MicroBatch(1, sum(documents), masked=not variable)
    return MicroBatch(len(documents), max(documents), masked=len(set(documents)) > 1)


def _shape(arrangement: Arrangement, step: list[Documents]) -> StepShape:
    useful = sum(map(sum, step))
    positions = useful if _one_row(arrangement) else sum(len(documents) * max(documents) for documents in step)
    return StepShape(len(step), useful, positions - useful)


def _packed(tokens: Sequence[int], row_length: int) -> list[Documents]:
    """Each document in the fullest row that it fits into, longest first; the rows in the order of their first."""
    rows: list[Documents] = []
    for one in sorted(tokens, reverse=True):
        fitting = [row for row in rows if sum(row) + one <= row_length]
        if fitting:
            max(fitting, key=sum).append(one)
        else:
            rows.append([one])
    random.Random(len(rows)).shuffle(rows)
    return rows
