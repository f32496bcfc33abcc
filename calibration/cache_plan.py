"""From a calibration to a cache plan: how many bits each KV head's codes get, and which heads may forget.

Scales and zero points cost the same at every width, so bits are shared out by what a calibration measured: the error of
a layer's attention output when one KV head alone is held at a width. Errors of different heads add up as if they were
independent. Bits go one step of one head at a time to where a bit takes away most error, from everything at 2 bits
until the average is reached; what a head gains a bit is made to fall with its width first (its convex hull), so that
this is the best plan but for the last step.
"""

import dataclasses
import heapq
import logging
import random
from typing import Any, Literal, cast

from torch import Tensor

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.records import KVHead
from quantsink.errors import ArchitectureError, CalibrationError, RecipeError
from quantsink.kernels.coded_attention.codes import BLOCK, WIDTHS, Record
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import CacheLayerPlan, CachePlan
from quantsink.recipe import KVCache

log = logging.getLogger(__name__)

SINKS = 4
"""Exact sink tokens at least: two bits profit from four (docs/decisions/0007-cache.md)."""
STREAM_WINDOW = 256
STREAM_MASS = 0.02
"""A head streams if at most this much weight lies beyond its sinks and the window."""
TOLERANCE = 0.02
"""How far the real bytes may lie from those of the width that was asked for."""


def cache_plan(
    calibration: Calibration,
    *,
    bits: float = 4,
    sink_size: int | None = None,
    residual: int = 64,
    widths: str = "measured",
    rounding: str = "query",
    stream: str | int = "off",
    max_length: int | None = None,
    seed: int = 0,
) -> CachePlan:
    """Decide what each KV head keeps; options as in `SinkCache.from_calibration`. Layers with a sliding window keep it
    exact and take part in nothing here.

    Raises:
        RecipeError: an option that cannot be meant.
        CalibrationError: the calibration did not measure what the options need.
    """
    sinks = max(calibration.settings.sink_size, SINKS) if sink_size is None else sink_size
    _check(bits, sinks, residual, widths, rounding, stream, max_length, seed)
    layers = [layer for layer in calibration.layers if layer.window is None]
    for layer in layers:
        try:
            Record(4, layer.head_dim, layer.head_dim)
        except ValueError as error:
            raise ArchitectureError(f"{calibration.model}: {layer.name}: {error}") from None
    heads = [head for head in calibration.kv_heads() if any(head.layer == layer.index for layer in layers)]
    chosen = choose_widths(heads, bits, widths, seed, [layer.head_dim for layer in layers][:1] or [64])
    real, wanted = sum(chosen.values()) / max(len(chosen), 1), float(bits)
    if chosen and abs(real - wanted) > TOLERANCE * wanted:
        log.warning("KV cache: %d heads average %.2f bits where %g were asked for", len(chosen), real, wanted)
    windows = choose_windows(heads, stream)
    found = {}
    for layer in layers:
        places = [(layer.index, head) for head in range(layer.kv_heads)]
        found[layer.name] = CacheLayerPlan(tuple(chosen[p] for p in places), tuple(windows[p] for p in places))
    gram = query_gram(calibration, layers) if rounding == "query" else {}
    return CachePlan(sinks, residual, max_length, found, cast(Literal["query", "nearest"], rounding), gram)


def query_gram(calibration: Calibration, layers: list[AttentionLayer]) -> dict[str, Tensor]:
    """float32 `[KVH, D, D]` of each layer: the mean of `q q^T` over the queries of a KV head's group."""
    total = calibration.total.heads
    fields = {layer.name: total[layer.name] for layer in layers}
    return {n: (f["query_gram"] / f["query_rows"].clamp(min=1)[:, None, None]).float() for n, f in fields.items()}


def cache_options(wanted: KVCache) -> dict[str, Any]:
    """A recipe's wishes as the options of `cache_plan`."""
    options = dataclasses.asdict(wanted)
    stream = wanted.stream
    return {**options, "stream": int(stream) if stream.isdigit() else stream}


Place = tuple[int, int]


def choose_widths(heads: list[KVHead], bits: float, widths: str, seed: int, head_dims: list[int]) -> dict[Place, int]:
    """Bits of every (layer, KV head)."""
    places = [(head.layer, head.kv_head) for head in heads]
    if widths == "uniform" or bits in (max(WIDTHS), min(WIDTHS)):
        if bits not in WIDTHS:
            raise RecipeError(f"kv bits {bits:g}: uniform widths are {', '.join(map(str, WIDTHS))}")
        return dict.fromkeys(places, int(bits))
    if any(head.error is None for head in heads):
        raise CalibrationError(
            "widths by head need measured errors; calibrate with --error-windows above 0 and windows of 256 tokens or "
            'more, or give every head the same width (widths="uniform")'
        )
    found = _share_out(heads, bits, Record(4, head_dims[0], head_dims[0]).bits_per_number - 4)
    if widths == "random":
        values = [found[place] for place in places]
        random.Random(seed).shuffle(values)
        found = dict(zip(places, values, strict=True))
    return found


def _share_out(heads: list[KVHead], bits: float, overhead: float) -> dict[Place, int]:
    order = sorted(WIDTHS)
    budget = (bits + overhead) * len(heads) * (1 + TOLERANCE / 4) - overhead * len(heads)
    steps: list[tuple[float, int, int]] = []  # (-gain a bit, head, width)
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
    """Spend what is left: a step up that does not fit alone is paid for by steps down of the heads that lose least by
    them, as long as the error falls."""
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


def choose_windows(heads: list[KVHead], stream: str | int) -> dict[Place, int]:
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


def _check(
    bits: Any, sinks: Any, residual: Any, widths: str, rounding: str, stream: str | int, max_length: Any, seed: Any
) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not min(WIDTHS) <= bits <= max(WIDTHS):
        raise RecipeError(f"kv bits {bits!r}: from {min(WIDTHS)} to {max(WIDTHS)}")
    for name, value in (("sink_size", sinks), ("residual", residual), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RecipeError(f"{name} {value!r}: a whole number, 0 or more")
    if widths not in ("measured", "uniform", "random"):
        raise RecipeError(f"widths {widths!r}: not one of measured, uniform, random")
    if rounding not in ("query", "nearest"):
        raise RecipeError(f"rounding {rounding!r}: not one of query, nearest")
    if stream not in ("auto", "off") and (isinstance(stream, bool) or not isinstance(stream, int) or stream < 1):
        raise RecipeError(f"stream {stream!r}: auto, off, or a number of tokens")
    least = sinks + residual + 2 * BLOCK
    whole = isinstance(max_length, int) and not isinstance(max_length, bool)
    if max_length is not None and (not whole or max_length < least):
        raise RecipeError(f"max_length {max_length!r}: at least {least} (sinks, residual and two blocks)")


__all__ = ["cache_options", "cache_plan", "choose_widths", "choose_windows"]
