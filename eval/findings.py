"""What helped and what did not: verdicts by the interval of the paired difference of two rows."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantsink.eval.bootstrap import difference_interval, perplexity, ratio_interval
from quantsink.eval.rolling import DROPPED, KEPT, RollingCurve, RollingPoint
from quantsink.eval.rows import Row

QUESTIONS = (
    ("attention-row", "attention-fixed", "INT8 attention weights: a scale per row, not one fixed scale"),
    ("attention-block", "attention-row", "INT8 attention weights: a scale per 64 keys, not per row"),
    ("attention-sink", "attention-block", "Splitting off the sink token in the sink heads"),
    ("attention-sink", "attention-random", "Choosing the sink heads by calibration, not at random"),
    ("attention-all", "attention-sink", "Splitting off the sink token in every head, not only in sink heads"),
    ("clip-row-10", "clip-absolute-10", "Clipping scores relative to their row's maximum, not absolutely"),
    ("w8a8", "w8a8-plain", "quantsink's w8a8, INT8 attention included, against plain W8A8 without it"),
    ("w8a8", "bnb-llm-int8", "quantsink's w8a8, INT8 attention included, against LLM.int8() without it"),
    ("w8a8", "w8a8-random", "In the whole model: choosing the sink heads by calibration, not at random"),
    ("w8a8-static", "w8a8-static-plain", "Static scales: a separate one for sink tokens, outlier columns native"),
)
"""(the row that is tried, the row that it is compared with, the question in words)."""
CACHE_QUESTIONS = (
    ("kv{b}", "hqq-kv{b}", "A KV cache of {b} bits: quantsink's, not HQQ's"),
    ("kv{b}", "kv{b}-no-sinks", "A KV cache of {b} bits: sink tokens exact, at the same bits"),
    (
        "kv{b}",
        "kv{b}-nearest",
        "A KV cache of {b} bits: keys rounded for calibrated queries, not each number to the nearest code",
    ),
    ("kv{b}", "kv{b}-uniform", "A KV cache of {b} bits: each head's width by measured error, not all equal"),
    ("kv{b}", "kv{b}-random", "A KV cache of {b} bits: each head's width by measured error, not at random"),
    ("kv{b}-stream", "kv{b}", "A KV cache of {b} bits: local heads forget distant tokens"),
    (
        "kv{b}-stream",
        "kv{b}-stream-random",
        "A KV cache of {b} bits: choosing the heads that forget by calibration, not at random",
    ),
)
"""The same for KV caches, asked at each width `b` that was measured."""

HELPED, HURT, SAME, UNDECIDED = "helped", "hurt", "no difference shown", "not decided"
FLAT, GREW = "flat", "grew"
FLAT_UP_TO = 1.01
"""Memory is called flat if its largest value is at most this multiple of its smallest."""


@dataclass(frozen=True)
class Finding:
    """One comparison: KL of `tried` minus KL of `against`, with its 95 % interval if there is one."""

    question: str
    tried: str
    against: str
    verdict: str
    evidence: str


def findings(rows: Iterable[Row]) -> list[Finding]:
    """One per question whose two rows were both measured."""
    measured = {row.method: row for row in rows if row.ok}
    widths = [match[1] for name in measured if (match := re.fullmatch(r"kv(\d+)", name))]
    questions = list(QUESTIONS)
    for b in widths:
        questions += [
            (tried.format(b=b), against.format(b=b), words.format(b=b)) for tried, against, words in CACHE_QUESTIONS
        ]
    return [
        _finding(measured[tried], measured[against], question)
        for tried, against, question in questions
        if tried in measured and against in measured
    ]


def _finding(tried: Row, against: Row, question: str) -> Finding:
    assert tried.kl is not None
    assert against.kl is not None
    bounds = difference_interval(tried.windows, against.windows)
    evidence = f"KL {number(tried.kl)} ({_named(tried)}) against {number(against.kl)} ({_named(against)})"
    if bounds is None:
        return Finding(question, tried.method, against.method, UNDECIDED, f"{evidence}; one window gives no interval")
    low, high = bounds
    verdict = HELPED if high < 0 else HURT if low > 0 else SAME
    evidence += f"; difference {number(tried.kl - against.kl)}, 95 % interval {number(low)} to {number(high)}"
    return Finding(question, tried.method, against.method, verdict, evidence)


def rolling_findings(curves: Sequence[RollingCurve]) -> list[Finding]:
    """What keeping the sinks did to a rolling cache, and whether its memory stayed constant."""
    by_name = {curve.method: curve for curve in curves}
    if not by_name.keys() >= {KEPT, DROPPED}:
        return []
    kept, dropped = by_name[KEPT], by_name[DROPPED]
    over = f"A rolling cache over {kept.tokens:,} tokens"
    bounds = ratio_interval(kept.sums, dropped.sums)
    assert bounds is not None
    low, high = bounds
    verdict = HELPED if high < 1 else HURT if low > 1 else SAME
    ratio = perplexity(kept.sums) / perplexity(dropped.sums)
    ends = [f"perplexity {number(c.points[0].ppl)} -> {number(c.points[-1].ppl)} ({c.method})" for c in (kept, dropped)]
    evidence = (
        f"{' against '.join(ends)}, first to last of {len(kept.points)} stretches; ratio over all {number(ratio)}, "
        f"95 % interval {number(low)} to {number(high)}"
    )
    memory = [_memory(curve) for curve in (kept, dropped)]
    flat = all(spread <= FLAT_UP_TO for spreads, _ in memory for spread in spreads)
    return [
        Finding(f"{over}: sinks kept, not dropped", KEPT, DROPPED, verdict, evidence),
        Finding(
            f"{over}: memory after the first quarter, largest over smallest",
            KEPT,
            DROPPED,
            FLAT if flat else GREW,
            "; ".join(words for _, words in memory),
        ),
    ]


def _memory(curve: RollingCurve) -> tuple[list[float], str]:
    """Ratio of largest to smallest, for the cache and for the peak memory, and both in words."""
    after = curve.points[len(curve.points) // 4 - 1 :]
    sizes: list[tuple[str, Callable[[RollingPoint], int | None]]] = [
        ("cache", lambda point: point.cache_bytes),
        ("peak resident memory", lambda point: point.peak_bytes),
    ]
    spreads, words = [], []
    for name, size in sizes:
        values = [value for point in after if (value := size(point)) is not None]
        if values:
            spreads.append(max(values) / min(values))
            words.append(f"{name} {spreads[-1]:.3f} (at most {max(values) / 1e6:,.1f} MB)")
    return spreads, f"{curve.method}: {', '.join(words)}"


def _named(row: Row) -> str:
    return row.method if row.kv_bytes is None else f"{row.method}, {row.bits_kv:.2f} bits"


def number(value: float, digits: int = 3) -> str:
    """A decimal with `digits` significant digits; below 1e-5 like 1.23e-06."""
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-5:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.{max(0, digits - 1 - _exponent(rounded))}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
