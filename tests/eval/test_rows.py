"""A report's values to JSON and back, and rows that may be compared."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from quantsink.errors import UsageError
from quantsink.eval.divergence import WindowSums
from quantsink.eval.rows import COMPARED, Footprint, Row, compare_conditions, from_plain, to_plain


@dataclass(frozen=True)
class Point:
    name: str
    value: float
    count: int | None
    sums: tuple[WindowSums, ...] = ()


POINT = Point("a", math.inf, None, (WindowSums(1.5, 0.25, 3, 4),))


def test_values_survive_json() -> None:
    plain = to_plain(POINT)
    assert plain == {
        "name": "a",
        "value": "inf",
        "count": None,
        "sums": [{"nll": 1.5, "kl": 0.25, "top1": 3, "count": 4}],
    }
    assert from_plain(Point, plain, "point") == POINT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "low"}, "point.value: expected a number, found 'low'"),
        ({"value": math.nan}, "point.value: expected a number"),
        ({"count": True}, "point.count: expected int"),
        ({"name": 3}, "point.name: expected str"),
        ({"sums": {}}, "point.sums: expected a list"),
        ({"sums": [3]}, r"point.sums\[0\]: expected an object"),
        ({"more": 1}, "point: unknown key 'more'"),
    ],
)
def test_other_values_are_refused_by_their_place(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_plain(Point, to_plain(POINT) | change, "point")


def test_a_row_has_the_figures_of_its_sums() -> None:
    reference = (WindowSums(10.0, 0.0, 10, 10), WindowSums(30.0, 0.0, 10, 10))
    sums = (WindowSums(12.0, 1.0, 9, 10), WindowSums(32.0, 1.0, 6, 10))
    row = Row.of("m", "", "preset", Footprint(8.0, 32.0, 8.0, 100, 1, 0), sums, reference)
    assert row.ok
    assert row.kl == pytest.approx(0.1)
    assert row.ppl == pytest.approx(math.exp(44 / 20))
    assert row.ppl_ratio == pytest.approx(math.exp(4 / 20))
    assert row.top1 == pytest.approx(0.75)
    assert (row.kl_low, row.kl_high) == (pytest.approx(0.1), pytest.approx(0.1)), "both windows agree"
    alone = Row.of("m", "", "preset", Footprint(8.0, 32.0, 8.0, 100, 1, 0), sums[:1], reference[:1])
    assert (alone.kl_low, alone.ppl_ratio_high) == (None, None)


@pytest.mark.parametrize("name", COMPARED)
def test_a_condition_that_differs_is_named(name: str, report) -> None:
    changed = dataclasses.replace(report.conditions, **{name: "other"})
    compare_conditions(report.conditions, report.conditions)
    with pytest.raises(UsageError, match=f"not comparable: {name} is .* in one and other in the other"):
        compare_conditions(report.conditions, changed)
