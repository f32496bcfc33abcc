"""A profile's and a streaming experiment's pictures as PNGs."""

import math
from collections.abc import Sequence
from typing import Any

from quantsink.eval.lab.plots import COLORS, INK, Curve, canvas, curve_plot, png, scatter
from quantsink.eval.lab.profile import FIRST, NEWEST
from quantsink.eval.lab.profile_results import (
    DEEP,
    DORMANT,
    FULL,
    LEARNED,
    SINK,
    Contrast,
    HeadContrast,
    PositionShares,
    Profile,
    Waking,
)
from quantsink.eval.lab.streaming import Streaming

PARTS = {
    "first": (f"first {FIRST} tokens", COLORS[2], "white"),
    "newest": (f"newest {NEWEST}", COLORS[1], "white"),
    "middle": ("middle", "#b8b8b8", INK),
    "learned": ("learned sink", COLORS[3], "white"),
}
"""Label, color and ink of each share."""


def profile_plots(profile: Profile, stream: Streaming) -> dict[str, bytes]:
    """All pictures of a model, by file name."""
    name = profile.model
    pictures = {
        "shares.png": share_bars(profile.shares, f"{name}: where attention goes, by length"),
        "texts.png": contrast_scatter(profile.contrast, f"{name}: weight on the first token, head by head"),
        "streaming.png": streaming_curves(stream, f"{name}: what a window loses, and what its sinks bring back"),
    }
    for waking in profile.waking:
        if waking.heads:
            title = f"{name}: tokens that wake dormant heads, {waking.text}"
            pictures[f"waking-{waking.text.rpartition(':')[2]}.png"] = waking_bars(waking, title)
    return pictures


def share_bars(shares: Sequence[PositionShares], title: str) -> bytes:
    """The mean shares over all heads and over the deep ones, stacked, a bar per condition."""
    means = [(share, mean) for share in shares for mean in share.means]
    groups = sorted({(m.kind, m.depth) for _, m in means}, key=lambda group: (group[0] != FULL, group[1] == DEEP))
    parts = [part for part in PARTS if part != "learned" or any(mean.learned > LEARNED for _, mean in means)]
    height = 1.6 + 0.42 * len(shares) * math.ceil(len(groups) / 2)
    figure, panels = canvas(11, height, len(groups), 2)
    for axes, group in zip(panels, groups, strict=True):
        rows = {f"{s.length:,}, {'BOS' if s.bos else 'no BOS'}": m for s, m in means if (m.kind, m.depth) == group}
        left = [0.0] * len(rows)
        for part in parts:
            label, color, ink = PARTS[part]
            widths = [getattr(mean, part) for mean in rows.values()]
            bars = axes.barh(list(rows), widths, left=left, color=color, height=0.72, label=label)
            texts = [f"{width:.0%}" if width >= 0.06 else "" for width in widths]
            axes.bar_label(bars, texts, label_type="center", fontsize=9, color=ink)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        heads = next(iter(rows.values())).heads
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(f"{group[0]} attention, {group[1]} ({heads} heads)", fontsize=10)
    return png(figure, title, legend=len(parts))


def contrast_scatter(contrast: Contrast, title: str, named: int = 8) -> bytes:
    """Every head's BOS mass on one text against that on the other; the strongest differences are named."""
    figure, (axes,) = canvas(7.6, 7.2)
    axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1, zorder=1)
    for deep, color, face in ((False, COLORS[1], "white"), (True, COLORS[2], COLORS[2])):
        points = [(head.one, head.other) for head in contrast.heads if head.head.deep is deep]
        label = f"{'deep' if deep else 'lower'} layers"
        scatter(axes, points, face, edgecolors=color, linewidths=1, label=label)
    line = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
    for below, x, side in ((True, 1.06, "left"), (False, -0.06, "right")):
        strongest = [head for head in contrast.strongest(named) if (head.difference > 0) is below]
        for head, y in spread_apart(strongest):
            place: dict[str, Any] = {"xytext": (x, y), "ha": side, "va": "center", "annotation_clip": False}
            name = f"{head.head.layer}.{head.head.head}"
            axes.annotate(name, xy=(head.one, head.other), fontsize=9, color=INK, arrowprops=line, **place)
    axes.set_xlim(-0.15, 1.15)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_aspect("equal")
    axes.set_xlabel(f"mean BOS mass on {contrast.texts[0]} ({contrast.rows[0]:,} rows)")
    axes.set_ylabel(f"mean BOS mass on {contrast.texts[1]} ({contrast.rows[1]:,} rows)")
    return png(figure, title, legend=2)


