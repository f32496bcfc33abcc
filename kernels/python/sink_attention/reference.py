"""The PyTorch reference of `quantsink::sink_attention`. It is the definition: every other backend is held to it.

One query row q, sink keys S in native precision, the rest R in INT8 (docs/design.md, "Sink-split attention"):

    o = sigmoid(l_S - l_R) softmax(s_S) V_S + sigmoid(l_R - l_S) softmax(s_R) V_R

The two parts meet through their log-sum-exp as the parts of split-KV decoding do (Dao et al., Flash-Decoding, 2023).
`native` is "S = every key", `int8` is "S = no key". INT8 products run on integers held in floating point: sums stay
below 2^24 (D and blocks up to 1,040), so they are exact; `row` and `fixed` over more keys round as any float sum does.

A tensor's way: keys and values are prepared once per route (`SplitHeads`, `NativeHeads`), then chunks of queries pass
through scores -> limit -> weights -> values, in place, so that no more than a tile of scores ever exists.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantsink.kernels.attention import Route, finite
from quantsink.kernels.int8_linear import QMAX, quantize_per_token
from quantsink.kernels.sink_attention.call import Call

TILE = 2**20
"""Scores that are held at once, so that they stay in the cache."""
MIN_ROWS, MAX_ROWS = 16, 128
"""Queries that go together: few enough that causal tiles leave out what nobody sees."""


def reference(call: Call) -> Tensor:
    """Attention output `[B, H, Lq, Dv]` in the type of `query`."""
    query, mask, routes, sink_start = call.query, call.mask, call.routes, call.sink_start
    if not bool(((routes >= Route.INT8) & (routes <= Route.NATIVE)).all()):
        raise ValueError(f"sink_attention: routes must be 0 (int8), 1 (sink) or 2 (native), not {routes.tolist()}")
    work = query.dtype if query.dtype == torch.float64 else torch.float32
    q, k, v = query.to(work), call.key.to(work), call.value.to(work)
    if sink_start is not None and bool((sink_start > 0).any()):
        k, v, mask = from_first_token(k, v, padding_mask(q, k, sink_start, call), sink_start)
    if mask is not None:
        unseen = ~mask.any(2)[:, :, :, None]
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)

    kv_head = torch.arange(q.shape[1], device=q.device) * k.shape[1] // q.shape[1]
    native = (routes == Route.NATIVE).nonzero()[:, 0]
    split = (routes != Route.NATIVE).nonzero()[:, 0]
    groups: list[NativeHeads | SplitHeads] = []
    if len(native):
        groups.append(NativeHeads(native, k, v, kv_head, call))
    if len(split):
        groups.append(SplitHeads(split, k, v, kv_head, call))

    # Memory in the order [B, Lq, H, Dv], which is what an output projection reads.
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    step = min(max(TILE // max(q.shape[0] * q.shape[1] * k.shape[2], 1), MIN_ROWS), MAX_ROWS)
    for first in range(0, q.shape[2], step):
        rows = slice(first, min(first + step, q.shape[2]))
        visible = Visible.of(rows, q.shape[2], k.shape[2], mask, call)
        for group in groups:
            o, lse = group.attend(q[:, group.heads, rows], visible)
            if call.s_aux is not None:
                o = o * torch.sigmoid(lse - per_head(call.s_aux, group.heads, lse))
            out[:, group.heads, rows] = o
    return out.to(query.dtype)


def padding_mask(q: Tensor, k: Tensor, start: Tensor, call: Call) -> Tensor:
    """The call's mask or the causal one, `[B, 1, Lq, Lk]`, without the columns before each row's first real token."""
    column, mask = torch.arange(k.shape[2], device=k.device), call.mask
    if mask is None:
        mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=k.device)
        mask = mask.tril(k.shape[2] - q.shape[2]) if call.causal else mask
    return mask & (column >= start[:, None])[:, None, None]


def from_first_token(k: Tensor, v: Tensor, mask: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate each row so that its first real token is column 0: left padding then changes no block and no scale."""
    index = (torch.arange(k.shape[2], device=k.device) + start.clamp(min=0)[:, None]) % k.shape[2]
    k = k.gather(2, index[:, None, :, None].expand_as(k))
    v = v.gather(2, index[:, None, :, None].expand_as(v))
    return k, v, mask.gather(3, index[:, None, None, :].expand_as(mask))


