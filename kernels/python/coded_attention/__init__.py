"""`quantsink::coded_attention`: a few queries over keys and values that lie in memory as codes of 8, 4, 3 or 2 bits.

They are read in place, as a quantized KV cache needs it: sink tokens and the newest tokens exact, the rest codes, no
full-precision copy.
"""

import torch
from torch import Tensor

from quantsink.kernels.attention import check_gradient, check_limits
from quantsink.kernels.coded_attention import cpu
from quantsink.kernels.coded_attention.cache import CodedKV, check
from quantsink.kernels.coded_attention.call import SCHEMA, Call
from quantsink.kernels.coded_attention.codes import BLOCK, Record, decode, encode
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.dispatch import check_devices, direct, register

__all__ = ["BLOCK", "CodedKV", "Record", "coded_attention", "decode", "encode"]


def _reference(call: Call) -> Tensor:
    check(call.codes, call.query, call.routes)
    check_limits("coded_attention", call)
    with torch.autocast(call.query.device.type, enabled=False):
        return reference(call)


def _cpu(call: Call) -> Tensor:
    out = cpu.attend(call)
    return _reference(call) if out is None else out


def _fake(call: Call) -> Tensor:
    check_devices(_operator, call, anywhere=("heads", "rows"))
    batch, heads, queries = call.query.shape[:3]
    return call.query.new_empty((batch, queries, heads, call.value.shape[-1])).transpose(1, 2)


_operator = register("coded_attention", SCHEMA, Call, reference=_reference, cpu=_cpu, fake=_fake)


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
    call = Call.of(query, codes, routes, scaling, softcap, clip_row, clip_absolute, s_aux)
    if direct(*call[:5], *codes.banks, *call[6:12]):
        out = cpu.attend(call)
        if out is not None:
            return out
    result: Tensor = _operator(*call)
    return result
