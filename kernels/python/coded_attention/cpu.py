"""`quantsink::coded_attention` in C++ (kernels/csrc)."""

import torch
from torch import Tensor

from quantsink.kernels import cpu
from quantsink.kernels.coded_attention.call import Call


def attend(call: Call) -> Tensor | None:
    """Attention output `[B, H, Lq, Dv]`; None where the reference computes the call, or says what does not fit.

    A decoding step calls this once per layer with cold caches, so it does no more than it must: C++ compares shapes.
    """
    query, sink_key, sink_value, key, value, banks, heads, rows, routes, *limits, bits, scaling, softcap = call
    kernels = cpu.library()
    if kernels is None or query.dtype == torch.float64 or scaling <= 0 or query.numel() == 0:
        return None
    if heads.dtype != torch.int64 or rows.dtype != torch.int64 or any(bank.dtype != torch.uint8 for bank in banks):
        return None
    inputs = (query, sink_key, sink_value, key, value)
    if not all(x.dim() == 4 for x in inputs):
        return None
    dtype = cpu.working_type(*inputs)
    batch, query_heads, queries, _ = query.shape
    out = cpu.empty(batch, query_heads, queries, value.shape[-1], dtype)
    # Kept alive until the call is over, as are the tables.
    views = [*(cpu.dense(x, dtype) for x in inputs), out]
    tables = [heads.contiguous(), rows.contiguous(), cpu.route_bytes(routes)]
    bounds = [None if x is None else x.float().contiguous() for x in limits]
    done = kernels.coded_attention(
        [[x.data_ptr(), *x.shape, *x.stride()] for x in views],
        dtype == torch.bfloat16,
        [[x.data_ptr(), *x.shape, *x.stride()] for x in banks],
        bits,
        [[x.data_ptr(), *x.shape] for x in tables],
        [[] if x is None else [x.data_ptr(), *x.shape] for x in bounds],
        scaling,
        softcap,
        torch.get_num_threads(),
        cpu.poison,
    )
    return cpu.typed(out, query.dtype) if done else None
