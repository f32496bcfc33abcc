"""What is measured of every head and every linear layer, as sums, counts, extremes and fixed-bin histograms.

Two partial measurements of the same model merge field by field (`merge`), which is how resume and several processes
work. All fields are float64 on the CPU. Shapes: H query heads, KVH key/value heads, D head size, K inputs.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from quantsink.architecture import AttentionLayer

BIN_WIDTH = 0.5
BINS = 81
"""Histogram of (row maximum - logit): 80 bins of 0.5, then everything from 40 up."""
HIDDEN = 1e4
"""Distance given to keys that a query does not see: their weight is 0, and they fall into the last bin."""

SUMS = (
    "rows",
    "bos_mass",
    "sink_mass",
    "entropy",
    "windows",
    "bos_mass_window",
    "bos_mass_window_sq",
    "entropy_window",
    "entropy_window_sq",
    "gap_count",
    "gap_mass",
    "rest_peak",
    "key_sum",
    "key_count",
    "error_rows",
    "error_int8",
    "error_sink",
    "output_energy",
    "input_peak",
    "input_windows",
)
MAXIMA = (
    "logit_max",
    "rest_peak_max",
    "key_max",
    "key_min_negated",
    "key_sink_max",
    "key_sink_min_negated",
    "value_amax",
    "value_sink_amax",
    "input_amax",
    "input_sink_amax",
)

Fields = dict[str, Tensor]


def empty_heads(layer: AttentionLayer) -> Fields:
    """Nothing measured yet: zeros for sums, -inf for extremes.

    `rows [H]` counted query rows; `bos_mass`, `sink_mass`, `entropy [H]` their sums over rows; `*_window*` sums
    over sequences of a sequence's mean and its square; `gap_count`, `gap_mass [H, 81]` pairs and weight by distance
    below the row's maximum; `rest_peak` row maximum of the weights without the sink; `key_sum [KVH, D]`, `key_count
    [KVH]` without sink tokens; ranges with (`*_sink_*`: the sink tokens alone) and without; `error_* [H]` squared
    error of the attention output, after the output projection, on each route, and `output_energy [H]` the layer's
    squared output.
    """
    h, kv, d = (layer.heads,), (layer.kv_heads,), (layer.kv_heads, layer.head_dim)
    shapes: dict[str, tuple[int, ...]] = {name: h for name in SUMS if not name.startswith("input")}
    shapes |= {"gap_count": (*h, BINS), "gap_mass": (*h, BINS), "key_sum": d, "key_count": kv}
    fields = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    ranges: dict[str, tuple[int, ...]] = {"logit_max": h, "rest_peak_max": h}
    ranges |= {name: d for name in MAXIMA if name.startswith(("key", "value"))}
    return fields | {name: torch.full(shape, -torch.inf, dtype=torch.float64) for name, shape in ranges.items()}


def empty_linear(inputs: int) -> Fields:
    """`input_amax`, `input_sink_amax` `[K]`: largest absolute input of ordinary rows and of sink rows; `input_peak`
    `[K]`: sum over sequences of the sequence's largest ordinary one, `input_windows` `[1]` their number."""
    extremes = ("input_amax", "input_sink_amax")
    return {name: torch.full((inputs,), -torch.inf, dtype=torch.float64) for name in extremes} | {
        "input_peak": torch.zeros(inputs, dtype=torch.float64),
        "input_windows": torch.zeros(1, dtype=torch.float64),
    }


def add(into: Fields, new: Mapping[str, Tensor]) -> None:
    """Merge a measurement into `into`, in place."""
    for name, value in new.items():
        value = value.detach().to("cpu", torch.float64)
        into[name] = torch.maximum(into[name], value) if name in MAXIMA else into[name] + value


def merge(parts: Iterable[Mapping[str, Tensor]]) -> Fields:
    """The measurement of all parts together."""
    first, *rest = parts
    total = dict(first)
    for part in rest:
        add(total, part)
    return total


def measure_rows(
    scores: Tensor, visible: Tensor, sink: tuple[int, int], s_aux: Tensor | None = None
) -> dict[str, Tensor]:
    """Statistics of a block of query rows.

    Args:
        scores: `[H, Q, L]` logits as softmax sees them (scaled, soft-capped), unmasked.
        visible: `[Q, L]`, true where the query sees the key; nothing before the sink tokens is visible.
        sink: columns from the first real token to behind the last sink token.
        s_aux: `[H]` learned sink logits, part of the denominator.
    """
    heads, queries, _ = scores.shape
    first, border = sink
    s = scores + torch.zeros(visible.shape, device=scores.device).masked_fill_(~visible, -torch.inf)
    peak = s.amax(-1, keepdim=True)
    gap = (peak - s).clamp_(max=HIDDEN)
    weights = torch.exp(-gap)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(s_aux.to(total)[:, None, None] - peak)
    weights /= total
    entropy = (weights * gap).sum(-1) + total.squeeze(-1).log() * weights.sum(-1)
    entropy = entropy / visible.sum(-1).clamp(min=2).log()
    rest_peak = weights[..., border:].amax(-1) if border < weights.shape[-1] else torch.zeros_like(entropy)

    bins = (
        (gap / BIN_WIDTH).clamp_(max=BINS - 1).long().add_(torch.arange(heads, device=s.device)[:, None, None] * BINS)
    )
    count = torch.bincount(bins.flatten(), minlength=heads * BINS).view(heads, BINS)
    count[:, -1] -= (~visible).sum()
    mass = torch.bincount(bins.flatten(), weights=weights.flatten().double(), minlength=heads * BINS).view(heads, BINS)
    return {
        "rows": torch.full((heads,), float(queries)),
        "bos_mass": weights[..., first].double().sum(-1),
        "sink_mass": weights[..., first:border].double().sum((-2, -1)),
        "entropy": entropy.double().sum(-1),
        "logit_max": peak.amax((-2, -1)),
        "gap_count": count,
        "gap_mass": mass,
        "rest_peak": rest_peak.double().sum(-1),
        "rest_peak_max": rest_peak.amax(-1),
    }


def measure_window(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What one sequence adds to the spread over sequences, from the sums over its rows."""
    count = rows["rows"]
    bos, entropy = rows["bos_mass"] / count, rows["entropy"] / count
    return {
        "windows": torch.ones_like(count),
        "bos_mass_window": bos,
        "bos_mass_window_sq": bos**2,
        "entropy_window": entropy,
        "entropy_window_sq": entropy**2,
    }


def measure_keys(key: Tensor, value: Tensor, sink: Tensor) -> dict[str, Tensor]:
    """Ranges and the mean of keys and values `[KVH, L, D]` of real tokens; `sink` `[L]` marks the sink tokens."""
    rest_k, rest_v = key[:, ~sink].float(), value[:, ~sink].float()
    sink_k, sink_v = key[:, sink].float(), value[:, sink].float()
    found = {
        "key_sum": rest_k.double().sum(1),
        "key_count": torch.full((key.shape[0],), float(rest_k.shape[1])),
    }
    if rest_k.shape[1]:
        low, high = rest_k.amin(1), rest_k.amax(1)
        found |= {"key_max": high, "key_min_negated": -low, "value_amax": rest_v.abs().amax(1)}
    if sink_k.shape[1]:
        low, high = sink_k.amin(1), sink_k.amax(1)
        found |= {"key_sink_max": high, "key_sink_min_negated": -low, "value_sink_amax": sink_v.abs().amax(1)}
    return found
