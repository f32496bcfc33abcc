"""The error budget that every kernel is held to.

Truth is the reference in float64, where integer products are exact. The yardstick is the reference in the working
type: what honest rounding costs. A kernel passes when its error is at most twice the yardstick's. Errors are RMS
ratios, so a result of the wrong size fails as surely as one of the wrong direction.
"""

from collections.abc import Iterator
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
