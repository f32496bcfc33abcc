"""`quantsink::coded_attention` on the CPU: the C++ kernels where they were built, the reference elsewhere."""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.cache import CodedKV, check_banks
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention import cpu
from quantsink.kernels.sink_attention.reference import Rule


def attend(query: Tensor, codes: CodedKV, routes: Tensor, rule: Rule) -> Tensor:
    """As `reference`, whose arguments these are."""
    exact = query.dtype == torch.float64 or rule.scaling <= 0 or query.numel() == 0
    kernels = None if exact else library()
    if kernels is None:
        with torch.autocast("cpu", enabled=False):
            return reference(query, codes, routes, rule)
    check_banks(codes)
    given = (query, codes.sink_key, codes.sink_value, codes.key, codes.value)
    dtype = cpu.working_type(*given)
    batch, heads, queries, head_dim = query.shape
    value_dim = codes.value.shape[3]
    out = cpu.empty(batch, heads, queries, value_dim, dtype)
    # Kept alive until the call is over, as are the next three.
    views = [*(cpu.dense(x, dtype) for x in given), out]
    places, counts, routes = codes.heads.contiguous(), codes.rows.contiguous(), cpu.route_bytes(routes)
    bounds = [None if x is None else x.float().contiguous() for x in (rule.clip_row, rule.clip_absolute, rule.s_aux)]
    kernels.coded_attention(
        [x.data_ptr() for x in views],
        [x.stride() for x in views],
        (batch, heads, codes.key.shape[1], queries, head_dim, value_dim, codes.sink_key.shape[2], codes.key.shape[2]),
        dtype == torch.bfloat16,
        [
            (x.data_ptr(), *x.stride()[:3], bits, x.shape[1], x.shape[2])
            for x, bits in zip(codes.banks, codes.bits, strict=True)
        ],
        places.data_ptr(),
        counts.data_ptr(),
        routes.data_ptr(),
        *(cpu.address(bound) for bound in bounds),
        rule.scaling,
        rule.softcap,
        torch.get_num_threads(),
        cpu.poison,
    )
    return cpu.typed(out, query.dtype)
