"""Paired bootstrap over evaluation windows (Koehn, EMNLP 2004): windows are resampled, the same ones for all rows.

Tokens of one window depend on each other, so whole windows are resampled. A single window gives no interval.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quantsink.eval.divergence import WindowSums

RESAMPLES = 10_000
SEED = 0
LEVEL = 0.95
_CHUNK = 1_000

Interval = tuple[float, float]
Totals = NDArray[np.float64]


def kl_mean(sums: Sequence[WindowSums]) -> float:
    """KL in nats per token, every token weighted alike."""
    return sum(window.kl for window in sums) / sum(window.count for window in sums)


def perplexity(sums: Sequence[WindowSums]) -> float:
    """exp of the mean negative log-likelihood per token; inf where that overflows."""
    mean = sum(window.nll for window in sums) / sum(window.count for window in sums)
    return math.exp(mean) if mean < 700 else math.inf


def kl_interval(sums: Sequence[WindowSums], *, seed: int = SEED) -> Interval | None:
    """95 % interval of `kl_mean`; None with one window."""
    columns = np.array([(window.kl, window.count) for window in sums])
    return interval(columns, lambda total: total[:, 0] / total[:, 1], seed=seed)


def ratio_interval(sums: Sequence[WindowSums], reference: Sequence[WindowSums], *, seed: int = SEED) -> Interval | None:
    """95 % interval of perplexity over the reference's perplexity on the same windows."""
    columns = np.array([(a.nll - b.nll, a.count) for a, b in _pairs(sums, reference)])
    return interval(columns, lambda total: np.exp(np.minimum(total[:, 0] / total[:, 1], 700.0)), seed=seed)


def difference_interval(
    first: Sequence[WindowSums], second: Sequence[WindowSums], *, seed: int = SEED
) -> Interval | None:
    """95 % interval of KL(first) - KL(second) on the same windows."""
    columns = np.array([(a.kl - b.kl, a.count) for a, b in _pairs(first, second)])
    return interval(columns, lambda total: total[:, 0] / total[:, 1], seed=seed)


def interval(
    columns: Totals, statistic: Callable[[Totals], Totals], *, seed: int = SEED, resamples: int = RESAMPLES
) -> Interval | None:
    """Percentile interval of a statistic of column sums.

    Args:
        columns: `[W, C]`, what each window adds to C sums.
        statistic: from sums `[R, C]` of R resamples to `[R]` values.
    """
    windows = len(columns)
    if windows < 2:
        return None
    generator = np.random.default_rng(seed)
    share = np.full(windows, 1 / windows)
    values = [
        statistic(generator.multinomial(windows, share, size=min(_CHUNK, resamples - first)) @ columns)
        for first in range(0, resamples, _CHUNK)
    ]
    low, high = np.quantile(np.concatenate(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _pairs(first: Sequence[WindowSums], second: Sequence[WindowSums]) -> list[tuple[WindowSums, WindowSums]]:
    pairs = list(zip(first, second, strict=True))
    if any(a.count != b.count for a, b in pairs):
        raise ValueError("paired bootstrap: the two sides have different windows; score both on the same text")
    return pairs
