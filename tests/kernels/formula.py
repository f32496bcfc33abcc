"""Sink attention in float64, straight from the formula of docs/design.md and one row at a time."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantsink.kernels import Route, sink_attention

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE


def rounded(x: np.ndarray, axis: int) -> np.ndarray:
    """The nearest multiples of max|x| / 127 along `axis`."""
    top = np.abs(x).max(axis, keepdims=True)
    scale = np.where(top == 0, 1, top / 127)
    return np.asarray(np.round(x / scale) * scale)


def naive_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    sinks: int,
    mean: np.ndarray,
    scaling: float,
    weight_scale: str,
    block: int,
    softcap: float | None,
    clip_row: float,
    clip_absolute: float,
    aux: float,
) -> np.ndarray:
    """One head, its first `sinks` keys exact: q `[Lq, D]`, k, v `[Lk, D]`, visible `[Lq, Lk]` -> `[Lq, D]`."""
    keys = len(k)
    k_8 = rounded(k - mean, axis=1)
    rest = v.copy()
    rest[:sinks] = 0
    width = block if weight_scale == "block" else keys
    blocks = [slice(first, min(first + width, keys)) for first in range(0, keys, width)]
    v_8 = np.concatenate([rounded(rest[b], axis=0) for b in blocks])

    out = np.zeros((len(q), v.shape[1]))
    for i, row in enumerate(q):
        s = (k_8 @ rounded(row, axis=0) + row @ mean) * scaling
        s[:sinks] = k[:sinks] @ row * scaling
        if softcap:
            s = np.tanh(s / softcap) * softcap
        s = np.clip(s, -clip_absolute, clip_absolute)
        s[~visible[i]] = -np.inf
        if not visible[i].any():
            continue
        s[s < s.max() - clip_row] = -np.inf
        top = s.max()
        weight = np.exp(s - top)
        total = weight.sum() + np.exp(aux - top)
        grid = np.zeros(keys)
        rest_total = weight[sinks:].sum()
        for b in blocks:
            inside = np.arange(keys)[b]
            inside = inside[inside >= sinks]
            if not len(inside) or weight[inside].max() == 0:
                continue
            step = rest_total / 127 if weight_scale == "fixed" else weight[inside].max() / 127
            grid[inside] = np.round(weight[inside] / step) * step
        out[i] = (weight[:sinks] @ v[:sinks] + grid @ v_8) / total
    return out


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    routes: Tensor,
    key_mean: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = True,
    sink_size: int = 1,
    sink_start: Tensor | None = None,
    weight_scale: str = "block",
    block: int = 64,
    softcap: float | None = None,
    clip_row: Tensor | None = None,
    clip_absolute: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    out = torch.empty(batch, heads, queries, value.shape[3], dtype=torch.double)
    for b in range(batch):
        start = 0 if sink_start is None else int(sink_start[b])
        visible = np.ones((queries, keys), dtype=bool)
        if mask is not None:
            visible = mask[b if mask.shape[0] > 1 else 0, 0].numpy()
        elif causal:
            visible = np.tril(visible, keys - queries)
        visible = visible[:, max(start, 0) :]
        for h in range(heads):
            group = h // (heads // kv_heads)
            k, v = (x[b, group, max(start, 0) :].double().numpy().copy() for x in (key, value))
            k[~visible.any(0)] = v[~visible.any(0)] = 0
            sinks = {INT8: 0, SINK: max(sink_size + min(start, 0), 0), NATIVE: len(k)}[Route(int(routes[h]))]
            out[b, h] = torch.from_numpy(
                naive_head(
                    query[b, h].double().numpy(),
                    k,
                    v,
                    visible,
                    min(sinks, len(k)),
                    key_mean[group].double().numpy(),
                    scaling,
                    weight_scale,
                    block,
                    softcap,
                    float("inf") if clip_row is None else float(clip_row[h]),
                    float("inf") if clip_absolute is None else float(clip_absolute[h]),
                    -float("inf") if s_aux is None else float(s_aux[h]),
                )
            )
    return out


def case(
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 40,
    keys: int | None = None,
    dim: int = 16,
    batch: int = 1,
    routes: list[int] | None = None,
    dtype: torch.dtype = torch.double,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments with keys off centre, one channel large, as models have them; routes mixed at random."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.double)  # noqa: E731
    key = draw(batch, kv_heads, keys, dim) + 2 * draw(1, kv_heads, 1, dim)
    key[..., 0] *= 5
    mixed = torch.randint(0, 3, (heads,), generator=generator) if routes is None else torch.tensor(routes)
    return {
        "query": draw(batch, heads, queries, dim).to(dtype),
        "key": key.to(dtype),
        "value": draw(batch, kv_heads, keys, dim).to(dtype),
        "routes": mixed.to(torch.uint8),
        "key_mean": key[:, :, min(1, keys - 1) :].mean((0, 2)),
        "scaling": dim**-0.5,
    }


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


def left_padded(start: Tensor, length: int) -> Tensor:
    return causal_mask(length, length) & (torch.arange(length) >= start[:, None])[:, None, None]


def assert_as_naive(arguments: dict[str, Any], **options: Any) -> Tensor:
    out = sink_attention(**arguments, **options)
    torch.testing.assert_close(out, naive(**arguments, **options), rtol=1e-9, atol=1e-11)
    return out
