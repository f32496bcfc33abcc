"""Pictures: what is drawn where."""

from typing import Any

import pytest

from quantsink.eval.lab import plots
from quantsink.eval.lab.measures import METHODS
from quantsink.eval.lab.plots import Curve, Dots, canvas, curve_plot, dot_plot, method_dots, png
from quantsink.eval.lab.seeds import Group

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures as they are when their pictures are made."""
    drawn: list[Any] = []

    def keep(figure: Any, *arguments: Any, **options: Any) -> bytes:
        drawn.append(figure)
        return png(figure, *arguments, **options)

    monkeypatch.setattr(plots, "png", keep)
    return drawn


def labels(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_panels_fill_rows_and_surplus_places_stay_empty() -> None:
    figure, panels = canvas(4, 4, panels=3, columns=2)
    assert len(panels) == 3
    assert [axes.axison for axes in figure.axes] == [True, True, True, False]


def test_a_dot_plot_has_its_first_row_at_the_top_and_each_label_once(figures: list[Any]) -> None:
    groups = [Group("`a`", (1,)), Group("b", (2,))]
    series = [Dots("on BOS", [[0.1, 0.2], [0.9]], "red", above=0.1), Dots("on BOS", [[], [0.5]], "red", "s")]
    assert dot_plot("title", "x", groups, series, lines=(0.3,)).startswith(PNG)
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    points = [line.get_xydata().tolist() for line in axes.lines[:-1]]
    assert points == [[[0.9, 0.1]], [[0.1, 1.1], [0.2, 1.1]], [[0.5, 0.0]]]
    assert axes.lines[-1].get_xdata() == [0.3, 0.3]
    assert labels(figures[0]) == ["on BOS"]


def test_each_method_has_a_series_of_its_own() -> None:
    class Run:
        errors = {method: float(index) for index, method in enumerate(METHODS)}  # noqa: RUF012

    series = method_dots([Group("a", (Run(), Run()))], "errors")
    assert [(dots.label, dots.values) for dots in series] == [(m, [[i, i]]) for i, m in enumerate(METHODS)]
    assert len({dots.above for dots in series}) == len(METHODS)


def test_a_curve_is_the_mean_of_its_seeds(figures: list[Any]) -> None:
    curves = [Curve("softmax", [1.0, 3.0], [[2.0, 8.0], [4.0, 8.0]])]
    assert curve_plot("title", "x", "y", curves, mark=2.0, note="here").startswith(PNG)
    (axes,) = figures[0].axes
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 3.0], [3.0, 8.0]]
    assert axes.lines[1].get_xdata() == [2.0, 2.0]
    assert axes.get_yscale() == "log"
    assert labels(figures[0]) == ["softmax"]
