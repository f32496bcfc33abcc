"""`quantsink::coded_attention`: a few queries over keys and values that lie in memory as 8- or 4-bit codes.

They are read in place, as a quantized KV cache needs it: sink tokens and the newest tokens exact, the rest codes, no
full-precision copy.
"""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention import cpu
from quantsink.kernels.coded_attention.codes import BLOCK, GROUP, CodedKV, check
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.sink_attention import check_gradient, check_limits
from quantsink.kernels.sink_attention.reference import Rule

__all__ = ["CodedKV", "coded_attention"]

torch.library.define(
    "quantsink::coded_attention",
    "(Tensor query, Tensor exact_key, Tensor exact_value, Tensor key_codes, Tensor key_scale, Tensor key_zero,"
    " Tensor value_codes, Tensor value_scale, Tensor value_zero, Tensor? mask, Tensor routes, Tensor? clip_row,"
    " Tensor? clip_absolute, Tensor? s_aux, *, int bits, int sinks, float scaling, bool causal, float softcap)"
    " -> Tensor",
)


@torch.library.impl("quantsink::coded_attention", "CompositeExplicitAutograd")
def _reference(
    query: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    bits: int,
    sinks: int,
    scaling: float,
    causal: bool,
    softcap: float,
) -> Tensor:
    codes = CodedKV(
        bits, sinks, exact_key, exact_value, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero
    )
    rule = Rule(scaling, sinks, causal, "block", BLOCK, softcap, clip_row, clip_absolute, s_aux)
    if query.device.type == "cpu":
        return cpu.attend(query, codes, mask, routes, rule)
    with torch.autocast(query.device.type, enabled=False):
        return reference(query, codes, mask, routes, rule)


@torch.library.register_fake("quantsink::coded_attention")
def _fake(query: Tensor, exact_key: Tensor, exact_value: Tensor, *_: object, **__: object) -> Tensor:
    batch, heads, queries = query.shape[:3]
    return query.new_empty((batch, queries, heads, exact_value.shape[-1])).transpose(1, 2)


def coded_attention(
    query: Tensor,
    codes: CodedKV,
    *,
    routes: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
    clip_row: Tensor | None = None,
    clip_absolute: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of the newest `Lq` tokens over a coded cache that already holds them.

    Args:
        query: `[B, H, Lq, D]`; H is a multiple of the cache's KV heads. Meant for few queries: each reads the codes.
        codes: the cache; its sinks are exact for every head, so `int8` and `sink` routes are the same here.
        routes: `[H]`, a `Route` each; `native` computes with the numbers that the codes stand for.
        scaling, softcap, clip_row, clip_absolute, s_aux: as in `sink_attention`.
        mask: boolean `[B or 1, 1, Lq, L]` over all L keys in their order, true = visible. None: causal where `causal`.

    Returns:
        `[B, H, Lq, Dv]` in the type of `query`. A row without visible keys is zero.

    Raises:
        ValueError: shapes or types that do not fit together; an input that needs a gradient.
    """
    _check(query, codes, routes, mask)
    check_limits("coded_attention", query.shape[1], softcap, clip_row, clip_absolute, s_aux)
    check_gradient("coded_attention", query, codes.exact_key, codes.exact_value, s_aux)
    result: Tensor = torch.ops.quantsink.coded_attention(
        query,
        codes.exact_key,
        codes.exact_value,
        codes.key_codes,
        codes.key_scale,
        codes.key_zero,
        codes.value_codes,
        codes.value_scale,
        codes.value_zero,
        mask,
        routes,
        clip_row,
        clip_absolute,
        s_aux,
        bits=codes.bits,
        sinks=codes.sinks,
        scaling=scaling,
        causal=causal,
        softcap=softcap or 0.0,
    )
    return result


def _check(query: Tensor, codes: CodedKV, routes: Tensor, mask: Tensor | None) -> None:
    batch, heads, queries, head_dim = query.shape
    kv_heads, exact = codes.exact_key.shape[1:3]
    value_dim, blocks = codes.exact_value.shape[3], codes.key_codes.shape[2]
    check(codes.bits, head_dim, value_dim)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"coded_attention: {heads} query heads cannot share {kv_heads} KV heads evenly")
    if not 0 <= codes.sinks <= exact:
        raise ValueError(f"coded_attention: {codes.sinks} sinks among {exact} exact keys")
    groups = -(-value_dim // GROUP)
    expected = {
        "exact_key": (codes.exact_key, (exact, head_dim)),
        "exact_value": (codes.exact_value, (exact, value_dim)),
        "key_codes": (codes.key_codes, (blocks, BLOCK * head_dim * codes.bits // 8)),
        "key_scale": (codes.key_scale, (blocks, head_dim)),
        "key_zero": (codes.key_zero, (blocks, head_dim)),
        "value_codes": (codes.value_codes, (blocks, BLOCK * value_dim * codes.bits // 8)),
        "value_scale": (codes.value_scale, (blocks, groups, BLOCK)),
        "value_zero": (codes.value_zero, (blocks, groups, BLOCK)),
    }
    for name, (tensor, rest) in expected.items():
        if tuple(tensor.shape) != (batch, kv_heads, *rest):
            raise ValueError(f"coded_attention: {name} must be {[batch, kv_heads, *rest]}, not {list(tensor.shape)}")
    for name in ("key_codes", "value_codes"):
        if getattr(codes, name).dtype != torch.uint8:
            raise ValueError(f"coded_attention: {name} must be uint8, not {getattr(codes, name).dtype}")
    if tuple(routes.shape) != (heads,):
        raise ValueError(f"coded_attention: routes must be [{heads}], not {list(routes.shape)}")
    if mask is not None and (
        mask.dtype != torch.bool
        or tuple(mask.shape) not in ((batch, 1, queries, len(codes)), (1, 1, queries, len(codes)))
    ):
        raise ValueError(
            f"coded_attention: the mask must be boolean {[batch, 1, queries, len(codes)]}, not {mask.dtype} "
            f"{list(mask.shape)}"
        )