@dataclass(frozen=True)
class Visible:
    """What one chunk of n queries sees: every key before `free`, those not `hidden` up to `last`, none after."""

    free: int
    last: int
    hidden: Tensor
    """`[B or 1, 1, n or 1, last - free]`."""

    @classmethod
    def of(cls, rows: slice, queries: int, keys: int, mask: Tensor | None, call: Call) -> "Visible":
        """`last` is a whole number of blocks, beyond the keys if need be: then tiles need no padding of their own."""
        block = call.block if call.weight_scale == "block" else 1
        if mask is not None:
            seen = mask[:, :, rows]
            columns = seen.flatten(0, 2).any(0).nonzero()
            last = whole(int(columns[-1]) + 1 if len(columns) else 1, block)
            return cls(0, last, ~pad(seen[..., :last], (0, max(last - keys, 0))))
        if not call.causal:
            last = whole(keys, block)
            return cls(keys, last, torch.ones(1, 1, 1, last - keys, dtype=torch.bool))
        position = torch.arange(rows.start, rows.stop) + keys - queries
        free, last = max(int(position[0]) + 1, 0), whole(max(int(position[-1]) + 1, 1), block)
        return cls(free, last, (torch.arange(free, last) > position[:, None])[None, None])

    def hide(self, s: Tensor) -> Tensor:
        """Scores `[B, h, n, up to last]` with -inf where nothing is to be seen, in place."""
        part = s[..., self.free :]
        part.masked_fill_(self.hidden[..., : part.shape[-1]].to(s.device), -torch.inf)
        return s


