"""What is measured of every head and every linear layer, as sums, counts, extremes and fixed-bin histograms.

Two partial measurements of the same model merge field by field (`merge`), which is how resume and several processes
work. All fields are float64 on the CPU. Shapes: H query heads, KVH key/value heads, D head size, K inputs.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.codes import BLOCK, WIDTHS, coded_keys, coded_values
from quantsink.models.head_layout import AttentionLayer

BIN_WIDTH = 0.5
BINS = 81
"""Histogram of (row maximum - logit): 80 bins of 0.5, then everything from 40 up."""
HIDDEN = 1e4
"""Distance given to keys that a query does not see: their weight is 0, and they fall into the last bin."""
FAR_WINDOWS = (64, 128, 256, 512, 1024)
"""Distances from the query beyond which weights are summed, sink tokens left out."""
RESIDUAL = 64
"""Newest tokens, the query's among them, that the measured cache keeps exact."""
SMALL = 2**18
"""A tensor of fewer numbers is coded fastest by one thread."""
CODED_MULTIPLE = 16
"""Head sizes must be a multiple of this to be coded."""

SUMS = (
    "rows",
    "bos_mass",
    "sink_mass",
    "last_mass",
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
    "query_gram",
    "query_rows",
    "error_rows",
    "error_int8",
    "error_sink",
    "output_energy",
    "kv_error",
    "kv_error_no_sink",
    "kv_rows",
    "kv_energy",
    "far_mass",
    "far_rows",
    "input_peak",
    "input_windows",
    "tokens",
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

    `rows [H]` counted query rows; `bos_mass`, `sink_mass`, `last_mass` (encoders), `entropy [H]` sums over rows;
    `*_window*` sums over sequences of a sequence's mean and its square; `gap_count`, `gap_mass [H, 81]` pairs and
    weight by distance below the row's maximum; `rest_peak` row maximum of the weights without the sink;
    `key_sum [KVH, D]`, `key_count [KVH]` without sink tokens; ranges with (`*_sink_*`: the sink tokens alone) and
    without; `error_* [H]` squared error of the attention output, after the output projection, on each route, and
    `output_energy [H]` the layer's squared output; `kv_error`, `kv_error_no_sink [KVH, 4]`, `kv_rows`, `kv_energy
    [KVH]` as `measure_kv` has them; `far_mass [H, 5]` weight on keys that are no sink token and lie `FAR_WINDOWS` or
    more positions before the query, `far_rows [H, 5]` the rows that see such keys; `query_gram [KVH, D, D]`,
    `query_rows [KVH]` as `measure_queries`.
    """
    h, kv, d = (layer.heads,), (layer.kv_heads,), (layer.kv_heads, layer.head_dim)
    values = (layer.kv_heads, layer.value_dim)
    shapes: dict[str, tuple[int, ...]] = {name: h for name in SUMS if not name.startswith(("input", "tokens"))}
    shapes |= {"gap_count": (*h, BINS), "gap_mass": (*h, BINS), "key_sum": d, "key_count": kv}
    shapes |= {name: (*kv, len(WIDTHS)) for name in ("kv_error", "kv_error_no_sink")}
    shapes |= {"kv_rows": kv, "kv_energy": kv, "query_gram": (*d, layer.head_dim), "query_rows": kv}
    shapes |= {name: (*h, len(FAR_WINDOWS)) for name in ("far_mass", "far_rows")}
    fields = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    ranges: dict[str, tuple[int, ...]] = {"logit_max": h, "rest_peak_max": h}
    ranges |= {name: d for name in MAXIMA if name.startswith("key")}
    ranges |= {name: values for name in MAXIMA if name.startswith("value")}
    return fields | {name: torch.full(shape, -torch.inf, dtype=torch.float64) for name, shape in ranges.items()}


def empty_linear(inputs: int) -> Fields:
    """`input_amax`, `input_sink_amax` `[K]`: largest absolute input of ordinary rows and of sink rows; `input_peak`
    `[K]`: sum over sequences of the sequence's largest ordinary one, `input_windows` `[1]` their number."""
    extremes = ("input_amax", "input_sink_amax")
    return {name: torch.full((inputs,), -torch.inf, dtype=torch.float64) for name in extremes} | {
        "input_peak": torch.zeros(inputs, dtype=torch.float64),
        "input_windows": torch.zeros(1, dtype=torch.float64),
    }


def empty_experts(count: int) -> Fields:
    """`tokens` `[E]` sent to each expert."""
    return {"tokens": torch.zeros(count, dtype=torch.float64)}


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
    scores: Tensor,
    visible: Tensor,
    rows: Tensor,
    sink: tuple[int, int],
    s_aux: Tensor | None = None,
    last: int | None = None,
) -> dict[str, Tensor]:
    """Statistics of a block of query rows.

    Args:
        scores: `[H, Q, L]` logits as softmax sees them (scaled, soft-capped), unmasked.
        visible: `[Q, L]`, true where the query sees the key; nothing before the sink tokens is visible.
        rows: `[Q]` the queries' positions.
        sink: first column of the real tokens, and the column after the last sink token.
        s_aux: `[H]` learned sink logits, part of the denominator.
        last: column of the last real token, where an encoder's queries see it.
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

    age = rows[:, None] - torch.arange(weights.shape[-1], device=rows.device)
    far = torch.stack([visible & (age >= window) for window in FAR_WINDOWS], -1)  # [Q, L, 5]
    far[:, :border] = False

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
        "last_mass": torch.zeros(heads) if last is None else weights[..., last].double().sum(-1),
        "entropy": entropy.double().sum(-1),
        "logit_max": peak.amax((-2, -1)),
        "gap_count": count,
        "gap_mass": mass,
        "rest_peak": rest_peak.double().sum(-1),
        "rest_peak_max": rest_peak.amax(-1),
        "far_mass": (weights.transpose(0, 1) @ far.to(weights)).double().sum(0),
        "far_rows": far.any(1).sum(0).expand(heads, -1),
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


def measure_queries(query: Tensor, kv_heads: int) -> dict[str, Tensor]:
    """Sums of `q q^T` over query rows `[H, Q, D]` and the heads of each KV head's group: what key errors cost."""
    grouped = query.float().unflatten(0, (kv_heads, -1)).flatten(1, 2)
    return {
        "query_gram": (grouped.mT @ grouped).double(),
        "query_rows": torch.full((kv_heads,), float(grouped.shape[1])),
    }


def measure_keys(key: Tensor, value: Tensor, sink: Tensor) -> dict[str, Tensor]:
    """Ranges and the mean of keys and values `[KVH, L, D]` of real tokens; `sink` `[L]` marks the sink tokens."""
    rest_k, rest_v = key[:, ~sink].float(), value[:, ~sink].float()
    sink_k, sink_v = key[:, sink].float(), value[:, sink].float()
    fields = {
        "key_sum": rest_k.double().sum(1),
        "key_count": torch.full((key.shape[0],), float(rest_k.shape[1])),
    }
    if rest_k.shape[1]:
        low, high = rest_k.amin(1), rest_k.amax(1)
        fields |= {"key_max": high, "key_min_negated": -low, "value_amax": rest_v.abs().amax(1)}
    if sink_k.shape[1]:
        low, high = sink_k.amin(1), sink_k.amax(1)
        fields |= {"key_sink_max": high, "key_sink_min_negated": -low, "value_sink_amax": sink_v.abs().amax(1)}
    return fields


@dataclass(frozen=True)
class CodedPart:
    """Whole blocks of one sequence's keys and values `[KVH, N, D]` as codes of one width give them back.

    They begin at column `start`; `field`, `width` say where their error is summed.
    """

    field: str
    width: int
    start: int
    key: Tensor
    value: Tensor


def code_window(key: Tensor, value: Tensor, sink: tuple[int, int], end: int) -> list[CodedPart]:
    """What a cache would code of one sequence `[KVH, L, D]`, at each width, with the sink tokens exact and without.

    `sink` as in `measure_rows`; real tokens end before column `end`. Empty where no block after the sink tokens is old
    enough to be coded, or where the head size cannot be coded.
    """
    if end - RESIDUAL - sink[1] < BLOCK or key.shape[-1] % CODED_MULTIPLE or value.shape[-1] % CODED_MULTIPLE:
        return []
    with _threads_for(key.numel()):
        return _code_window(key, value, sink, end)


def _code_window(key: Tensor, value: Tensor, sink: tuple[int, int], end: int) -> list[CodedPart]:
    parts = []
    for width, bits in enumerate(WIDTHS):
        v = coded_values(value[:, sink[0] : end], bits)  # coded per token, so the same wherever a block begins
        for field, start in (("kv_error", sink[1]), ("kv_error_no_sink", sink[0])):
            blocks = (end - RESIDUAL - start) // BLOCK
            k = coded_keys(key[:, start : start + blocks * BLOCK].unflatten(1, (blocks, BLOCK)), bits).flatten(1, 2)
            parts.append(CodedPart(field, width, start, k, v[:, start - sink[0] :][:, : blocks * BLOCK]))
    return parts


@contextlib.contextmanager
def _threads_for(numbers: int) -> Iterator[None]:
    """One thread for small tensors: waking others costs more than they save (measured: 2.7 times the time)."""
    before = torch.get_num_threads()
    if numbers >= SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    rows: Tensor,
    parts: list[CodedPart],
    logits: Callable[[Tensor, Tensor], Tensor],
    gram: Tensor,
    energy: Tensor,
    s_aux: Tensor | None = None,
) -> dict[str, Tensor]:
    """Error of the layer's output when the keys and values of one KV head alone are held as codes.

    A query sees as codes those blocks of `parts` that lie wholly `RESIDUAL` or more positions before it, and all else
    exact. `kv_error [KVH, widths]` (sink tokens exact) and `kv_error_no_sink` (blocks from the first token on) are
    squared errors of the attention output after the output projection. Only rows that see a coded key count:
    `kv_rows` is their number, `kv_energy [KVH]` the layer's squared output in them.

    Args:
        query, key, value: `[H, Q, D]`, `[KVH, L, D]` in float32.
        visible, rows, s_aux: as in `measure_rows`.
        parts: of `code_window`, not empty.
        logits: scaled and soft-capped `[H, Q, L]` of queries and keys.
        gram: `[KVH, G D, G D]` of the output projection's columns of each KV head's G query heads.
        energy: `[Q]` squared output of the layer.
    """
    kv_heads, length = key.shape[:2]
    columns = torch.arange(length, device=key.device)
    counted = (visible & _old(rows, columns, parts[0].start)).any(-1)
    if not counted.any():
        return {}
    query, visible, rows, energy = query[:, counted], visible[counted], rows[counted], energy[counted]

    def weights(s: Tensor) -> Tensor:
        if s_aux is None:
            return s.softmax(-1)
        return torch.cat([s, s_aux.to(s)[:, None, None].expand(*s.shape[:2], 1)], -1).softmax(-1)[..., :-1]

    def product(p: Tensor, v: Tensor) -> Tensor:
        """`[KVH, G Q, D]`: the rows of a KV head's query heads stacked."""
        return p.reshape(kv_heads, -1, p.shape[-1]) @ v

    s = logits(query, key).masked_fill_(~visible, -torch.inf)
    exact = product(weights(s), value)
    errors = {
        name: torch.zeros(kv_heads, len(WIDTHS), dtype=torch.float64) for name in ("kv_error", "kv_error_no_sink")
    }
    for part in parts:
        where = slice(part.start, part.start + part.key.shape[1])
        old = _old(rows, columns[where], part.start)
        coded = s.clone()
        coded[..., where] = torch.where(old & visible[:, where], logits(query, part.key), s[..., where])
        p = weights(coded)
        output = product(p, value) + product(p[..., where] * old, part.value - value[:, where])
        delta = (output - exact).unflatten(1, (-1, len(rows))).transpose(1, 2).flatten(2)  # [KVH, Q, G D]
        errors[part.field][:, part.width] = ((delta @ gram) * delta).sum((1, 2)).double().clamp(min=0)
    errors["kv_rows"] = torch.full((kv_heads,), float(len(rows)))
    errors["kv_energy"] = energy.double().sum().expand(kv_heads)
    return errors


def _old(rows: Tensor, columns: Tensor, start: int) -> Tensor:
    """`[Q, N]`: whether, to a query at `rows`, `columns` lie in a block (from `start` on) old enough to be coded."""
    stop = start + (rows + 1 - RESIDUAL - start) // BLOCK * BLOCK
    return (columns >= start) & (columns < stop[:, None])
