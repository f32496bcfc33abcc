"""Labels of the picture stay apart, close to their points and within the axes."""

import itertools
import math

import pytest

from quantsink.eval.plot import _spread


@pytest.mark.parametrize(
    "heights", [[-3.0], [-3.0] * 12, [-6.9, -3.0, -3.0, -2.9, -0.1], [-0.1, -0.05, 0.0], [-6.9] * 5, []]
)
def test_labels_do_not_overlap(heights: list[float]) -> None:
    placed = _spread(heights, 1e-7, 1.0)
    gap = 7 / 24
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(placed))
    assert all(-7 < y < 0 for y in placed)


def test_labels_with_room_stay_at_their_points() -> None:
    assert _spread([-5.0, -3.0, -1.0], 1e-7, 1.0) == pytest.approx([-5, -3, -1])


def test_a_crowd_is_centred_on_its_points() -> None:
    placed = _spread([-3.0, -3.0, -3.0], 1e-7, 1.0)
    assert math.fsum(placed) / 3 == pytest.approx(-3)
