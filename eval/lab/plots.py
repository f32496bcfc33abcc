"""Pictures as PNGs: dots by variant, lines by position, and what all pictures have in common."""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantsink.eval.lab.measures import METHODS
from quantsink.eval.lab.seeds import Group, Spread

INK, GREY, PALE = "#222222", "#888888", "#e6e6e6"
COLORS = (INK, "#c8553d", "#1f6f8b", "#7a5c99", "#d9a13b", "#6b8f3c")
STYLES = ("-", "--", "-", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def canvas(width: float, height: float, panels: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A matplotlib figure, in inches, and its panels row by row; surplus places stay empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    columns = min(columns, panels)
    axes = list(figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten())
    for surplus in axes[panels:]:
        surplus.axis("off")
    return figure, axes[:panels]


def png(figure: Any, title: str, legend: int = 0, grid: str = "") -> bytes:
    """The figure, finished under its title.

    Args:
        legend: columns of the legend below the panels, each label once; 0: no legend.
        grid: the axis of the grid lines, `x` or `y`; empty: no grid.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if grid:
            axes.grid(True, which="major", axis=grid, color=PALE)
            axes.set_axisbelow(True)
    if legend:
        pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
        handles = {label: handle for pair in pairs for handle, label in pair}
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": legend, "frameon": False, "fontsize": 9}
        figure.legend(handles.values(), handles.keys(), **place)
    figure.suptitle(title, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quantsink"})
    return buffer.getvalue()


@dataclass(frozen=True)
class Dots:
    """One series of a dot plot: the values of each row from the top, drawn `above` the middle of the row."""

    label: str
    values: Sequence[Sequence[float]]
    color: str
    marker: str = "o"
    above: float = 0.0


def method_dots(groups: Sequence[Group[Any]], figure: str) -> list[Dots]:
    """A series for each way to spend 8 bits; `figure`: where a run has its figures by method."""
    colors = ("#b8b8b8", "#8a8a8a", COLORS[1], COLORS[2], COLORS[4])
    return [
        Dots(method, [group.figures(f"{figure}[{method}]") for group in groups], color, marker, above)
        for method, color, marker, above in zip(METHODS, colors, "oooos", (0.28, 0.14, 0, -0.14, -0.28), strict=True)
    ]


def dot_plot(
    title: str,
    xlabel: str,
    groups: Sequence[Group[Any]],
    series: Iterable[Dots],
    *,
    log: bool = False,
    lines: Sequence[float] = (),
) -> bytes:
    """A named row for each variant, a dot for each value, and `lines` across; x goes from 0 to 1 or is logarithmic."""
    figure, (axes,) = canvas(9, 2.8 + 0.25 * len(groups))
    for dots in series:
        for y, values in enumerate(reversed(dots.values)):
            if values:
                places, style = [y + dots.above] * len(values), {"color": dots.color, "alpha": 0.75}
                axes.plot(values, places, dots.marker, markersize=5, label=dots.label, **style)
    axes.set_yticks(range(len(groups)), [group.name.replace("`", "") for group in reversed(groups)])
    for x in lines:
        axes.axvline(x, color=GREY, linewidth=1, linestyle="--")
    if log:
        axes.set_xscale("log")
    else:
        axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel(xlabel)
    return png(figure, title, legend=6, grid="x")


@dataclass(frozen=True)
class Curve:
    """A line through the means of `seeds`, each seed's values at `x`, in a band from the smallest to the largest."""

    label: str
    x: Sequence[float]
    seeds: Sequence[Sequence[float]]


def curve_plot(title: str, xlabel: str, ylabel: str, curves: Iterable[Curve], *, mark: float, note: str) -> bytes:
    """Lines over positions, y logarithmic, and a vertical one at `mark` with its `note`."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, (axes,) = canvas(10, 5.6)
    for curve, color, style in zip(curves, COLORS, STYLES, strict=False):
        spreads = [Spread.of(values) for values in zip(*curve.seeds, strict=True)]
        low, middle, high = ([getattr(spread, name) for spread in spreads] for name in ("low", "mean", "high"))
        axes.fill_between(curve.x, low, high, color=color, alpha=0.10, linewidth=0)
        axes.plot(curve.x, middle, color=color, linestyle=style, marker="o", markersize=3.5, label=curve.label)
    axes.axvline(mark, color=GREY, linewidth=1, linestyle="--")
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (5, -4), "textcoords": "offset points"}
    axes.annotate(note, xy=(mark, 1), fontsize=9, va="top", color=INK, **place)
    axes.set_yscale("log")
    axes.margins(y=0.14)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return png(figure, title, legend=3, grid="y")


def scatter(axes: Any, points: Iterable[tuple[float, float]], color: str, **style: Any) -> None:
    """Dots at the points (x, y), with white edges unless `style` says otherwise."""
    x, y = zip(*points, strict=True)
    axes.scatter(x, y, **{"s": 24, "color": color, "edgecolors": "white", "linewidths": 0.5, "zorder": 3, **style})
