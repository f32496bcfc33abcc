"""The vision experiment's tables and pictures."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quantsink.eval.lab.model import border
from quantsink.eval.lab.quantize import BLOCK
from quantsink.eval.lab.tables import Spread, Table, canvas, percent, png
from quantsink.eval.lab.trigger_runs import METHODS, RANDOM, SINK
from quantsink.eval.lab.vision import (
    BLANK_HEAD,
    BORDER_HEAD,
    CALIBRATED,
    GATE,
    HEADS,
    LAYERS,
    NONE,
    PATCHES,
    SIDE,
    SINK_HEAD,
    STRONG,
    TOKENS,
    HeadWeights,
    Places,
    VisionRun,
)

Figure = Callable[[VisionRun], float]
HeadFigure = Callable[[HeadWeights], float]
BORDER = int(border(SIDE).sum())
COLORS = ("#1f6f8b", "#d9a13b", "#c8553d")
"""By layer."""
INK = "#222222"
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; the last for more, which only widens intervals."""
KINDS = ("corners", "left and right edge", "top and bottom edge", "inside")


def vision_tables(runs: Sequence[VisionRun]) -> list[Table]:
    """In reading order."""
    groups = _groups(runs)
    found = [_trained(groups), _layers(groups), _heads(groups), _where(groups), _blank(groups)]
    if any(run.gates for run in runs):
        found.append(_gates(groups))
    if {NONE.name, GATE.name} <= set(groups):
        found.append(_differences(groups[NONE.name], groups[GATE.name]))
    return [*found, _in_8_bits(groups), _calibrated(groups)]


