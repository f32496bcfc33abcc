"""From a calibration to a cache plan: how many bits each KV head's codes get, and which heads may forget.

Scales and zero points cost the same at every width, so bits are shared out by the measured error: that of a layer's
attention output when one KV head alone is held at a width. Errors of different heads add up as if they were
independent. Every head starts at 2 bits. Then one head at a time goes up one step, the one that gains most per bit,
until the average is reached. Widths between which a head gains less per bit than beyond them are skipped (only its
convex hull counts), so the plan is the best one but for the last step.
"""

import heapq
import logging
import random

from torch import Tensor

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.records import KVHead
from quantsink.errors import ArchitectureError, CalibrationError, RecipeError
from quantsink.kernels.coded_attention.codes import WIDTHS, Record
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

log = logging.getLogger(__name__)

STREAM_WINDOW = 256
STREAM_MASS = 0.02
"""A head streams if at most this much weight lies beyond its sinks and the window."""
TOLERANCE = 0.02
"""How far the real bytes may lie from those of the width that was asked for."""


def cache_plan(calibration: Calibration, options: KVCache) -> CachePlan:
    """Decide what each KV head keeps. Layers with a sliding window keep it exact and take part in nothing here.

    Raises:
        RecipeError: options without `bits`.
        CalibrationError: the calibration did not measure what the options need.
        ArchitectureError: a head size for which there are no codes.
    """
    bits = options.bits
    if bits is None:
        raise RecipeError(f"kv_cache.bits: not set; give a number from {min(WIDTHS)} to {max(WIDTHS)}")
    options = options.with_sinks(calibration.settings.sink_size)
    layers = [layer for layer in calibration.layers if layer.window is None]
    for layer in layers:
        try:
            Record(4, layer.head_dim, layer.head_dim)
        except ValueError as error:
            raise ArchitectureError(f"{calibration.model}: {layer.name}: {error}") from None
    heads = [head for head in calibration.kv_heads() if any(head.layer == layer.index for layer in layers)]
    head_dim = layers[0].head_dim if layers else 64
    widths = choose_widths(heads, bits, options.widths, options.seed, head_dim)
    average, target = sum(widths.values()) / max(len(widths), 1), float(bits)
    if widths and abs(average - target) > TOLERANCE * target:
        log.warning("KV cache: %d heads average %.2f bits where %g were asked for", len(widths), average, target)
    windows = choose_windows(heads, options.stream)
    places = {layer.name: [(layer.index, head) for head in range(layer.kv_heads)] for layer in layers}
    return CachePlan(
        options,
        {name: tuple(widths[place] for place in heads) for name, heads in places.items()},
        {name: tuple(windows[place] for place in heads) for name, heads in places.items()},
        query_gram(calibration, layers) if options.rounding == "query" else {},
    )


def query_gram(calibration: Calibration, layers: list[AttentionLayer]) -> dict[str, Tensor]:
    """float32 `[KVH, D, D]` of each layer: the mean of `q q^T` over the queries of a KV head's group."""
    total = calibration.total.heads
    fields = {layer.name: total[layer.name] for layer in layers}
    return {n: (f["query_gram"] / f["query_rows"].clamp(min=1)[:, None, None]).float() for n, f in fields.items()}


Place = tuple[int, int]


def choose_widths(heads: list[KVHead], bits: float, widths: str, seed: int, head_dim: int) -> dict[Place, int]:
    """Bits of every (layer, KV head)."""
    places = [(head.layer, head.kv_head) for head in heads]
    if widths == "uniform" or bits in (max(WIDTHS), min(WIDTHS)):
        return dict.fromkeys(places, int(bits))
    if any(head.error is None for head in heads):
        raise CalibrationError(
            "widths by head need measured errors; calibrate with --error-windows above 0 and windows of 256 tokens or "
            'more, or give every head the same width (widths="uniform")'
        )
    chosen = _share_out(heads, bits, Record(4, head_dim, head_dim).bits_per_number - 4)
    if widths == "random":
        shuffled = [chosen[place] for place in places]
        random.Random(seed).shuffle(shuffled)
        return dict(zip(places, shuffled, strict=True))
    return chosen


