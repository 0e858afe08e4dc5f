"""Peak memory of real trainings on a CPU, beside what `autotune.plan.memory` says before it has seen any.

Each line is three steps of TRL on the longest rows in a child of its own; bytes are those above what the child held
before its model was loaded. After the table all peaks of a shape are told to its model, and the errors that are left
are printed: what a search that has tried so many knows.

    make bench-memory
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from autotune.children import Children
from tests.memory_side import SHAPES, Case, Compared, measure

WITHIN = 0.15
CHECKPOINTING = {"gradient_checkpointing": True}
EAGER = {"attn_implementation": "eager", "max_length": 512}

CASES: tuple[Case, ...] = (
    ("wide", {}),
    ("wide", CHECKPOINTING),
    ("wide", {"per_device_train_batch_size": 1}),
    ("wide", {"gradient_accumulation_steps": 2}),
    ("wide", {"bf16": True}),
    ("wide", {"bf16": True, "dtype": "bfloat16"}),
    ("wide", {"use_peft": True}),
    ("wide", {"optim": "adamw_torch"}),
    ("deep", {}),
    ("deep", CHECKPOINTING),
    ("deep", {"per_device_train_batch_size": 8}),
    ("deep", {"max_length": 512}),
    ("deep", EAGER),
    ("deep", {**EAGER, **CHECKPOINTING}),
    ("deep", {"packing": True}),
    ("deep", {"bf16": True}),
    ("deep", {"use_peft": True}),
    ("vocabulary", {"per_device_train_batch_size": 1, "bf16": True}),
    ("vocabulary", {"per_device_train_batch_size": 2}),
    ("vocabulary", CHECKPOINTING),
    ("untied", {}),
    ("untied", CHECKPOINTING),
    ("llama", {}),
    ("llama", CHECKPOINTING),
    ("llama", EAGER),
    ("llama", {**EAGER, **CHECKPOINTING}),
)


def main() -> None:
    """Print candidate, estimate, measured, ratio and the share within 15 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"], help="this shape alone")
    only = parser.parse_args().shape
    compared: list[tuple[str, Compared]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        Children(dict(os.environ), log=Path(name) / "server.log") as children,
    ):
        folder = Path(name)
        print(f"{'':72}{'estimate':>10}{'measured':>10}{'ratio':>8}")
        for shape, options in CASES:
            if only not in (None, shape):
                continue
            one = measure(shape, options, folder, children)
            ratio = one.estimate_bytes / one.measured_bytes
            what = f"{shape} {', '.join(f'{key} {value}' for key, value in options.items())}"
            told = f"{one.estimate_bytes / 1e9:>7.2f} GB{one.measured_bytes / 1e9:>7.2f} GB{ratio:>8.2f}"
            print(f"{what:72}{told}" + ("" if one.outcome == "ok" else f"  {one.outcome}"), flush=True)
            if one.outcome == "ok":
                compared.append((shape, one))
    _summary("before any trial", [one.estimate_bytes / one.measured_bytes for _, one in compared])
    _summary(
        "each after the others of its shape were told", [_refitted(place, compared) for place in range(len(compared))]
    )


def _refitted(place: int, compared: list[tuple[str, Compared]]) -> float:
    """The ratio for one case, from the formula and the peaks of the other cases of its shape alone."""
    shape, one = compared[place]
    for other_place, (other_shape, other) in enumerate(compared):
        if other_shape == shape and other_place != place:
            one.model.tell_terms(other.model.terms(other.candidate), other.peak_bytes)
    floor = one.peak_bytes - one.measured_bytes
    return (one.model.estimate(one.candidate).total_bytes - floor) / one.measured_bytes


def _summary(when: str, ratios: list[float]) -> None:
    if ratios:
        inside = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        print(f"{when}: {inside} of {len(ratios)} within 15 %, ratios {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
