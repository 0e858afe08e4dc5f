"""What a fit to some dozens of trials needs of linear algebra, without loading numpy (0.1 s) into the engine.

Matrices are symmetric and positive definite, given as their lower half: row i has i + 1 entries.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

Lower = list[list[float]]


def cholesky(matrix: Sequence[Sequence[float]]) -> Lower:
    """The lower L with L L' the matrix (Golub and Van Loan, Matrix Computations, 4.2). Raises ValueError for a matrix
    that is not positive definite."""
    factor: Lower = []
    for row, entries in enumerate(matrix):
        made: list[float] = []
        for column in range(row):
            other = factor[column]
            made.append((entries[column] - dot(made, other)) / other[column])
        made.append(math.sqrt(entries[row] - dot(made, made)))
        factor.append(made)
    return factor


def solve_lower(factor: Lower, right: Sequence[float]) -> list[float]:
    """The x with L x = right."""
    found: list[float] = []
    for entries, value in zip(factor, right, strict=True):
        found.append((value - dot(found, entries)) / entries[-1])
    return found


def solve(factor: Lower, right: Sequence[float]) -> list[float]:
    """The x with L L' x = right."""
    found = solve_lower(factor, right)
    for row in reversed(range(len(factor))):
        found[row] /= factor[row][row]
        for column in range(row):
            found[column] -= factor[row][column] * found[row]
    return found


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The sum of products, as far as the shorter one goes."""
    total: float = sum(map(operator.mul, one, other))
    return total
