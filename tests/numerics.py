"""The error budget that every kernel is held to.

Truth is the reference in float64, where integer products are exact. The yardstick is the reference in the working
type: what honest rounding costs. A kernel passes when its error is at most twice the yardstick's. Errors are RMS
ratios, so a result of the wrong size fails as surely as one of the wrong direction.

In float32 the RMS error of INT8 attention is a few codes that fell on the other side of a tie: one case compares 0 or 1
of them on either side. So cases are pooled, and the typical row, which has none, is held to the budget as well.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BUDGET = 2.0
FLOOR = 1e-7
"""Half a unit in float32's last place: the error that a yardstick without any is taken to have."""


def rms_error(actual: Tensor, truth: Tensor) -> float:
    """RMS of `actual - truth` over RMS of `truth`; NaN where either is not finite."""
    actual, truth = actual.double(), truth.double()
    size = truth.pow(2).mean().sqrt()
    error = (actual - truth).pow(2).mean().sqrt()
    return float(error / size) if size > 0 else float(error)


def assert_within_budget(actual: Tensor, yardstick: Tensor, truth: Tensor, budget: float = BUDGET) -> None:
    """error(actual) <= budget x error(yardstick), both against `truth`."""
    assert actual.shape == truth.shape, f"shape {list(actual.shape)}, expected {list(truth.shape)}"
    assert bool(actual.isfinite().all()), "the result is not finite"
    error, allowed = rms_error(actual, truth), budget * max(rms_error(yardstick, truth), FLOOR)
    assert error <= allowed, f"RMS error {error:.3g} exceeds the budget {allowed:.3g} ({budget} x the yardstick's)"


def assert_pool_within_budget(
    cases: Iterable[tuple[Tensor, Tensor, Tensor]], flips: int = 1, budget: float = BUDGET
) -> None:
    """As `assert_within_budget` over all (actual, yardstick, truth) together, and over the median of their rows.

    `flips`: codes that the kernel may have on the other side of a tie where the yardstick has none, each changing one
    row by 1/127. A pool large enough to have many on both sides needs no such grace: 0.
    """
    cases = list(cases)
    for actual, _, truth in cases:
        assert actual.shape == truth.shape, f"shape {list(actual.shape)}, expected {list(truth.shape)}"
        assert bool(actual.isfinite().all()), "the result is not finite"

    def errors(results: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        pooled = math.sqrt(sum(rms_error(x, truth) ** 2 for x, truth in results) / len(results))
        return pooled, float(torch.cat([row_errors(x, truth) for x, truth in results]).median())

    pooled, typical = errors([(actual, truth) for actual, _, truth in cases])
    pooled_yardstick, typical_yardstick = errors([(yardstick, truth) for _, yardstick, truth in cases])
    rows = sum(truth[..., 0].numel() for *_, truth in cases)
    grace = math.sqrt(flips / rows) / 127
    for what, error, allowed in (
        ("pooled RMS", pooled, budget * max(pooled_yardstick, grace, FLOOR)),
        ("median row", typical, budget * max(typical_yardstick, FLOOR)),
    ):
        assert error <= allowed, (
            f"{what} error {error:.3g} exceeds the budget {allowed:.3g} ({budget} x the yardstick's)"
        )


def row_errors(actual: Tensor, truth: Tensor) -> Tensor:
    """The RMS error of each row (last dimension), in order; absolute where the true row is zero."""
    actual, truth = actual.double(), truth.double()
    error, size = (actual - truth).norm(dim=-1), truth.norm(dim=-1)
    return torch.where(size > 0, error / size, error).flatten()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN (integers: their maximum), so a result that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)
