"""`quantsink::sink_attention` in C++ (kernels/csrc)."""

import torch
from torch import Tensor

from quantsink.kernels import cpu
from quantsink.kernels.cpu import address, dense
from quantsink.kernels.sink_attention.call import Call

BLOCK = 64
"""Keys that share a scale in the kernels."""


def attend(call: Call) -> Tensor | None:
    """Attention output `[B, H, Lq, Dv]`; None for a call that the reference has to compute."""
    kernels = cpu.library() if applies(call) else None
    if kernels is None:
        return None
    dtype = cpu.working_type(call.query, call.key, call.value)
    q, k, v = dense(call.query, dtype), dense(call.key, dtype), dense(call.value, dtype)
    batch, heads, queries, head_dim = q.shape
    out = cpu.empty(batch, heads, queries, v.shape[3], dtype)
    mask = call.mask
    mask = None if mask is None else mask if mask.stride(3) == 1 else mask.contiguous()
    # Kept alive until the call is over.
    routes = cpu.route_bytes(call.routes)
    mean = call.key_mean.float().contiguous()
    start = None if call.sink_start is None else call.sink_start.long().contiguous()
    bounds = [None if x is None else x.float().contiguous() for x in (call.clip_row, call.clip_absolute, call.s_aux)]
    kernels.sink_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        (batch, heads, k.shape[1], queries, k.shape[2], head_dim, v.shape[3]),
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        dtype == torch.bfloat16,
        address(mask),
        (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)),
        routes.data_ptr(),
        mean.data_ptr(),
        address(start),
        *(address(bound) for bound in bounds),
        call.scaling,
        call.softcap,
        call.sink_size,
        call.causal,
        torch.get_num_threads(),
        cpu.poison,
    )
    return cpu.typed(out, call.query.dtype)


def applies(call: Call) -> bool:
    """Whether the kernels compute this call: blocks of 64 and up to 32 bits."""
    return (
        call.weight_scale == "block"
        and call.block == BLOCK
        and call.scaling > 0
        and call.query.numel() > 0
        and call.value.numel() > 0
        and all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in (call.query, call.key, call.value))
    )
