"""The vision experiment's tables and pictures."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from quantsink.eval.lab import measures, vision
from quantsink.eval.lab.measures import SINK_HEAD
from quantsink.eval.lab.plots import COLORS, GREY, INK, canvas, png, scatter
from quantsink.eval.lab.seeds import Group, Spread, difference, grouped, mean
from quantsink.eval.lab.tables import Table, read_tables
from quantsink.eval.lab.vision import (
    BORDER,
    BORDER_HEAD,
    HEADS,
    LAYERS,
    PATCHES,
    PLACES,
    SIDE,
    TOKENS,
    VisionRun,
    place_of,
)

Groups = Sequence[Group[VisionRun]]
LAYER_COLORS = (COLORS[2], COLORS[4], COLORS[1])
MEASURES = {
    "test accuracy": "accuracy",
    "weight on [CLS], mean of heads": "head_mean.patches.cls",
    "weight on [CLS], strongest head": "strongest",
    f"heads >= {SINK_HEAD} on [CLS]": "preferring[cls]",
    "weight on the border": "head_mean.patches.border",
    "weight on blank patches, uniform = 1": "head_mean.blank",
    "entropy": "head_mean.patches.entropy",
    "error in 8 bits, block": "errors[block]",
}
"""What is compared with and without a gate, and where a run has it."""


def variants(runs: Sequence[VisionRun]) -> list[Group[VisionRun]]:
    return grouped(sorted(runs, key=lambda run: run.seed), lambda run: run.name)


def vision_tables(runs: Sequence[VisionRun]) -> list[Table]:
    groups, first, seeds = variants(runs), runs[0], len({run.seed for run in runs})
    uniform = SimpleNamespace(cls=1 / TOKENS, border=BORDER / TOKENS, entropy=1.0)
    layers = split(groups, "layer_means")
    rows: dict[str, Sequence[Any]] = {
        "trained": groups,
        "layers": [Group("uniform attention", (SimpleNamespace(layer=None, patches=uniform, cls=uniform),)), *layers],
        "heads": groups,
        "places": places(groups),
        "blank_patches": layers,
        "gates": split(groups, "gates"),
        "differences": differences(groups),
        "eight_bits": split(groups, "eight_bits"),
        "calibration": groups,
    }
    facts = {
        **vars(measures),
        **vars(vision),
        "conditions": f"{first.pictures} test pictures, {seeds} {'seeds, mean ± SD' if seeds > 1 else 'seed'}",
        "heads": LAYERS * HEADS,
        "attentions": [group.name for group in groups],
        "blank": sum(first.places.blank) / PATCHES,
        "untrained": 1 / (1 + math.exp(-1)),
        "compared": len(MEASURES),
    }
    return read_tables("vision", {name: each for name, each in rows.items() if each}, facts)


def split(groups: Groups, part: str) -> list[Group[Any]]:
    """A row for each item of what a run has several of, e.g. layers."""
    each = ((group.name, zip(*group.figures(part), strict=True)) for group in groups)
    return [Group(name, items) for name, parts in each for items in parts]


def places(groups: Groups) -> list[SimpleNamespace]:
    """Weight of tokens as multiples of what uniform attention gives them."""
    facts = groups[0].runs[0].places
    on_cls = {group.name: times(group.figures("head_mean.patches.cls")) for group in groups}
    rows = [SimpleNamespace(name="[CLS]", count=1, blank=None, intensity=None, times=on_cls)]
    for name in PLACES:
        patches = [patch for patch in range(PATCHES) if place_of(patch) == name]
        blank, intensity = (mean(fact[patch] for patch in patches) for fact in (facts.blank, facts.intensity))
        weights = {
            group.name: times(mean(layer[p] for layer in run.received for p in patches) for run in group.runs)
            for group in groups
        }
        rows.append(SimpleNamespace(name=name, count=len(patches), blank=blank, intensity=intensity, times=weights))
    return rows


def times(weights: Any) -> Spread:
    return Spread.of(TOKENS * weight for weight in weights)


def differences(groups: Groups) -> list[Group[SimpleNamespace]]:
    """Empty if one of the two is missing."""
    named = [group for group in groups if group.name in (vision.NONE.name, vision.GATE.name)]
    rows = []
    for measure, path in MEASURES.items() if len(named) == 2 else ():
        pairs = list(zip(*(group.figures(path) for group in named), strict=True))
        interval, verdict = difference(pairs)
        figures = (SimpleNamespace(without=a, gated=b, difference=interval, verdict=verdict) for a, b in pairs)
        rows.append(Group(measure, tuple(figures)))
    return rows


def vision_plots(runs: Sequence[VisionRun]) -> dict[str, bytes]:
    """PNGs by file name."""
    return {"vision_places.png": place_maps(variants(runs)), "vision_heads.png": head_scatter(variants(runs))}


def place_maps(groups: Groups) -> bytes:
    """What the test pictures hold at each place, and the weight it gets by variant and layer."""
    columns = 1 + LAYERS
    figure, panels = canvas(2.35 * columns + 0.8, 2.35 * len(groups) + 0.9, columns * len(groups), columns)
    facts = groups[0].runs[0].places
    shown = (("intensity", facts.intensity), ("share blank", facts.blank))
    for panel, (title, fact) in zip(panels[::columns], shown, strict=False):
        heat_map(panel, title, fact, "Greys", 1.4 * max(fact), lambda value, fact=fact: value > 0.7 * max(fact))
    for panel in panels[2 * columns :: columns]:
        panel.axis("off")
    maps = {
        (row, layer): [TOKENS * mean(run.received[layer][patch] for run in group.runs) for patch in range(PATCHES)]
        for row, group in enumerate(groups)
        for layer in range(LAYERS)
    }
    top, image = max(map(max, maps.values())), None
    for (row, layer), weights in maps.items():
        on_cls = TOKENS * mean(each[layer].patches.cls for each in groups[row].figures("layer_means"))
        title, panel = f"{groups[row].name}\nlayer {layer}, [CLS] {on_cls:.2f}", panels[row * columns + 1 + layer]
        image = heat_map(panel, title, weights, "viridis", top, lambda value: value < 0.6 * top)
    figure.colorbar(image, ax=panels[LAYERS::columns], label="weight, uniform attention = 1", shrink=0.8)
    return png(figure, "Weight that each patch gets from patches' queries, mean over heads, test pictures and seeds")


def heat_map(panel: Any, title: str, values: Sequence[float], colors: str, top: float, white: Any) -> Any:
    """The 16 patches; `white`: which values are written in white."""
    image = panel.imshow([values[i : i + SIDE] for i in range(0, PATCHES, SIDE)], cmap=colors, vmin=0, vmax=top)
    for patch, value in enumerate(values):
        row, column = divmod(patch, SIDE)
        ink = "white" if white(value) else INK
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    panel.set_title(title, fontsize=9)
    panel.set_xticks([])
    panel.set_yticks([])
    return image


def head_scatter(groups: Groups) -> bytes:
    """Every head of every seed: weight on [CLS] against weight on border patches."""
    figure, panels = canvas(4 * len(groups) + 0.4, 4.6, len(groups), len(groups))
    for panel, group in zip(panels, groups, strict=True):
        panel.plot([0, 1], [1, 0], color="#bbbbbb", linewidth=1)
        for layer, color in enumerate(LAYER_COLORS):
            points = [(h.patches.cls, h.patches.border) for run in group.runs for h in run.heads if h.layer == layer]
            scatter(panel, points, color, label=f"layer {layer}")
        panel.plot(1 / TOKENS, BORDER / TOKENS, "+", color=INK, markersize=11, zorder=4, label="uniform attention")
        panel.axvline(SINK_HEAD, color=GREY, linewidth=0.8, linestyle="--", label=f"sink head, {SINK_HEAD}")
        panel.axhline(BORDER_HEAD, color=GREY, linewidth=0.8, linestyle=":", label=f"border head, {BORDER_HEAD}")
        panel.set_xlim(-0.03, 1)
        panel.set_ylim(0, 1.03)
        panel.set_title(group.name, fontsize=10)
        panel.set_xlabel("weight on [CLS]")
    panels[0].set_ylabel(f"weight on the {BORDER} border patches")
    return png(figure, "A dot is a head: mean weight of patches' queries over test pictures", legend=LAYERS + 3)
