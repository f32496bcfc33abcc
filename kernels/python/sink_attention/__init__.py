"""`quantsink::sink_attention`: attention with one route per head (`int8`, `sink`, `native`) in one call."""

import torch
from torch import Tensor

from quantsink.kernels.dispatch import check_devices
from quantsink.kernels.sink_attention import cpu
from quantsink.kernels.sink_attention import triton_backend as triton_backend  # registers CUDA
from quantsink.kernels.sink_attention.reference import Route, Rule, reference

__all__ = ["Route", "sink_attention"]

WEIGHT_SCALES = ("block", "row", "fixed")

torch.library.define(
    "quantsink::sink_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor routes, Tensor key_mean, Tensor? sink_start,"
    " Tensor? clip_row, Tensor? clip_absolute, Tensor? s_aux, *, float scaling, int sink_size, bool causal,"
    " str weight_scale, int block, float softcap) -> Tensor",
)


@torch.library.impl("quantsink::sink_attention", "CompositeExplicitAutograd")
def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    key_mean: Tensor,
    sink_start: Tensor | None,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    scaling: float,
    sink_size: int,
    causal: bool,
    weight_scale: str,
    block: int,
    softcap: float,
) -> Tensor:
    rule = Rule(scaling, sink_size, causal, weight_scale, block, softcap, clip_row, clip_absolute, s_aux)
    # Autocast would round integer sums to 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        return reference(query, key, value, mask, routes, key_mean, sink_start, rule)


@torch.library.impl("quantsink::sink_attention", "CPU")
def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    key_mean: Tensor,
    sink_start: Tensor | None,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    scaling: float,
    sink_size: int,
    causal: bool,
    weight_scale: str,
    block: int,
    softcap: float,
) -> Tensor:
    rule = Rule(scaling, sink_size, causal, weight_scale, block, softcap, clip_row, clip_absolute, s_aux)
    return cpu.attend(query, key, value, mask, routes, key_mean, sink_start, rule)


@torch.library.register_fake("quantsink::sink_attention")
def _fake(query: Tensor, key: Tensor, value: Tensor, *tables: Tensor | None, **_: object) -> Tensor:
    check_devices(torch.ops.quantsink.sink_attention.default, (query, key, value, *tables))
    batch, heads, queries = query.shape[:3]
    return query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)


def sink_attention(
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
    """Attention in which every head takes its own route. The mathematics: docs/design.md, "Sink-split attention".

    Args:
        query: `[B, H, Lq, D]`.
        key, value: `[B, KVH, Lk, D]` and `[B, KVH, Lk, Dv]`, not repeated; H is a multiple of KVH.
        routes: `[H]` integers, a `Route` each.
        key_mean: `[KVH, D]`, the mean key without sink tokens. Taken off before quantization, put back in the scores.
        scaling: factor on q.k, before everything else.
        mask: boolean `[B or 1, 1, Lq, Lk]`, true = visible. None: causal where `causal`, the last query sees all.
        sink_size: sink tokens that the `sink` route keeps exact.
        sink_start: `[B]` column of each row's first real token, those before it are padding and never seen; negative:
            that many keys have left a sliding cache. None: 0 everywhere.
        weight_scale: `block` (a scale per row and `block` keys), `row`, or `fixed` (1/127, what naive 8-bit does).
        softcap: scores become `tanh(s / softcap) * softcap`.
        clip_row: `[H]`; a score further than this below its row's maximum gets weight 0. inf = off.
        clip_absolute: `[H]`; scores are clamped to +- this. inf = off.
        s_aux: `[H]` learned sink logits that stay in the denominator (gpt-oss).

    Returns:
        `[B, H, Lq, Dv]` in the type of `query`. A row without visible keys is zero.

    Raises:
        ValueError: shapes, routes or options that do not fit together; an input that needs a gradient.
    """
    _check(query, key, value, routes, key_mean, mask, sink_start)
    check_limits("sink_attention", query.shape[1], softcap, clip_row, clip_absolute, s_aux)
    check_gradient("sink_attention", query, key, value, s_aux)
    if weight_scale not in WEIGHT_SCALES:
        raise ValueError(f"sink_attention: weight_scale {weight_scale!r} is not one of {', '.join(WEIGHT_SCALES)}")
    if block < 1 or sink_size < 0:
        raise ValueError(f"sink_attention: block {block} must be at least 1 and sink_size {sink_size} not negative")
    result: Tensor = torch.ops.quantsink.sink_attention(
        query,
        key,
        value,
        mask,
        routes,
        key_mean,
        sink_start,
        clip_row,
        clip_absolute,
        s_aux,
        scaling=scaling,
        sink_size=sink_size,
        causal=causal,
        weight_scale=weight_scale,
        block=block,
        softcap=softcap or 0.0,
    )
    return result


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    routes: Tensor,
    key_mean: Tensor,
    mask: Tensor | None,
    sink_start: Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"sink_attention: {name} must be [B, heads, L, D], not {list(tensor.shape)}")
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"sink_attention: {heads} query heads cannot share {kv_heads} KV heads evenly")
    if keys == 0:
        raise ValueError("sink_attention: there are no keys")
    _expect("key", key, (batch, kv_heads, keys, head_dim))
    _expect("value", value, (batch, kv_heads, keys, value.shape[3]))
    _expect("routes", routes, (heads,))
    _expect("key_mean", key_mean, (kv_heads, head_dim))
    if sink_start is not None:
        _expect("sink_start", sink_start, (batch,))
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"sink_attention: the mask must be boolean (true = visible), not {mask.dtype}")
        _expect("mask", mask, (1 if mask.shape[0] == 1 else batch, 1, queries, keys))


def check_limits(
    operator: str,
    heads: int,
    softcap: float | None,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
) -> None:
    for name, tensor in (("clip_row", clip_row), ("clip_absolute", clip_absolute), ("s_aux", s_aux)):
        if tensor is not None and tuple(tensor.shape) != (heads,):
            raise ValueError(f"{operator}: {name} must be {[heads]}, not {list(tensor.shape)}")
    if softcap is not None and softcap < 0:
        raise ValueError(f"{operator}: softcap {softcap} must not be negative")


def check_gradient(operator: str, *tensors: Tensor | None) -> None:
    """Codes have no gradient, and a backward pass that leaves one out would go unnoticed."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(f"{operator}: it has no gradient; call it under torch.no_grad() or on detached tensors")


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"sink_attention: {name} must be {list(shape)}, not {list(tensor.shape)}")
