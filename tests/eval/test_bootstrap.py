"""Intervals: deterministic, around the mean, paired, and absent where one window says nothing about spread."""

import random

import numpy as np
import pytest

from quantsink.eval.bootstrap import difference_interval, interval, kl_interval, kl_mean, perplexity, ratio_interval
from quantsink.eval.divergence import WindowSums


def windows(count: int, seed: int, offset: float = 0.0) -> list[WindowSums]:
    draw = random.Random(seed)
    return [WindowSums(300 + draw.gauss(0, 20), 1 + offset + draw.gauss(0, 0.2), 90, 100) for _ in range(count)]


def test_intervals_are_deterministic_and_hold_the_mean() -> None:
    sums, reference = windows(30, 1), windows(30, 2)
    low, high = kl_interval(sums) or (0, 0)
    assert low < kl_mean(sums) < high
    assert kl_interval(sums) == (low, high)
    assert kl_interval(sums, seed=1) != (low, high)
    low, high = ratio_interval(sums, reference) or (0, 0)
    assert low < perplexity(sums) / perplexity(reference) < high


def test_the_width_is_that_of_the_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=(400, 1))
    low, high = interval(np.hstack([values, np.ones((400, 1))]), lambda total: total[:, 0] / total[:, 1]) or (0, 0)
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)


def test_pairing_finds_a_difference_that_is_smaller_than_the_spread() -> None:
    first, second = windows(30, 1), windows(30, 1, offset=0.01)
    low, high = difference_interval(first, second) or (0, 0)
    assert low == pytest.approx(-0.0001)
    assert high == pytest.approx(-0.0001)


def test_one_window_has_no_interval() -> None:
    assert kl_interval(windows(1, 1)) is None
    assert ratio_interval(windows(1, 1), windows(1, 2)) is None


def test_other_windows_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="different windows"):
        difference_interval(windows(2, 1), [WindowSums(1, 1, 1, 99)] * 2)
