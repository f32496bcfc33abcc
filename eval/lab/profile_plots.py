"""A profile's and a streaming experiment's pictures as PNGs."""

import math
from collections.abc import Sequence
from typing import Any

from quantsink.eval.lab.profile import FIRST, NEWEST
from quantsink.eval.lab.profile_results import DEEP, DORMANT, SINK, Contrast, PositionShares, Profile, Waking
from quantsink.eval.lab.streaming import Streaming
from quantsink.eval.lab.tables import canvas, png

COLORS = ("#1f6f8b", "#c8553d", "#b8b8b8", "#7a5c99")
LINES = ("#222222", "#c8553d", "#1f6f8b", "#7a5c99", "#d9a13b")
STYLES = ("-", "--", "-", "-.", ":")
INK = "#222222"


def profile_plots(profile: Profile, stream: Streaming) -> dict[str, bytes]:
    """All pictures of a model, by file name."""
    name = profile.model
    found = {
        "shares.png": share_bars(profile.shares, f"{name}: where attention goes, by length"),
        "texts.png": contrast_scatter(profile.contrast, f"{name}: weight on the first token, head by head"),
        "streaming.png": streaming_curves(stream, f"{name}: what a window loses, and what its sinks bring back"),
    }
    for waking in profile.waking:
        if waking.heads:
            title = f"{name}: tokens that wake dormant heads, {waking.text}"
            found[f"waking-{waking.text.rpartition(':')[2]}.png"] = waking_bars(waking, title)
    return found


def share_bars(shares: Sequence[PositionShares], title: str) -> bytes:
    """PNG of the mean shares over all heads and over the deep ones, stacked, a bar a condition."""
    panels = sorted({(m.kind, m.depth) for s in shares for m in s.means}, key=lambda p: (p[0] != "full", p[1] == DEEP))
    figure, all_axes = _figure((11, 1.6 + 0.42 * len(shares) * math.ceil(len(panels) / 2)), len(panels), 2)
    names = [f"{share.length:,}, {'BOS' if share.bos else 'no BOS'}" for share in shares]
    labels = (f"first {FIRST} tokens", f"newest {NEWEST}", "middle", "learned sink")
    for axes, (kind, depth) in zip(all_axes, panels, strict=False):
        means = [next(m for m in share.means if (m.kind, m.depth) == (kind, depth)) for share in shares]
        left = [0.0] * len(means)
        for part, color in zip(("first", "newest", "middle", "learned"), COLORS, strict=True):
            widths = [getattr(mean, part) for mean in means]
            axes.barh(names, widths, left=left, color=color, height=0.72)
            for row, (start, width) in enumerate(zip(left, widths, strict=True)):
                if width >= 0.06:
                    ink = INK if part == "middle" else "white"
                    axes.text(start + width / 2, row, f"{width:.0%}", ha="center", va="center", fontsize=9, color=ink)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(f"{kind} attention, {depth} ({means[0].heads} heads)", fontsize=10)
        _plain(axes)
    figure.suptitle(title, fontsize=11)
    learned = any(m.learned > 1e-3 for s in shares for m in s.means)
    _legend(figure, labels[: 4 if learned else 3])
    return png(figure)


def contrast_scatter(found: Contrast, title: str, named: int = 8) -> bytes:
    """PNG of every head's BOS mass on one text against that on the other; the strongest differences are named."""
    figure, (axes,) = _figure((7.6, 7.2), 1, 1)
    axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1, zorder=1)
    for deep, color, face in ((False, COLORS[1], "white"), (True, COLORS[0], COLORS[0])):
        own = [h for h in found.heads if h.head.deep is deep]
        axes.scatter(
            [h.one for h in own], [h.other for h in own], s=22, edgecolors=color, facecolors=face, linewidths=1,
            label=f"{'deep' if deep else 'lower'} layers", zorder=2,
        )  # fmt: skip
    for below in (True, False):
        own = [h for h in found.strongest(named) if (h.difference > 0) is below]
        for head, y in zip(*_apart(own), strict=True):
            axes.annotate(
                f"{head.head.layer}.{head.head.head}",
                xy=(head.one, head.other), xytext=(1.06, y) if below else (-0.06, y), fontsize=9, va="center",
                ha="left" if below else "right", color=INK, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4},
            )  # fmt: skip
    axes.set_xlim(-0.15, 1.15)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_aspect("equal")
    axes.set_xlabel(f"mean BOS mass on {found.texts[0]} ({found.rows[0]:,} rows)")
    axes.set_ylabel(f"mean BOS mass on {found.texts[1]} ({found.rows[1]:,} rows)")
    _plain(axes)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return png(figure)


