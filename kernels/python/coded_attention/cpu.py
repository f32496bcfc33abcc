"""`quantsink::coded_attention` on the CPU: the C++ kernels where they were built, the reference elsewhere."""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.cache import check_banks
from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention import cpu


def attend(
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
    bits: list[int],
    scaling: float,
    softcap: float,
) -> Tensor | None:
    """As the operator, whose arguments these are; None where it is the reference's to compute. A decoding step calls
    this once a layer, when little of Python is left in the caches: it does no more than it must."""
    if query.dtype == torch.float64 or scaling <= 0 or query.numel() == 0:
        return None
    kernels = library()
    if kernels is None:
        return None
    check_banks(key.shape[3], value.shape[3], banks, bits, key.shape[0])
    given = (query, sink_key, sink_value, key, value)
    dtype = cpu.working_type(*given)
    batch, query_heads, queries, head_dim = query.shape
    value_dim = value.shape[3]
    out = cpu.empty(batch, query_heads, queries, value_dim, dtype)
    # Kept alive until the call is over, as are the next four.
    views = [*(cpu.dense(x, dtype) for x in given), out]
    places, counts, routes = heads.contiguous(), rows.contiguous(), cpu.route_bytes(routes)
    bounds = [None if x is None else x.float().contiguous() for x in (clip_row, clip_absolute, s_aux)]
    kernels.coded_attention(
        [x.data_ptr() for x in views],
        [x.stride() for x in views],
        (batch, query_heads, key.shape[1], queries, head_dim, value_dim, sink_key.shape[2], key.shape[2]),
        dtype == torch.bfloat16,
        [(x.data_ptr(), *x.stride()[:3], width, x.shape[1], x.shape[2]) for x, width in zip(banks, bits, strict=True)],
        places.data_ptr(),
        places.nbytes,
        counts.data_ptr(),
        counts.nbytes,
        routes.data_ptr(),
        *(cpu.address(bound) for bound in bounds),
        scaling,
        softcap,
        torch.get_num_threads(),
        cpu.poison,
    )
    return cpu.typed(out, query.dtype)
