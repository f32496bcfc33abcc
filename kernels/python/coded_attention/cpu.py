"""`quantsink::coded_attention` on the CPU: the C++ kernels where they were built, the reference elsewhere."""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.codes import CodedKV
from quantsink.kernels.coded_attention.reference import reference
from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention import cpu
from quantsink.kernels.sink_attention.reference import Rule


def attend(query: Tensor, codes: CodedKV, mask: Tensor | None, routes: Tensor, rule: Rule) -> Tensor:
    """As `reference`, whose arguments these are."""
    exact = query.dtype == torch.float64 or rule.scaling <= 0 or query.numel() == 0
    kernels = None if exact else library()
    if kernels is None:
        with torch.autocast("cpu", enabled=False):
            return reference(query, codes, mask, routes, rule)
    dtype = cpu.working_type(query, codes.exact_key, codes.exact_value)
    q, key, value = (cpu.dense(x, dtype) for x in (query, codes.exact_key, codes.exact_value))
    batch, heads, queries, head_dim = q.shape
    out = torch.empty(batch, queries, heads, value.shape[3], dtype=dtype).transpose(1, 2)
    mask = None if mask is None else mask if mask.stride(3) == 1 else mask.contiguous()
    routes = cpu.route_bytes(routes)
    bytes_of = [x.contiguous() for x in (codes.key_codes, codes.value_codes)]
    halves = [x.half().contiguous() for x in (codes.key_scale, codes.key_zero, codes.value_scale, codes.value_zero)]
    bounds = [None if x is None else x.float().contiguous() for x in (rule.clip_row, rule.clip_absolute, rule.s_aux)]
    kernels.coded_attention(
        q.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        out.data_ptr(),
        (batch, heads, key.shape[1], queries, head_dim, value.shape[3], codes.key_codes.shape[2], key.shape[2]),
        q.stride()[:3],
        key.stride()[:3],
        value.stride()[:3],
        out.stride()[:3],
        dtype == torch.bfloat16,
        codes.bits,
        codes.sinks,
        [x.data_ptr() for x in bytes_of],
        [x.data_ptr() for x in halves],
        cpu.address(mask),
        (0, 0) if mask is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2)),
        routes.data_ptr(),
        *(cpu.address(bound) for bound in bounds),
        rule.scaling,
        rule.softcap,
        rule.causal,
        torch.get_num_threads(),
        cpu.poison,
    )
    return out.to(query.dtype)
