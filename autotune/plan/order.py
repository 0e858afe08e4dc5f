"""The order in which TRL's samplers visit the rows, without torch."""

from __future__ import annotations

import random

# `BatchRebalanceSampler` is built without the job's seed, so it starts from its own default (transformers 5.22)
REBALANCE_SEED = 42


def random_order(rows: int, seed: int) -> list[int]:
    """The order of one pass of a random sampler over `rows` rows: `torch.randperm(rows)` seeded with `seed`.

    accelerate's `SeedableRandomSampler` seeds pass k (from 0) with the job's sampling seed + k, and transformers'
    `BatchRebalanceSampler` with 42 + k. torch draws from the same Mersenne twister as Python's `random`, seeded as in
    MT19937's `init_genrand`, and shuffles forward with a remainder (ATen `randperm_cpu`, torch 2.13; other draws are
    used above 2^32 / 20 rows).
    """
    state = [seed & 0xFFFFFFFF]
    for index in range(1, 624):
        last = state[-1]
        state.append((1812433253 * (last ^ (last >> 30)) + index) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))
    draw = twister.getrandbits
    order = list(range(rows))
    for index in range(rows - 1):
        other = index + draw(32) % (rows - index)
        order[index], order[other] = order[other], order[index]
    return order
