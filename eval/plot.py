"""A report's pictures as PNGs: KL against bits, and perplexity along a rolling cache.

The labels of each cluster of points stand in a column beside it, so that none overlap.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantsink.eval.methods import WHOLE_MODEL
from quantsink.eval.rolling import RollingCurve
from quantsink.eval.rows import Row

FLOOR = 1e-7
"""A smaller KL, which is rounding error, is drawn here: the axis is logarithmic."""
FULL, HOLLOW = "#1f6f8b", "#c8553d"


@dataclass(frozen=True)
class _Axis:
    """The quantity on the x axis, and the groups of rows that are drawn filled."""

    bits: Callable[[Row], float]
    label: str
    full: tuple[str, ...]
    legend: tuple[str, str]


_WEIGHTS = _Axis(
    lambda row: row.bits_weight or 0.0,
    "bits per parameter as stored",
    WHOLE_MODEL,
    ("weights quantized too", "attention changed alone, weights native"),
)
_CACHE = _Axis(
    lambda row: row.bits_kv or 0.0,
    "bits per coded number in the KV cache",
    ("cache",),
    ("quantsink's caches and their controls", "other toolkits' caches"),
)


def kl_vs_bits(rows: Sequence[Row], title: str) -> bytes:
    """PNG of every measured row except the reference, whose KL is 0. Attention-only rows are hollow.

    Bits are those of the stored weights, so attention-only rows have the bits of the reference.
    """
    return _scatter(rows, title, _WEIGHTS)


def kl_vs_kv_bits(rows: Sequence[Row], title: str) -> bytes:
    """The same for rows measured through a KV cache, against the stored bits per coded number. Peers are hollow."""
    return _scatter(rows, title, _CACHE)


def rolling_curves(curves: Sequence[RollingCurve], title: str) -> bytes:
    """PNG of perplexity, on a logarithmic axis, against the tokens that ran through a rolling cache."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve, color, full in zip(curves, (FULL, HOLLOW), (True, False), strict=False):
        axes.plot(
            [point.tokens for point in curve.points],
            [point.ppl if math.isfinite(point.ppl) else math.nan for point in curve.points],
            color=color,
            marker="o" if full else "s",
            markersize=5 if full else 7,
            markerfacecolor=color if full else "white",
            linewidth=1.4,
            zorder=3 if full else 2,
            label=f"{curve.method}: {curve.description}",
        )
    trained = curves[0].trained_length
    if trained is not None and trained <= curves[0].tokens:
        axes.axvline(trained, color="#888888", linewidth=1, linestyle="--")
        left = trained < 0.6 * curves[0].tokens
        axes.annotate(
            f"the model's trained length, {trained:,}",
            xy=(trained, 1),
            xycoords=("data", "axes fraction"),
            xytext=(6 if left else -6, -4),
            textcoords="offset points",
            fontsize=9,
            ha="left" if left else "right",
            va="top",
            color="#222222",
        )
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xlim(0, curves[0].tokens * 1.02)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(f"tokens so far, one point per {curves[0].points[0].tokens:,}")
    axes.set_ylabel("perplexity of the tokens since the last point (log; lower is better)")
    axes.grid(True, which="major", axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quantsink"})
    return buffer.getvalue()


def _scatter(rows: Sequence[Row], title: str, axis: _Axis) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.ok and row.group != "reference" and row.kl is not None]
    figure = Figure(figsize=(11, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    clusters = _clusters(drawn, axis)
    all_axes = figure.subplots(1, max(len(clusters), 1), sharey=True, squeeze=False)[0]
    low, high = _range(drawn)
    for axes, cluster in zip(all_axes, clusters, strict=False):
        _draw(axes, cluster, low, high, axis)
        axes.set_xlabel(axis.label)
    all_axes[0].set_ylabel("KL to the reference, nats per token (log; lower is better)")
    figure.suptitle(title, fontsize=11)
    handles = [_handle(FULL, True, axis.legend[0]), _handle(HOLLOW, False, axis.legend[1])]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return _png(figure)


def _clusters(rows: Sequence[Row], axis: _Axis) -> list[list[Row]]:
    """Rows share a panel if their bits lie within 1.5 of a neighbour's."""
    clusters: list[list[Row]] = []
    for row in sorted(rows, key=axis.bits):
        if clusters and axis.bits(row) - axis.bits(clusters[-1][-1]) < 1.5:
            clusters[-1].append(row)
        else:
            clusters.append([row])
    return clusters


def _draw(axes: Any, rows: list[Row], low: float, high: float, axis: _Axis) -> None:
    left, right = axis.bits(rows[0]), axis.bits(rows[-1])
    pad = max((right - left) * 0.15, 0.05)
    width = right - left + 2 * pad
    label_x = right + pad
    axes.set_xlim(left - pad, label_x + 1.4 * width)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ordered = sorted(rows, key=_kl)
    for row, y in zip(ordered, _spread([math.log10(_kl(row)) for row in ordered], low, high), strict=True):
        full = row.group in axis.full
        color = FULL if full else HOLLOW
        bars = [[_kl(row) - max(row.kl_low or 0, FLOOR)], [(row.kl_high or 0) - _kl(row)]]
        axes.errorbar(
            axis.bits(row),
            _kl(row),
            yerr=None if row.kl_low is None else [[max(bar[0], 0)] for bar in bars],
            fmt="o" if full else "s",
            color=color,
            markerfacecolor=color if full else "white",
            markersize=6,
            capsize=3,
            elinewidth=1.2,
        )
        axes.annotate(
            row.method,
            xy=(axis.bits(row), _kl(row)),
            xytext=(label_x + 0.06 * width, 10**y),
            fontsize=9,
            va="center",
            color="#222222",
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5},
        )
    axes.grid(True, which="major", axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    ticks = _ticks([axis.bits(row) for row in rows], width / 8)
    axes.set_xticks(ticks, [f"{tick:.2f}" for tick in ticks], fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _ticks(values: list[float], apart: float) -> list[float]:
    """The values in ascending order, without those too close to the one before."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value - kept[-1] >= apart:
            kept.append(value)
    return kept


def _spread(heights: list[float], low: float, high: float) -> list[float]:
    """The `heights` (log10, ascending) moved as little as possible so that labels are at least one line apart.

    Least squares: with y_i - i * gap in place of y_i it is isotonic regression, solved by pooling adjacent violators.
    """
    bottom, top = math.log10(low), math.log10(high)
    gap = (top - bottom) / 24
    pools: list[list[float]] = []
    for i, y in enumerate(heights):
        pools.append([y - i * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    flat = [_mean(pool) for pool in pools for _ in pool]
    first, last_place = bottom + gap / 2, top - gap / 2 - (len(heights) - 1) * gap
    return [min(max(y, first), last_place) + i * gap for i, y in enumerate(flat)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _range(rows: Sequence[Row]) -> tuple[float, float]:
    values = [max(v, FLOOR) for row in rows for v in (_kl(row), row.kl_low, row.kl_high) if v is not None]
    return min(values, default=1e-4) / 1.8, max(values, default=1.0) * 1.8


def _handle(color: str, full: bool, label: str) -> Any:
    from matplotlib.lines import Line2D

    face, marker = (color, "o") if full else ("white", "s")
    return Line2D([], [], color=color, marker=marker, markerfacecolor=face, linestyle="", label=label)


def _kl(row: Row) -> float:
    return max(row.kl or 0.0, FLOOR)
