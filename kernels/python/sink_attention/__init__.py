"""`quantsink::sink_attention`: attention with one route per head (`int8`, `sink`, `native`) in one call."""

import torch
from torch import Tensor

from quantsink.kernels.attention import Route, check_gradient
from quantsink.kernels.dispatch import check_devices, register
from quantsink.kernels.sink_attention import cpu, triton_backend
from quantsink.kernels.sink_attention.call import SCHEMA, Call
from quantsink.kernels.sink_attention.reference import reference

__all__ = ["Route", "sink_attention"]


def _reference(call: Call) -> Tensor:
    # Autocast would round integer sums to 16 bits.
    with torch.autocast(call.query.device.type, enabled=False):
        return reference(call)


def _cpu(call: Call) -> Tensor:
    out = cpu.attend(call)
    return _reference(call) if out is None else out


def _cuda(call: Call) -> Tensor:
    out = triton_backend.attend(call)
    return _reference(call) if out is None else out


def _fake(call: Call) -> Tensor:
    check_devices(_operator, call)
    batch, heads, queries = call.query.shape[:3]
    return call.query.new_empty((batch, queries, heads, call.value.shape[-1])).transpose(1, 2)


_operator = register("sink_attention", SCHEMA, Call, reference=_reference, cpu=_cpu, cuda=_cuda, fake=_fake)


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
        key_mean: `[KVH, D]`, the mean key without sink tokens. Subtracted before quantization, added to the scores.
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
    call = Call(
        query, key, value, mask, routes, key_mean, sink_start, clip_row, clip_absolute, s_aux,
        scaling, sink_size, causal, weight_scale, block, softcap or 0.0,
    )  # fmt: skip
    call.check()
    check_gradient("sink_attention", query, key, value, s_aux)
    result: Tensor = _operator(*call)
    return result
