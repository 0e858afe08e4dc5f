"""Estimates of what an axis does to the time of a step, good for the order in which candidates are tried.

None of these is a measurement. Recomputing is arithmetic: a checkpointed layer runs its forward pass twice, which is a
third of forward and backward (Chen et al. 2016); the rest are orders of magnitude for a data-centre GPU. What only
helps where memory is short is put behind what does without.
"""

from __future__ import annotations

from autotune.plan.checkpointing import parse
from autotune.plan.space import Candidate
from autotune.probe.machine import Machine

RECOMPUTED = 1 / 3  # of forward and backward, where every layer is checkpointed
# Of recomputing, where the results of attention are kept. Of the demo's model on one core (CPU seconds of a step, off /
# full / selective): 0.28 / 0.28 / 0.29 at 8 x 128 tokens, 0.63 / 0.76 / 0.73 at 2 x 1,024, 1.95 / 2.33 / 2.03 at 4,096
WITHOUT_ATTENTION = 0.85
INPUTS_MOVED = 1.1  # each layer's input to the host and back, on the stream that computes
ACTIVATIONS_MOVED = 1.25  # all that is saved, beside the computation
LAYER_KERNELS = 0.95  # fewer passes over memory in norms and activations
COMPILED = 0.9  # the same, by torch.compile
PLAIN_OPTIMIZER = 1.02  # an optimizer step in several passes over memory
HALF_WEIGHTS = 0.9  # no casts of weights, half the traffic between layers
TF32 = 0.5  # float32 products in TF32
COPIED_PLAINLY = 1.01  # batches copied to the GPU without pinned memory
FETCHED_FURTHER = 0.999  # more batches ahead: only where a batch is late


def factor(candidate: Candidate, machine: Machine) -> float:
    """Estimated factor on seconds per token, against float32 weights, all activations kept and no axis switched on."""
    product = _recomputing(candidate.checkpointing)
    if candidate.torch_compile and machine.backend != "cpu":
        product *= COMPILED  # on a CPU nothing was faster for it
    if candidate.layer_kernels:
        product *= LAYER_KERNELS
    if candidate.activation_offloading:
        product *= ACTIVATIONS_MOVED
    if candidate.optimizer == "adamw_torch":
        product *= PLAIN_OPTIMIZER
    if candidate.pin_memory is False:
        product *= COPIED_PLAINLY
    if candidate.prefetch is not None:
        product *= FETCHED_FURTHER
    if candidate.dtype in ("bfloat16", "float16"):
        product *= HALF_WEIGHTS
    if candidate.tf32:
        product *= TF32
    return product


def _recomputing(checkpointing: str) -> float:
    how = parse(checkpointing)
    if how.every == 0:
        return 1.0
    again = RECOMPUTED / how.every * (WITHOUT_ATTENTION if how.selective else 1.0)
    return (1.0 + again) * (INPUTS_MOVED if how.offload else 1.0)
