"""`quantsink::coded_attention` on the CPU: the C++ kernels where they were built, the reference elsewhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention import cpu


def attend(
    query: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    key: Tensor,
    value: Tensor,
    banks: Sequence[Tensor],
    heads: Tensor,
    rows: Tensor,
    routes: Tensor,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    bits: Sequence[int],
    scaling: float,
    softcap: float,
) -> Tensor | None:
    """As the operator, whose arguments these are; None where it is the reference's to compute, or to say what does not
    fit. A decoding step calls this once a layer, when little of Python is left in the processor's caches: it does no
    more than it must, and C++ compares the shapes."""
    kernels = library()
    if kernels is None or query.dtype == torch.float64 or scaling <= 0 or query.numel() == 0:
        return None
    if heads.dtype != torch.int64 or rows.dtype != torch.int64 or any(bank.dtype != torch.uint8 for bank in banks):
        return None
    given = (query, sink_key, sink_value, key, value)
    if not all(x.dim() == 4 for x in given):
        return None
    dtype = cpu.working_type(*given)
    batch, query_heads, queries, _ = query.shape
    out = cpu.empty(batch, query_heads, queries, value.shape[-1], dtype)
    # Kept alive until the call is over, as are the tables.
    views = [*(cpu.dense(x, dtype) for x in given), out]
    tables = [heads.contiguous(), rows.contiguous(), cpu.route_bytes(routes)]
    bounds = [None if x is None else x.float().contiguous() for x in (clip_row, clip_absolute, s_aux)]
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
