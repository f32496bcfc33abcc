"""The PyTorch reference of `quantsink::coded_attention`: the definition that every backend is held to.

With m the middle code, k = zero + scale * (code - m) per (block, channel) and v the same per (key, channel group), one
query row q of an INT8 head has, over one block of 64 keys,

    s = scaling * (a / 127 * round(127 (q * scale) / a) . (code - m) + q . zero)    with a = max |q * scale|
    o = b / 127 * round(127 (p * scale) / b) @ (code - m) + p . zero    with p = exp(s - max s), b = max (p * scale)

and blocks meet through their log-sum-exp as in `sink_attention`. Exact keys are computed as they are. `native` heads
compute with the numbers that the codes stand for.
"""

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.codes import BLOCK, GROUP, CodedKV, spread, unpack
from quantsink.kernels.int8_linear import QMAX
from quantsink.kernels.sink_attention.reference import Route, Rule, drop, finite, limit, per_head


def reference(query: Tensor, codes: CodedKV, mask: Tensor | None, routes: Tensor, rule: Rule) -> Tensor:
    """Attention output `[B, H, Lq, Dv]` in the type of `query`."""
    work = query.dtype if query.dtype == torch.float64 else torch.float32
    q = query.to(work)
    group = q.shape[1] // codes.exact_key.shape[1]
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], codes.exact_value.shape[3]).transpose(1, 2)
    hidden = ~visible(q, codes, mask, rule)
    for native in (False, True):
        heads = ((routes == Route.NATIVE) == native).nonzero()[:, 0]
        if len(heads):
            out[:, heads] = attend(q[:, heads], codes, heads, heads // group, hidden, native, rule)
    return out.to(query.dtype)


def visible(q: Tensor, codes: CodedKV, mask: Tensor | None, rule: Rule) -> Tensor:
    """`[B or 1, 1, Lq, L]`."""
    if mask is not None:
        return mask
    keys, queries = len(codes), q.shape[2]
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    return seen.tril(keys - queries) if rule.causal else seen


def attend(
    q: Tensor, codes: CodedKV, heads: Tensor, kv_head: Tensor, hidden: Tensor, native: bool, rule: Rule
) -> Tensor:
    work, blocks, sinks, value_dim = q.dtype, codes.key_codes.shape[2], codes.sinks, codes.exact_value.shape[3]
    exact_key, exact_value = codes.exact_key.to(work)[:, kv_head], codes.exact_value.to(work)[:, kv_head]
    middle_code = 2 ** (codes.bits - 1)
    key = unpack(codes.key_codes, codes.bits, BLOCK).to(work)[:, kv_head] - middle_code  # [B, h, N, D, 64]
    key_scale = codes.key_scale.to(work)[:, kv_head]
    key_zero = codes.key_zero.to(work)[:, kv_head] + middle_code * key_scale

    scaled = q[:, :, :, None] * key_scale[:, :, None]  # [B, h, Lq, N, D]
    if not native:
        scaled = to_codes(scaled)
    middle = torch.einsum("bhqnd,bhndk->bhqnk", scaled, key) + (q[:, :, :, None] * key_zero[:, :, None]).sum(
        -1, keepdim=True
    )
    exact = q @ exact_key.transpose(-1, -2)
    s = torch.cat([exact[..., :sinks], middle.flatten(3), exact[..., sinks:]], -1) * rule.scaling
    s = limit(s, heads, rule).masked_fill_(hidden, -torch.inf)
    drop([s], heads, rule)

    lse = torch.logsumexp(s, -1, keepdim=True)
    exact, middle = torch.cat([s[..., :sinks], s[..., sinks + blocks * BLOCK :]], -1), s[..., sinks:]
    out = torch.exp(exact - finite(lse)) @ exact_value
    if blocks:
        middle = middle[..., : blocks * BLOCK].unflatten(3, (blocks, BLOCK))
        top = finite(middle.amax(-1, keepdim=True))
        p = torch.exp(middle - top)
        share = torch.exp(top - finite(lse)[..., None])
        value = unpack(codes.value_codes, codes.bits, value_dim).to(work)[:, kv_head] - middle_code  # [B, h, N, 64, Dv]
        zero = codes.value_zero.to(work) + middle_code * codes.value_scale.to(work)
        zero = spread(zero, value_dim)[:, kv_head]
        parts = []
        for group, part in enumerate(value.split(GROUP, 4)):
            weights = p * codes.value_scale[:, kv_head, None, :, group].to(work)
            parts.append(torch.einsum("bhqnk,bhnkd->bhqnd", weights if native else to_codes(weights), part))
        coded = torch.cat(parts, -1) + torch.einsum("bhqnk,bhnkd->bhqnd", p, zero)
        out = out + (coded * share).sum(3)
    if rule.s_aux is not None:
        out = out * torch.sigmoid(lse - per_head(rule.s_aux, heads, lse))
    return out


def to_codes(x: Tensor) -> Tensor:
    """The nearest multiples of max|x| / 127 along the last dimension."""
    top = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, QMAX / top, 0)
    return (x * inverse).round_() * (top * (1 / QMAX))