def _groups(runs: Sequence[VisionRun]) -> dict[str, list[VisionRun]]:
    """Runs by variant, each in order of seeds."""
    found: dict[str, list[VisionRun]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(run.name, []).append(run)
    return found


def _over(runs: Sequence[VisionRun], figure: Figure, digits: int = 3) -> str:
    return Spread.of(map(figure, runs)).text(digits)


def _conditions(groups: dict[str, list[VisionRun]]) -> str:
    """What all figures of a table rest on."""
    first = next(iter(groups.values()))
    count = len(first)
    return f"{first[0].pictures} test pictures, {count} {'seeds, mean ± SD' if count > 1 else 'seed'}"


def _mean(figure: HeadFigure, layer: int | None = None) -> Figure:
    """Of the heads, of one layer or of all."""
    return lambda run: Spread.of(figure(head) for head in run.heads if layer in (None, head.layer)).mean


def _count(rule: Callable[[HeadWeights], bool]) -> Figure:
    return lambda run: float(sum(map(rule, run.heads)))


def _trained(groups: dict[str, list[VisionRun]]) -> Table:
    rows = []
    for name, own in groups.items():
        right = Spread.of(run.accuracy for run in own)
        loss = Spread.of(run.loss for run in own)
        accuracy = right.percent()
        rows.append((name, str(own[0].steps), loss.short(), accuracy, f"{percent(right.low)} to {percent(right.high)}"))
    return Table(
        "A small vision transformer on digits",
        ("attention", "steps", "training loss", "test accuracy", "lowest to highest"),
        tuple(rows),
        (
            _conditions(groups),
            f"{LAYERS} layers of {HEADS} heads; [CLS] and {PATCHES} patches of 2 x 2 pixels",
            "no augmentation; one split for all models",
        ),
    )


def _layers(groups: dict[str, list[VisionRun]]) -> Table:
    uniform = (f"{1 / TOKENS:.3f}", f"{BORDER / TOKENS:.3f}", "1.000")
    rows: list[tuple[str, ...]] = [("uniform attention", "", *uniform, *uniform)]
    figures: tuple[HeadFigure, ...] = (
        lambda head: head.patches.cls,
        lambda head: head.patches.border,
        lambda head: head.patches.entropy,
        lambda head: head.cls.cls,
        lambda head: head.cls.border,
        lambda head: head.cls.entropy,
    )
    for name, own in groups.items():
        for layer in range(LAYERS):
            rows.append((name, str(layer), *(_over(own, _mean(figure, layer)) for figure in figures)))
    each = ("on [CLS]", "on the border", "entropy")
    return Table(
        "Weight on [CLS] and on border patches",
        ("attention", "layer", *(f"patches' queries: {x}" for x in each), *(f"[CLS] query: {x}" for x in each)),
        tuple(rows),
        (
            _conditions(groups),
            f"means over a layer's heads, the pictures and the query tokens; entropy over log({TOKENS})",
            f"the border is {BORDER} of {PATCHES} patches",
        ),
    )


def _heads(groups: dict[str, list[VisionRun]]) -> Table:
    figures = (
        _count(lambda h: h.patches.cls >= SINK_HEAD),
        _count(lambda h: h.patches.cls >= STRONG),
        _count(lambda h: h.cls.cls >= SINK_HEAD),
        _count(lambda h: h.patches.border > BORDER_HEAD),
        _count(lambda h: h.blank > BLANK_HEAD),
    )
    rows = []
    for name, own in groups.items():
        rows.append((name, _over(own, _largest), *(_over(own, figure, 1) for figure in figures)))
    return Table(
        f"Heads of {LAYERS * HEADS} that prefer a place",
        (
            "attention",
            "strongest head's weight on [CLS]",
            f">= {SINK_HEAD} on [CLS]",
            f">= {STRONG} on [CLS]",
            f"[CLS] query: >= {SINK_HEAD} on itself",
            f"> {BORDER_HEAD} on the border",
            f"> {BLANK_HEAD} x uniform on blank patches",
        ),
        tuple(rows),
        (
            _conditions(groups),
            "a head's weight: its mean over pictures and queries, patches' queries unless it says otherwise",
        ),
    )


def kind(place: int) -> str:
    """Of a patch, by its number row by row."""
    row, column = divmod(place, SIDE)
    ends = (0, SIDE - 1)
    if column in ends:
        return KINDS[0] if row in ends else KINDS[1]
    return KINDS[2] if row in ends else KINDS[3]


def _where(groups: dict[str, list[VisionRun]]) -> Table:
    places: Places = next(iter(groups.values()))[0].places
    rows = [("[CLS]", "1", "", "", *(_times(map(ON_CLS, own)) for own in groups.values()))]
    for name in KINDS:
        own_places = [place for place in range(PATCHES) if kind(place) == name]
        blank, intensity = (
            Spread.of(values[place] for place in own_places).mean for values in (places.blank, places.intensity)
        )
        cells = [_times(_received(run, own_places) for run in own) for own in groups.values()]
        rows.append((name, str(len(own_places)), percent(blank), f"{intensity:.2f}", *cells))
    return Table(
        "Where the weight goes, uniform attention = 1",
        ("tokens", "how many", "blank", "intensity", *groups),
        tuple(rows),
        (
            _conditions(groups),
            f"weight a token gets from patches' queries, mean over all heads, times {TOKENS}",
            "blank: share of patches whose four pixels are all 0; intensity: of 1",
        ),
    )


def _times(weights: Iterable[float]) -> str:
    """As multiples of what uniform attention gives a token."""
    return Spread.of(TOKENS * weight for weight in weights).text(2)


def _received(run: VisionRun, places: Sequence[int]) -> float:
    return Spread.of(layer[place] for layer in run.received for place in places).mean


def _blank(groups: dict[str, list[VisionRun]]) -> Table:
    figures: tuple[HeadFigure, ...] = (
        lambda head: head.blank,
        lambda head: head.intensity.places,
        lambda head: head.intensity.within,
        lambda head: head.variance.places,
        lambda head: head.variance.within,
    )
    rows = []
    for name, own in groups.items():
        for layer in range(LAYERS):
            rows.append((name, str(layer), *(_over(own, _mean(figure, layer), 2) for figure in figures)))
    places = next(iter(groups.values()))[0].places
    return Table(
        "Sinks on blank patches?",
        (
            "attention",
            "layer",
            "weight on blank patches, uniform = 1",
            "r with intensity: 16 places",
            "r with intensity: within a place",
            "r with variance: 16 places",
            "r with variance: within a place",
        ),
        tuple(rows),
        (
            _conditions(groups),
            "means over a layer's heads, patches' queries",
            f"{percent(sum(places.blank) / PATCHES)} of patches are blank",
            "r: correlation of a patch's property with the weight it gets, of the 16 places' means, or over all "
            "pictures with each place's mean taken off; below 0: the emptier, the more weight",
        ),
    )


def _gates(groups: dict[str, list[VisionRun]]) -> Table:
    rows = []
    for name, own in groups.items():
        for index, gate in enumerate(own[0].gates):
            values = [run.gates[index] for run in own]
            figures = ([v.patches for v in values], [v.cls for v in values], [v.spread for v in values])
            rows.append((name, str(gate.layer), *(Spread.of(figure).text() for figure in figures)))
    return Table(
        "The gate's values",
        ("attention", "layer", "patches, mean", "[CLS], mean", "patches, SD over pictures and places"),
        tuple(rows),
        (
            _conditions(groups),
            f"mean over heads; an untrained gate is at {1 / (1 + math.exp(-1)):.3f} with SD near 0",
        ),
    )


ON_CLS = _mean(lambda head: head.patches.cls)


def _largest(run: VisionRun) -> float:
    return max(head.patches.cls for head in run.heads)


MEASURES: tuple[tuple[str, Figure], ...] = (
    ("test accuracy", lambda run: run.accuracy),
    ("weight on [CLS], mean of heads", ON_CLS),
    ("weight on [CLS], strongest head", _largest),
    (f"heads >= {SINK_HEAD} on [CLS]", _count(lambda h: h.patches.cls >= SINK_HEAD)),
    ("weight on the border", _mean(lambda h: h.patches.border)),
    ("weight on blank patches, uniform = 1", _mean(lambda h: h.blank)),
    ("entropy", _mean(lambda h: h.patches.entropy)),
    ("error in 8 bits, block", lambda run: run.errors[BLOCK]),
)


def _differences(without: Sequence[VisionRun], gated: Sequence[VisionRun]) -> Table:
    rows = []
    for name, figure in MEASURES:
        pairs = [(figure(a), figure(b)) for a, b in zip(without, gated, strict=True)]
        cells = [Spread.of(own).text(4) for own in zip(*pairs, strict=True)]
        rows.append((name, *cells, *difference(pairs)))
    return Table(
        "The gate against none",
        ("measure", NONE.name, GATE.name, "difference, 95 % interval", "verdict"),
        tuple(rows),
        (
            _conditions({NONE.name: list(without)}),
            "differences seed by seed, Student's t; patches' queries; all heads",
            f"by chance alone one such interval in 20 misses 0, and there are {len(MEASURES)}",
        ),
    )


def difference(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Mean of second - first with its 95 % interval, and what that allows to say."""
    found = Spread.of(b - a for a, b in pairs)
    if found.sd is None:
        return f"{found.mean:+.4f}", "one seed says nothing"
    half = STUDENT[min(len(pairs) - 2, len(STUDENT) - 1)] * found.sd / math.sqrt(len(pairs))
    verdict = "no difference shown" if abs(found.mean) <= half else "higher" if found.mean > 0 else "lower"
    return f"{found.mean:+.4f} ± {half:.4f}", verdict


def _in_8_bits(groups: dict[str, list[VisionRun]]) -> Table:
    rows = []
    for name, own in groups.items():
        exact = Spread.of(run.accuracy_exact for run in own)
        rows.append((name, "exact", "0", exact.percent(2), "0"))
        for method in METHODS:
            error = Spread.of(run.errors[method] for run in own)
            right = Spread.of(run.accuracy_8_bits[method] for run in own)
            against = Spread.of(run.errors[method] / run.errors[BLOCK] for run in own)
            accuracy = right.percent(2)
            rows.append((name, method, error.short(), accuracy, against.text(2)))
    return Table(
        "Attention in 8 bits",
        ("attention", "weights in 8 bits", "error of the logits", "test accuracy", f"error / {BLOCK}'s"),
        tuple(rows),
        (
            _conditions(groups),
            f"error relative to float64's norm; {TOKENS} keys are one block, so block is row",
            f"{SINK}: block with [CLS] exact; {RANDOM}: block with one patch exact, drawn by seed",
        ),
        left=2,
    )


def _calibrated(groups: dict[str, list[VisionRun]]) -> Table:
    rows = []
    for name, runs in groups.items():
        own = [run.calibrated for run in runs if run.calibrated is not None]
        if not own:
            rows.append((name, *("refused",) * 6))
            continue
        exact = Spread.of(run.accuracy for run in runs)
        right = Spread.of(found.accuracy for found in own)
        rows.append(
            (
                name,
                f"{sum(set(found.found) == {*found.true, *found.last} for found in own)} of {len(own)}",
                Spread.of(len(found.true) for found in own).text(1),
                Spread.of(len(found.last) for found in own).text(1),
                f"{max(found.largest_difference for found in own):.1e}",
                Spread.of(found.error for found in own).short(),
                f"{100 * exact.mean:.2f} -> {right.percent(2)}",
            )
        )
    return Table(
        "quantsink's own calibration and w8a8",
        (
            "attention",
            "models whose sink heads it finds",
            f"heads >= {SINK_HEAD} on [CLS]",
            f"heads >= {SINK_HEAD} on the last patch",
            "largest difference of BOS mass",
            "w8a8: error of the logits",
            "test accuracy, exact -> w8a8",
        ),
        tuple(rows),
        (
            _conditions(groups),
            f"calibrated on {CALIBRATED} training pictures, on which heads and BOS mass are held to the recorded "
            "weights, every query's",
            "an encoder's sink heads: those of the first token and those of the last",
            "refused: transformers' attention interface cannot express it",
        ),
    )


def vision_plots(runs: Sequence[VisionRun]) -> dict[str, bytes]:
    """PNGs by file name."""
    groups = _groups(runs)
    return {"vision_places.png": _places(groups), "vision_heads.png": _scatter(groups)}


def _places(groups: dict[str, list[VisionRun]]) -> bytes:
    """What the test pictures hold at each place, and the weight it gets by variant and layer."""
    figure, axes = _figure((2.35 * (1 + LAYERS) + 0.8, 2.35 * len(groups) + 0.9), len(groups), 1 + LAYERS)
    top = max(TOKENS * value for own in groups.values() for layer in _maps(own) for value in layer)
    image: Any = None
    for line, (name, own) in enumerate(groups.items()):
        pictures = own[0].places
        first, title = ((pictures.intensity, "intensity"), (pictures.blank, "share blank"))[min(line, 1)]
        if line < 2:
            axes[line][0].imshow(_square(first), cmap="Greys", vmin=0, vmax=1.4 * max(first))
            _numbers(axes[line][0], first, ["white" if value > 0.7 * max(first) else INK for value in first])
            axes[line][0].set_title(title, fontsize=9)
        else:
            axes[line][0].axis("off")
        for layer, weights in enumerate(_maps(own)):
            panel = axes[line][1 + layer]
            scaled = [TOKENS * value for value in weights]
            image = panel.imshow(_square(scaled), cmap="viridis", vmin=0, vmax=top)
            _numbers(panel, scaled, ["white" if value < 0.6 * top else INK for value in scaled])
            on_cls = Spread.of(map(_mean(lambda h: h.patches.cls, layer), own)).mean
            panel.set_title(f"{name}\nlayer {layer}, [CLS] {TOKENS * on_cls:.2f}", fontsize=9)
    for panel in (panel for line in axes for panel in line):
        panel.set_xticks([])
        panel.set_yticks([])
    figure.colorbar(image, ax=[line[-1] for line in axes], label="weight, uniform attention = 1", shrink=0.8)
    figure.suptitle(
        "Weight that each patch gets from patches' queries, mean over heads, test pictures and seeds", fontsize=11
    )
    return png(figure)


def _maps(runs: Sequence[VisionRun]) -> list[list[float]]:
    """By layer, each place's weight, mean of the seeds."""
    layers = zip(*(run.received for run in runs), strict=True)
    return [[Spread.of(values).mean for values in zip(*layer, strict=True)] for layer in layers]


def _square(values: Sequence[float]) -> list[list[float]]:
    return [list(values[start : start + SIDE]) for start in range(0, PATCHES, SIDE)]


def _numbers(panel: Any, values: Sequence[float], inks: Sequence[str]) -> None:
    for place, (value, ink) in enumerate(zip(values, inks, strict=True)):
        row, column = divmod(place, SIDE)
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)


def _scatter(groups: dict[str, list[VisionRun]]) -> bytes:
    """Every head of every seed: weight on [CLS] against weight on border patches."""
    from matplotlib.lines import Line2D

    figure, (panels,) = _figure((4 * len(groups) + 0.4, 4.6), 1, len(groups))
    for panel, (name, own) in zip(panels, groups.items(), strict=True):
        panel.plot([0, 1], [1, 0], color="#bbbbbb", linewidth=1, zorder=1)
        for layer, color in enumerate(COLORS):
            heads = [h for run in own for h in run.heads if h.layer == layer]
            panel.scatter(
                [h.patches.cls for h in heads],
                [h.patches.border for h in heads],
                s=26,
                color=color,
                edgecolors="white",
                linewidths=0.5,
                zorder=3,
            )
        panel.scatter([1 / TOKENS], [BORDER / TOKENS], marker="+", s=120, color=INK, zorder=4)
        panel.axvline(SINK_HEAD, color="#888888", linewidth=0.8, linestyle="--", zorder=2)
        panel.axhline(BORDER_HEAD, color="#888888", linewidth=0.8, linestyle=":", zorder=2)
        panel.set_xlim(-0.03, 1)
        panel.set_ylim(0, 1.03)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("weight on [CLS]")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_ylabel(f"weight on the {BORDER} border patches")
    style: dict[str, Any] = {"linestyle": "", "markersize": 7}
    handles = [
        Line2D([], [], marker="o", color=color, label=f"layer {layer}", **style) for layer, color in enumerate(COLORS)
    ]
    handles += [
        Line2D([], [], marker="+", color=INK, label="uniform attention", **style),
        Line2D([], [], color="#888888", linestyle="--", label=f"sink head, {SINK_HEAD}"),
        Line2D([], [], color="#888888", linestyle=":", label=f"border head, {BORDER_HEAD}"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle("A dot is a head: mean weight of patches' queries over test pictures", fontsize=11)
    return png(figure)


def _figure(size: tuple[float, float], rows: int, columns: int) -> tuple[Any, Any]:
    figure = canvas(*size)
    return figure, figure.subplots(rows, columns, squeeze=False)
