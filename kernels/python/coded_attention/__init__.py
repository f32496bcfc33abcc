"""`quantsink::coded_attention`: a few queries over keys and values that lie in memory as codes of 8, 4, 3 or 2 bits.

They are read in place, as a quantized KV cache needs it: sink tokens and the newest tokens exact, the rest codes, no
full-precision copy.
"""

from typing import Any

import torch
from torch import Tensor

from quantsink.kernels.coded_attention import cpu
from quantsink.kernels.coded_attention.cache import CodedKV, check
from quantsink.kernels.coded_attention.codes import BLOCK, Record, decode, encode
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.dispatch import check_devices, direct
from quantsink.kernels.sink_attention import check_gradient, check_limits
from quantsink.kernels.sink_attention.reference import Rule

__all__ = ["BLOCK", "CodedKV", "Record", "coded_attention", "decode", "encode"]

torch.library.define(
    "quantsink::coded_attention",
    "(Tensor query, Tensor sink_key, Tensor sink_value, Tensor key, Tensor value, Tensor[] banks, Tensor heads,"
    " Tensor rows, Tensor routes, Tensor? clip_row, Tensor? clip_absolute, Tensor? s_aux, *, int[] bits, float scaling,"
    " float softcap) -> Tensor",
)


def _reference(
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
    codes = CodedKV(sink_key, sink_value, key, value, tuple(banks), tuple(bits), heads, rows)
    check(codes, query, routes)
    check_limits("coded_attention", query.shape[1], softcap, clip_row, clip_absolute, s_aux)
    rule = Rule(scaling, 0, True, "block", BLOCK, softcap, clip_row, clip_absolute, s_aux)
    with torch.autocast(query.device.type, enabled=False):
        return reference(query, codes, routes, rule)


def _cpu(*tensors: Any, bits: list[int], scaling: float, softcap: float) -> Tensor:
    out = cpu.attend(*tensors, bits=bits, scaling=scaling, softcap=softcap)
    return _reference(*tensors, bits=bits, scaling=scaling, softcap=softcap) if out is None else out


torch.library.impl("quantsink::coded_attention", "CompositeExplicitAutograd", _reference)
torch.library.impl("quantsink::coded_attention", "CPU", _cpu)


_operator = torch.ops.quantsink.coded_attention.default


@torch.library.register_fake("quantsink::coded_attention")
def _fake(
    query: Tensor, sink_key: Tensor, sink_value: Tensor, key: Tensor, value: Tensor, *rest: object, **_: object
) -> Tensor:
    check_devices(_operator, (query, sink_key, sink_value, key, value, *rest), anywhere=("heads", "rows"))
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
    check_gradient("coded_attention", query, codes.sink_key, codes.sink_value, codes.key, codes.value, s_aux)
    tensors = (
        query, codes.sink_key, codes.sink_value, codes.key, codes.value, codes.banks, codes.heads, codes.rows, routes,
        clip_row, clip_absolute, s_aux,
    )  # fmt: skip
    softcap = softcap or 0.0
    if direct(*tensors[:5], *codes.banks, *tensors[6:]):
        out = cpu.attend(*tensors, bits=codes.bits, scaling=scaling, softcap=softcap)
        if out is not None:
            return out
    result: Tensor = _operator(*tensors, bits=codes.bits, scaling=scaling, softcap=softcap)
    return result