def waking_bars(found: Waking, title: str) -> bytes:
    """PNG of the weight that dormant heads move off the sink at the tokens that wake them most.

    A bar is the mean over occurrences, its mark the least; the dashed line is the head's mean over all rows.
    """
    figure, all_axes = _figure((11, 1.6 + 2.7 * math.ceil(len(found.heads) / 2)), max(len(found.heads), 1), 2)
    for axes, head in zip(all_axes, found.heads, strict=False):
        names = [f"{_shown(token.token)}  x {token.count}" for token in head.tokens]
        places = range(len(names))
        axes.barh(places, [token.mean for token in head.tokens], color=COLORS[0], height=0.7)
        axes.scatter([token.least for token in head.tokens], places, marker="|", s=90, color="white", zorder=3)
        axes.scatter([token.least for token in head.tokens], places, marker="|", s=50, color=COLORS[1], zorder=4)
        axes.axvline(head.moved, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(list(places), names, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_title(
            f"head {head.head.layer}.{head.head.head}: mean {head.moved:.2f}, awake in {head.awake_rows:,} of "
            f"{head.rows:,} rows", fontsize=10,
        )  # fmt: skip
        axes.set_xlabel("weight moved off the sink (bar: mean, mark: least, dashed: over all rows)", fontsize=9)
        _plain(axes)
    if not found.heads:
        axes = all_axes[0]
        axes.axis("off")
        words = f"none of {found.dormant} dormant heads is ever awake (BOS mass < {SINK})"
        axes.text(0.5, 0.5, words if found.dormant else f"no head is dormant (mean BOS mass >= {DORMANT})", ha="center")
    figure.suptitle(title, fontsize=11)
    return png(figure)


def streaming_curves(found: Streaming, title: str) -> bytes:
    """PNG of perplexity by position, on a logarithmic axis, a line a variant."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    figure, (axes,) = _figure((11, 6.2), 1, 1)
    for curve, color, style in zip(found.curves, LINES, STYLES, strict=False):
        axes.plot(
            [(bucket.start + bucket.end) / 2 for bucket in curve.buckets],
            [bucket.ppl for bucket in curve.buckets],
            color=color, linestyle=style, marker="o", markersize=4, linewidth=1.5, label=curve.variant.name,
        )  # fmt: skip
    axes.axvline(found.budget, color="#888888", linewidth=1, linestyle="--")
    axes.annotate(
        f"{found.budget} keys: from here on some are lost", xy=(found.budget, 1), xycoords=("data", "axes fraction"),
        xytext=(6, -4), textcoords="offset points", fontsize=9, va="top", color=INK,
    )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(y=0.14)
    axes.set_xlim(0, found.tokens)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel(f"position; a point for each {found.curves[0].buckets[0].end} positions, {found.scored:,} scored")
    axes.set_ylabel("perplexity (log; lower is better)")
    axes.grid(True, which="major", axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    _plain(axes)
    figure.suptitle(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return png(figure)


def _figure(size: tuple[float, float], panels: int, columns: int) -> tuple[Any, list[Any]]:
    figure = canvas(*size)
    columns = min(columns, panels)
    axes = list(figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten())
    for surplus in axes[panels:]:
        surplus.axis("off")
    return figure, axes[:panels]


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, labels: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in zip(labels, COLORS, strict=False)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _apart(heads: list[Any], gap: float = 0.045) -> tuple[list[Any], list[float]]:
    """Heads by height, and heights at least `gap` apart for their names."""
    ordered = sorted(heads, key=lambda h: h.other)
    places: list[float] = []
    for head in ordered:
        places.append(max(head.other, places[-1] + gap) if places else head.other)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    return ordered, [place - over for place in places]


def _shown(token: str) -> str:
    """A token as a label: visible white space; what a font may lack or matplotlib would read as mathematics as code."""
    text = repr(token)[1:-1]
    text = "".join(c if c.isascii() or (c.isalpha() and ord(c) < 0x250) else f"\\u{ord(c):04x}" for c in text)
    return f"'{text}'".replace("$", r"\$")