class NativeHeads:
    """Heads that compute with every key as it is: plain softmax attention under the rule's limits."""

    def __init__(self, heads: Tensor, k: Tensor, v: Tensor, kv_head: Tensor, call: Call) -> None:
        self.heads, self.call = heads, call
        self.key = k.transpose(-1, -2).contiguous().index_select(1, kv_head[heads])
        self.value = v.index_select(1, kv_head[heads])

    def attend(self, q: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        """Output `[B, h, n, Dv]` and log-sum-exp `[B, h, n, 1]` of queries `[B, h, n, D]`."""
        s = (q @ self.key[..., : visible.last]).mul_(self.call.scaling)
        s = visible.hide(limit(s, self.heads, self.call))
        drop([s], self.heads, self.call)
        return native_part(s, self.value[:, :, : visible.last])


class SplitHeads:
    """Heads in INT8, with the sink tokens of the `sink` route split off."""

    def __init__(
        self,
        heads: Tensor,
        k: Tensor,
        v: Tensor,
        kv_head: Tensor,
        call: Call,
    ) -> None:
        self.heads, self.call = heads, call
        key_mean, sink_start = call.key_mean.to(k.dtype), call.sink_start
        group, keys = kv_head[heads], k.shape[2]
        # One column at least, hidden where it is no sink: a part without columns would have no maximum.
        exact = min(max(call.sink_size, 1), keys)
        size = torch.where(call.routes[heads] == Route.SINK, call.sink_size, 0)[None, :, None, None]
        left = 0 if sink_start is None else sink_start.clamp(max=0)[:, None, None, None]
        self.sink = torch.arange(exact, device=k.device) < size + left
        """`[B or 1, h, 1, exact]`, true where a key is kept exact; a negative start means sinks that left the cache."""
        self.sink_key = k[:, group, :exact].transpose(-1, -2)
        self.sink_value = v[:, group, :exact]

        block = call.block if call.weight_scale == "block" else keys
        beyond = whole(keys, block) - keys
        codes, scale = quantize_per_token(pad(k - key_mean[:, None], (0, 0, 0, beyond)))
        self.mean = key_mean[group, :, None]
        self.key_codes = codes.transpose(-1, -2).to(k.dtype).contiguous().index_select(1, group)
        self.key_scale = scale.transpose(-1, -2)[:, group]
        v = pad(v, (0, 0, 0, beyond))
        codes, scale = quantize_value_blocks(v, block)
        self.value_codes, self.value_scale = codes.index_select(1, group), scale.index_select(1, group)
        # Only blocks that hold a sink depend on the route: theirs are the scales of what is left without it.
        edge = whole(exact, block)
        rest = v[:, group, :edge]
        rest[:, :, :exact].masked_fill_(self.sink.transpose(-1, -2), 0)
        codes, scale = quantize_value_blocks(rest, block)
        self.value_codes[:, :, : edge // block], self.value_scale[:, :, : edge // block] = codes, scale

    def attend(self, q: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        """Output `[B, h, n, Dv]` and log-sum-exp `[B, h, n, 1]` of queries `[B, h, n, D]`."""
        heads, call, last = self.heads, self.call, visible.last
        exact = min(self.sink.shape[-1], last)
        sink = self.sink[..., :exact]
        s_s = (q @ self.sink_key[..., :exact]).mul_(call.scaling)
        s_r = self.int8_scores(q, last)
        s_s = visible.hide(limit(s_s, heads, call)).masked_fill_(~sink, -torch.inf)
        s_r = visible.hide(limit(s_r, heads, call))
        s_r[..., :exact].masked_fill_(sink, -torch.inf)
        drop([s_s, s_r], heads, call)

        o_s, l_s = native_part(s_s, self.sink_value[:, :, :exact])
        o_r, l_r = int8_part(s_r, self.value_codes, self.value_scale, call.weight_scale)
        # Both are -inf in a row without visible keys, whose outputs are zero.
        o = torch.sigmoid(l_s - l_r).nan_to_num(0) * o_s + torch.sigmoid(l_r - l_s).nan_to_num(0) * o_r
        return o, torch.logaddexp(l_s, l_r)

    def int8_scores(self, q: Tensor, last: int) -> Tensor:
        """q.k * scaling from codes; the mean was taken off the keys, so q.mean is put back."""
        codes, scale = quantize_per_token(q)
        s = codes.to(q.dtype) @ self.key_codes[..., :last]
        s.mul_(scale * self.call.scaling).mul_(self.key_scale[..., :last])
        return s.add_((q @ self.mean).mul_(self.call.scaling))


def limit(s: Tensor, heads: Tensor, call: Call) -> Tensor:
    """Soft-cap, then absolute clip, in place."""
    if call.softcap:
        s = s.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.clip_absolute is not None:
        bound = per_head(call.clip_absolute, heads, s)
        s = s.clamp_(-bound, bound)
    return s


def drop(parts: list[Tensor], heads: Tensor, call: Call) -> None:
    """The clip relative to the row's maximum over all parts: what lies further below gets -inf, in place."""
    if call.clip_row is not None:
        top = torch.cat([s.amax(-1, keepdim=True) for s in parts], -1).amax(-1, keepdim=True)
        floor = top - per_head(call.clip_row, heads, top)
        for s in parts:
            s.masked_fill_(s < floor, -torch.inf)


def native_part(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(s) V and logsumexp(s); a row without any visible key gives 0 and -inf. Overwrites `s`."""
    lse = torch.logsumexp(s, -1, keepdim=True)
    return s.sub_(finite(lse)).exp_() @ v, lse


def int8_part(s: Tensor, v_codes: Tensor, v_scale: Tensor, weight_scale: str) -> tuple[Tensor, Tensor]:
    """softmax(s) V and logsumexp(s) with 8-bit weights. Overwrites `s`.

    With m a block's maximum, p = exp(s - m), and exp(m - lse) the block's share of the row:

        o = sum over blocks of exp(m - lse) / 127 * (round(127 p) @ v_codes) * v_scale

    `row` takes all keys as one block; `fixed` rounds 127 exp(s - lse), on a grid of 1 / 127 for every row.
    """
    blocks = -(-s.shape[-1] // v_codes.shape[3])
    s = s.unflatten(-1, (blocks, -1))
    top = s.amax(-1, keepdim=True)
    m = finite(top)
    p = s.sub_(m).exp_()
    lse = torch.logsumexp(p.sum(-1, keepdim=True).log_().add_(m), 3, keepdim=True)
    # Of a block without visible keys 0, however low the others' scores are.
    share = torch.exp(top - finite(lse))
    if weight_scale == "fixed":
        p.mul_(share)
        share = torch.ones_like(share)
    codes = p.mul_(QMAX).round_()
    out = s.new_zeros(*s.shape[:3], v_codes.shape[-1])
    for n in range(blocks):
        product = codes[..., n, :] @ v_codes[:, :, n, : s.shape[-1]]
        out.addcmul_(product.mul_(v_scale[:, :, n]), share[..., n, :], value=1 / QMAX)
    return out, lse.squeeze(3)


def quantize_value_blocks(v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes `[B, h, N, block, D]` as floating-point integers, scales `[B, h, N, 1, D]`: one per block and channel."""
    v = v.unflatten(2, (-1, block))
    amax = v.abs().amax(3, keepdim=True)
    scale = torch.where(amax == 0, 1, amax / QMAX)
    return (v / scale).round_().clamp_(-QMAX, QMAX), scale


def per_head(x: Tensor, heads: Tensor, like: Tensor) -> Tensor:
    """`[H]` -> `[h, 1, 1]`."""
    return x.to(like)[heads][:, None, None]


def whole(keys: int, block: int) -> int:
    """`keys` rounded up to whole blocks."""
    return -(-keys // block) * block
