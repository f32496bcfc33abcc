"""`quantsink::sink_attention` on the CPU: the C++ kernels of kernels/csrc where they apply, the reference elsewhere."""

import torch
from torch import Tensor

from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention.reference import Route, Rule, reference

BLOCK = 64
"""Keys that share a scale in the kernels."""

poison = False
"""Fill the kernels' workspaces with NaN first; tests set it."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    key_mean: Tensor,
    sink_start: Tensor | None,
    rule: Rule,
) -> Tensor:
    """As `reference`, whose arguments these are."""
    kernels = library() if applies(query, key, value, rule) else None
    if kernels is None:
        # Autocast would round integer sums to 16 bits.
        with torch.autocast("cpu", enabled=False):
            return reference(query, key, value, mask, routes, key_mean, sink_start, rule)
    dtype = working_type(query, key, value)
    q, k, v = dense(query, dtype), dense(key, dtype), dense(value, dtype)
    batch, heads, queries, head_dim = q.shape
    out = empty(batch, heads, queries, v.shape[3], dtype)
    mask = None if mask is None else mask if mask.stride(3) == 1 else mask.contiguous()
    # Kept alive until the call is over.
    routes = route_bytes(routes)
    mean = key_mean.float().contiguous()
    start = None if sink_start is None else sink_start.long().contiguous()
    bounds = [None if x is None else x.float().contiguous() for x in (rule.clip_row, rule.clip_absolute, rule.s_aux)]
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
        rule.scaling,
        rule.softcap,
        rule.sink_size,
        rule.causal,
        torch.get_num_threads(),
        poison,
    )
    return typed(out, query.dtype)


def applies(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> bool:
    """Whether the kernels compute this call: blocks of 64 and up to 32 bits. All else is the reference's."""
    return (
        rule.weight_scale == "block"
        and rule.block == BLOCK
        and rule.scaling > 0
        and query.numel() > 0
        and value.numel() > 0
        and all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in (query, key, value))
    )


def working_type(*tensors: Tensor) -> torch.dtype:
    """bfloat16 where all are; anything else is computed in float32, so that nothing given in float32 is rounded."""
    return torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in tensors) else torch.float32


def route_bytes(routes: Tensor) -> Tensor:
    """As uint8, which the kernels check; a wider type could wrap into the range."""
    if routes.dtype != torch.uint8:
        if not bool(((routes >= 0) & (routes <= max(Route))).all()):
            raise ValueError(f"routes must be 0 (int8), 1 (sink) or 2 (native), not {routes.tolist()}")
        routes = routes.to(torch.uint8)
    return routes.contiguous()


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, its last dimension without gaps."""
    x = typed(x, dtype)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes a microsecond where there is nothing to do, and more when little is in the caches."""
    return x if x.dtype == dtype else x.to(dtype)


def empty(batch: int, heads: int, queries: int, dim: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, Lq, D]`, the heads of a query side by side in memory."""
    row = heads * dim
    return torch.empty_strided((batch, heads, queries, dim), (queries * row, dim, row, 1), dtype=dtype, device="cpu")


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
