"""`quantsink::coded_attention`: a few queries over keys and values that lie in memory as codes of 8, 4, 3 or 2 bits.

They are read in place, as a quantized KV cache needs it: sink tokens and the newest tokens exact, the rest codes, no
full-precision copy.
"""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention import cpu
from quantsink.kernels.coded_attention.cache import CodedKV, check
from quantsink.kernels.coded_attention.codes import BLOCK, Record, decode, encode
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.sink_attention import check_gradient, check_limits
from quantsink.kernels.sink_attention.reference import Rule

__all__ = ["BLOCK", "CodedKV", "Record", "coded_attention", "decode", "encode"]

torch.library.define(
    "quantsink::coded_attention",
    "(Tensor query, Tensor sink_key, Tensor sink_value, Tensor key, Tensor value, Tensor[] banks, Tensor heads,"
    " Tensor rows, Tensor routes, Tensor? clip_row, Tensor? clip_absolute, Tensor? s_aux, *, int[] bits, float scaling,"
    " float softcap) -> Tensor",
)


@torch.library.impl("quantsink::coded_attention", "CompositeExplicitAutograd")
def _attend(
    query: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    key: Tensor,
    value: Tensor,
    banks: list[Tensor],
    heads: Tensor,
    rows: Tensor,
    routes: Tensor,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    bits: list[int],
    scaling: float,
    softcap: float,
) -> Tensor:
    if query.is_cpu:
        out = cpu.attend(
            query, sink_key, sink_value, key, value, banks, heads, rows, routes, clip_row, clip_absolute, s_aux, bits,
            scaling, softcap,
        )  # fmt: skip
        if out is not None:
            return out
    codes = CodedKV(sink_key, sink_value, key, value, tuple(banks), tuple(bits), heads, rows)
    rule = Rule(scaling, 0, True, "block", BLOCK, softcap, clip_row, clip_absolute, s_aux)
    with torch.autocast(query.device.type, enabled=False):
        return reference(query, codes, routes, rule)


@torch.library.register_fake("quantsink::coded_attention")
def _fake(
    query: Tensor, sink_key: Tensor, sink_value: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> Tensor:
    batch, heads, queries = query.shape[:3]
    return query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)


def coded_attention(
    query: Tensor,
    codes: CodedKV,
    *,
    routes: Tensor,
    scaling: float,
    softcap: float | None = None,
    clip_row: Tensor | None = None,
    clip_absolute: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of the newest `Lq` tokens over a coded cache that already holds them.

    Sinks and blocks are visible to every query; of the newest tokens' R columns query i sees those up to R - Lq + i.

    Args:
        query: `[B, H, Lq, D]`; H is a multiple of the cache's KV heads. Meant for few queries: each reads the codes.
        codes: the cache; its sinks are exact for every head, so `int8` and `sink` routes are the same here.
        routes: `[H]`, a `Route` each; `native` computes with the numbers that the codes stand for.
        scaling, softcap, clip_row, clip_absolute, s_aux: as in `sink_attention`.

    Returns:
        `[B, H, Lq, Dv]` in the type of `query`. A row without visible keys is zero.

    Raises:
        ValueError: shapes or types that do not fit together; an input that needs a gradient.
    """
    batch, heads, _, head_dim = query.shape
    check(codes, batch, heads, head_dim)
    if routes.shape != (heads,):
        raise ValueError(f"coded_attention: routes must be [{heads}], not {list(routes.shape)}")
    check_limits("coded_attention", heads, softcap, clip_row, clip_absolute, s_aux)
    check_gradient("coded_attention", query, codes.sink_key, codes.sink_value, codes.key, codes.value, s_aux)
    result: Tensor = torch.ops.quantsink.coded_attention(
        query,
        codes.sink_key,
        codes.sink_value,
        codes.key,
        codes.value,
        codes.banks,
        codes.heads,
        codes.rows,
        routes,
        clip_row,
        clip_absolute,
        s_aux,
        bits=codes.bits,
        scaling=scaling,
        softcap=softcap or 0.0,
    )
    return result
