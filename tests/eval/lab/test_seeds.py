"""Results of several seeds: means, spreads, and how a format string reads them."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from quantsink.eval.lab.seeds import Group, NoFigureError, Spread, average, difference, grouped, number, plural


def group(*values: float | None) -> Group[SimpleNamespace]:
    return Group("softmax", tuple(SimpleNamespace(x=value, heads=[value, value]) for value in values))


def test_a_spread_is_mean_and_standard_deviation_of_a_sample() -> None:
    spread = Spread.of([1, 2, 6])
    assert (spread.mean, spread.low, spread.high) == (3, 1, 6)
    assert spread.sd == pytest.approx(math.sqrt(7))
    assert Spread.of([5]).sd is None


@pytest.mark.parametrize(
    ("spec", "one", "two"),
    [("", "0.25", "0.25 ± 0.0707"), (".2f", "0.25", "0.25 ± 0.07"), (".1%", "25.0%", "25.0 ± 7.1%")],
)
def test_a_spread_is_written_with_its_deviation_if_it_has_one(spec: str, one: str, two: str) -> None:
    assert format(Spread.of([0.25]), spec) == one
    assert format(Spread.of([0.2, 0.3]), spec) == two


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.5, "1.23e+03"),
        (0.012345, "0.0123"),
        (0.00012345, "1.23e-04"),
        (0, "0"),
        (math.inf, "inf"),
        (math.nan, "n/a"),
    ],
)
def test_numbers_of_any_size_have_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{group}", "softmax"),
        ("{x:.1f}", "2.0 ± 1.4"),
        ("{heads[1]:.1f}", "2.0 ± 1.4"),
        ("{x:mean .2f}", "2.00"),
        ("{x:percent .0f}", "200"),
        ("{x:low .0f} to {x:high .0f}", "1 to 3"),
        ("{x:sum .0f} of {x:number}", "4 of 2"),
        ("{heads:sizes}", "4"),
        ("{x:list}", "1, 3"),
        ("{x:all}", "yes"),
        ("{x:changes}", "+100.0, +300.0%"),
        ("{x:change}", "+200.0%"),
        ("{row[0].x:first}", "1"),
    ],
)
def test_a_format_string_reads_the_figure_of_every_run(template: str, text: str) -> None:
    runs = group(1, 3) if "row" not in template else Group("", ((SimpleNamespace(x=1),),))
    assert template.format_map(runs) == text


def test_runs_without_the_figure_are_left_out_and_a_group_without_it_says_so() -> None:
    assert "{x:.1f}".format_map(group(1, None)) == "1.0"
    with pytest.raises(NoFigureError, match=r"^refused$"):
        "{x.error:.1f else refused} of all".format_map(group(None, None))


def test_figures_are_found_by_the_same_paths() -> None:
    assert group(1, None, 3).figures("heads[1]") == [1, 3]


def test_runs_are_grouped_in_the_order_in_which_they_come() -> None:
    groups = grouped(["b1", "a1", "b2"], lambda run: run[0])
    assert [(g.name, g.runs) for g in groups] == [("b", ("b1", "b2")), ("a", ("a1",))]


@dataclass
class Inner:
    x: float


@dataclass
class Outer:
    y: float
    inner: Inner


def test_an_average_goes_through_nested_results() -> None:
    assert average([Outer(1, Inner(2)), Outer(3, Inner(6))]) == Outer(2, Inner(4))


def test_a_difference_is_claimed_only_if_its_interval_excludes_zero() -> None:
    assert difference([(0.0, 1.0), (0.0, 1.1), (0.0, 0.9)]) == ("+1.0000 ± 0.2483", "higher")
    assert difference([(1.0, 0.0), (1.1, 0.0), (0.9, 0.0)])[1] == "lower"
    assert difference([(0.0, 1.0), (0.0, -1.0), (0.0, 0.5)])[1] == "no difference shown"
    assert difference([(0.0, 0.0), (0.0, 0.0)])[1] == "no difference shown"
    assert difference([(0.0, 1.0)])[1] == "one seed says nothing"


def test_one_of_something_has_no_plural() -> None:
    assert (plural(1, "seed"), plural(5, "seed")) == ("1 seed", "5 seeds")