def _share_out(heads: list[KVHead], bits: float, overhead: float) -> dict[Place, int]:
    order = sorted(WIDTHS)
    budget = (bits + overhead) * len(heads) * (1 + TOLERANCE / 4) - overhead * len(heads)
    steps: list[tuple[float, int, int]] = []  # (-gain per bit, head, width)
    hulls = []
    for number, head in enumerate(heads):
        assert head.error is not None
        cost = dict(zip(WIDTHS, (error**2 for error in head.error), strict=True))
        hull = _hull([(width, cost[width]) for width in order])
        hulls.append(hull)
        if len(hull) > 1:
            heapq.heappush(steps, (-_slope(hull[0], hull[1]), number, 1))
    at = [0] * len(heads)
    spent = float(order[0] * len(heads))
    while steps:
        _, number, step = heapq.heappop(steps)
        hull = hulls[number]
        price = hull[step][0] - hull[step - 1][0]
        if spent + price > budget:
            continue
        spent += price
        at[number] = step
        if step + 1 < len(hull):
            heapq.heappush(steps, (-_slope(hull[step], hull[step + 1]), number, step + 1))
    widths = [hulls[i][at[i]][0] for i in range(len(heads))]
    _exchange(heads, widths, budget)
    return {(head.layer, head.kv_head): width for head, width in zip(heads, widths, strict=True)}


def _exchange(heads: list[KVHead], widths: list[int], budget: float) -> None:
    """Spend the rest: a step up that does not fit alone is paid for by steps down of the heads that lose least, as long
    as the total error falls."""
    order = sorted(WIDTHS)
    cost = [{width: error**2 for width, error in zip(WIDTHS, head.error or (), strict=True)} for head in heads]
    for _ in range(len(heads)):
        left = budget - sum(widths)
        best: tuple[float, int, list[int]] | None = None
        for up, width in enumerate(widths):
            if width == order[-1]:
                continue
            new = order[order.index(width) + 1]
            gain, missing, paid = cost[up][width] - cost[up][new], new - width - left, []
            downs = sorted(
                (cost[i][order[order.index(w) - 1]] - cost[i][w], i)
                for i, w in enumerate(widths)
                if i != up and 2 < w < 8
            )
            for loss, i in downs:
                if missing <= 0:
                    break
                gain, missing = gain - loss, missing - 1
                paid.append(i)
            if missing <= 0 and gain > 0 and (best is None or gain > best[0]):
                best = gain, up, paid
        if best is None:
            return
        _, up, paid = best
        widths[up] = order[order.index(widths[up]) + 1]
        for i in paid:
            widths[i] = order[order.index(widths[i]) - 1]


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (low[1] - high[1]) / (high[0] - low[0])


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lower convex hull of (width, cost), widths rising."""
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        if not hull or point[1] < hull[-1][1]:
            hull.append(point)
    return hull


def choose_windows(heads: list[KVHead], stream: str) -> dict[Place, int]:
    """Newest tokens that each head keeps; 0 = all."""
    places = {(head.layer, head.kv_head): 0 for head in heads}
    if stream == "off":
        return places
    window = STREAM_WINDOW if stream == "auto" else int(stream)
    measured = sorted({size for head in heads for size, mass in head.far.items() if mass is not None})
    usable = [size for size in measured if size <= window]
    if not usable:
        raise CalibrationError(
            f"stream {stream}: the calibration did not measure weight beyond {window} tokens; calibrate with a "
            f"--seq-len above {window + 16}"
        )
    for head in heads:
        mass = head.far.get(usable[-1])
        if mass is not None and mass <= STREAM_MASS:
            places[head.layer, head.kv_head] = window
    return places


__all__ = ["cache_plan", "choose_widths", "choose_windows"]