def spread_apart(heads: Sequence[HeadContrast], gap: float = 0.045) -> list[tuple[HeadContrast, float]]:
    """Heads by height, each with a height for its name, at least `gap` apart."""
    ordered = sorted(heads, key=lambda head: head.other)
    places: list[float] = []
    for head in ordered:
        places.append(max(head.other, places[-1] + gap) if places else head.other)
    over = max(0.0, places[-1] - 1.0) if places else 0.0
    return [(head, place - over) for head, place in zip(ordered, places, strict=True)]


def waking_bars(waking: Waking, title: str) -> bytes:
    """The weight that dormant heads move off the sink at the tokens that wake them most.

    A bar is the mean over occurrences, its mark the least; the dashed line is the head's mean over all rows.
    """
    count = len(waking.heads)
    figure, panels = canvas(11, 1.6 + 2.7 * math.ceil(count / 2), max(count, 1), 2)
    for axes, head in zip(panels, waking.heads, strict=False):
        places, least = range(len(head.tokens)), [token.least for token in head.tokens]
        axes.barh(places, [token.mean for token in head.tokens], color=COLORS[2], height=0.7)
        axes.scatter(least, places, marker="|", s=90, color="white", zorder=3)
        axes.scatter(least, places, marker="|", s=50, color=COLORS[1], zorder=4)
        axes.axvline(head.moved, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(places, [f"{token_label(t.token)}  x {t.count}" for t in head.tokens], fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        name, rows = f"head {head.head.layer}.{head.head.head}", f"{head.awake_rows:,} of {head.rows:,} rows"
        axes.set_title(f"{name}: mean {head.moved:.2f}, awake in {rows}", fontsize=10)
        axes.set_xlabel("weight moved off the sink (bar: mean, mark: least, dashed: over all rows)", fontsize=9)
    if not waking.heads:
        words = f"none of {waking.dormant} dormant heads is ever awake (BOS mass < {SINK})"
        panels[0].axis("off")
        panels[0].text(
            0.5, 0.5, words if waking.dormant else f"no head is dormant (mean BOS mass >= {DORMANT})", ha="center"
        )
    return png(figure, title)


def token_label(token: str) -> str:
    """Visible white space; what a font may lack or matplotlib would read as mathematics as code."""
    text = repr(token)[1:-1]
    text = "".join(c if c.isascii() or (c.isalpha() and ord(c) < 0x250) else f"\\u{ord(c):04x}" for c in text)
    return f"'{text}'".replace("$", r"\$")


def streaming_curves(stream: Streaming, title: str) -> bytes:
    """Perplexity by position, a line per variant."""
    buckets = stream.curves[0].buckets
    middle = [(bucket.start + bucket.end) / 2 for bucket in buckets]
    curves = [Curve(one.variant.name, middle, [[bucket.ppl for bucket in one.buckets]]) for one in stream.curves]
    xlabel = f"position; a point per {buckets[0].end} positions, {stream.scored:,} scored"
    note, ylabel = f"{stream.budget} keys: from here on some are lost", "perplexity (log; lower is better)"
    return curve_plot(title, xlabel, ylabel, curves, mark=stream.budget, note=note)
