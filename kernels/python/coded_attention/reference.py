"""The PyTorch reference of `quantsink::coded_attention`: the definition that every backend is held to.

With m the middle code, k = zero + scale * (code - m) per (block, channel) and v the same per (key, channel group), one
query row q of an INT8 head has, over one block of 64 keys,

    s = scaling * (a / 127 * round(127 (q * scale) / a) . (code - m) + q . zero)    with a = max |q * scale|
    o = b / 127 * round(127 (p * scale) / b) @ (code - m) + p . zero    with p = exp(s - max s), b = max (p * scale)

and parts meet through their log-sum-exp as in `sink_attention`: the exact keys, which are computed as they are, and
a few blocks at a time, so that never more of the cache than these exists in full precision. `native` heads compute with
the numbers that the codes stand for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.kernels.attention import Route, finite
from quantsink.kernels.coded_attention.cache import check_banks, check_tables, record
from quantsink.kernels.coded_attention.call import Call
from quantsink.kernels.coded_attention.codes import BLOCK, GROUP, spread, unpack_record
from quantsink.kernels.int8_linear import QMAX

SLICE = 16
"""Blocks that are unpacked at a time, at most."""
ROWS = 8192
"""Rows of queries times blocks at a time, where there are many."""


@dataclass(frozen=True)
class Part:
    """Scores `[B, h, n, keys]` with hidden ones -inf, and what they weigh: `values` takes exp(scores - top)."""

    scores: Tensor
    value: Tensor
    """`[B, h, keys, Dv]`, or of codes `[B, h, N, 64, Dv]`, less their middle."""
    scale: Tensor | None = None
    """`[B, h, N, G, 64]`."""
    zero: Tensor | None = None


def reference(call: Call) -> Tensor:
    """Attention output `[B, H, Lq, Dv]` in the type of `query`."""
    query, codes = call.query, call.codes
    work = query.dtype if query.dtype == torch.float64 else torch.float32
    check_banks(codes.key.shape[3], codes.value.shape[3], codes.banks, codes.bits, codes.key.shape[0])
    places, rows = check_tables(codes)
    batch, heads, queries, _ = query.shape
    group = heads // len(places)
    q = query.to(work)
    out = q.new_zeros(batch, queries, heads, codes.value.shape[3]).transpose(1, 2)
    native = (call.routes == Route.NATIVE).tolist()
    for route in (False, True):
        for bank in range(len(codes.banks)):
            # All heads of a KV head together, even where they take other routes: those are left out of the result.
            some = [
                h for h, (at, _) in enumerate(places) if at == bank and route in native[h * group : (h + 1) * group]
            ]
            if not some or query.numel() == 0:
                continue
            part = Rows(q, call, rows, bank, some, [places[h][1] for h in some], route).attend()
            part = part.unflatten(2, (group, queries)).to(work)
            for n, h in enumerate(some):
                for g in range(group):
                    if native[h * group + g] == route:
                        out[:, h * group + g] = part[:, n, g]
    return out.to(query.dtype)


class Rows:
    """The query rows `[B, h, n, D]` of some KV heads of one bank, n = group * Lq."""

    def __init__(
        self,
        q: Tensor,
        call: Call,
        rows: list[list[int]],
        bank: int,
        kv_heads: list[int],
        places: list[int],
        native: bool,
    ) -> None:
        self.call, self.native = call, native
        self.queries = q.shape[2]
        self.kv_heads = torch.tensor(kv_heads, device=q.device)
        self.places = torch.tensor(places, device=q.device)
        self.all_heads, self.group = call.key.shape[1], q.shape[1] // call.key.shape[1]
        self.q = q.unflatten(1, (self.all_heads, self.group))[:, self.kv_heads].flatten(2, 3)
        self.bank, self.bits = call.banks[bank], call.bits[bank]
        table = torch.tensor(rows, device=q.device).view(-1, 2 + len(call.banks), 1, 1, 1)
        self.sinks, self.newest, self.used = table[:, 0], table[:, 1], table[:, 2 + bank]
        """`[B, 1, 1, 1]` each."""
        self.blocks = max(row[2 + bank] for row in rows)
        self.ragged = min(row[2 + bank] for row in rows) < self.blocks

    def attend(self) -> Tensor:
        """`[B, h, n, Dv]`."""
        floor = None
        if self.call.clip_row is not None:
            tops = [part.scores.amax(-1, keepdim=True) for part in self.parts() if part.scores.shape[-1]]
            floor = torch.cat(tops, -1).amax(-1, keepdim=True) - self.per_row(self.call.clip_row)
        top = self.q.new_full((*self.q.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(top)
        out = self.q.new_zeros(*self.q.shape[:3], self.call.value.shape[3])
        for part in self.parts():
            s = part.scores
            if not s.shape[-1]:
                continue
            if floor is not None:
                s = s.masked_fill(s < floor, -torch.inf)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            before = torch.exp(top - finite(new))
            p, weighted = self.weighted(part, s, new)
            total = total * before + p
            out = out * before + weighted
            top = new
        # Nothing is visible where the total is 0; what is not a number stays one.
        out = torch.where(total == 0, 0, out / total)
        if self.call.s_aux is not None:
            out = out * torch.sigmoid(top + total.log() - self.per_row(self.call.s_aux))
        return out

    def parts(self) -> Iterator[Part]:
        yield self.exact(self.call.sink_key, self.call.sink_value, newest=False)
        yield self.exact(self.call.key, self.call.value, newest=True)
        step = max(1, min(SLICE, ROWS // max(self.q.shape[2], 1)))
        for first in range(0, self.blocks, step):
            yield self.coded(first, min(first + step, self.blocks))

    def exact(self, key: Tensor, value: Tensor, newest: bool) -> Part:
        columns = torch.arange(key.shape[2], device=self.q.device)
        if newest:
            used = columns >= key.shape[2] - self.newest
            last = key.shape[2] - self.queries + torch.arange(self.queries, device=self.q.device)
            seen = used & (columns <= last.repeat(self.group)[:, None])
        else:
            seen = used = columns < self.sinks
        # What is not used may be anything.
        k, v = (x[:, self.kv_heads].to(self.q.dtype).masked_fill(~used.transpose(-1, -2), 0) for x in (key, value))
        scores = self.limited(self.q @ k.transpose(-1, -2) * self.call.scaling)
        return Part(scores.masked_fill_(~seen, -torch.inf), v)

    def coded(self, first: int, last: int) -> Part:
        layout, work, middle = (
            record(self.bits, self.q.shape[3], self.call.value.shape[3]),
            self.q.dtype,
            2 ** (self.bits - 1),
        )
        records = self.bank[:, :, first:last].index_select(1, self.places)
        unused = torch.arange(first, last, device=self.q.device) >= self.used[..., 0]  # [B, 1, N]
        if self.ragged:
            records = records.masked_fill(unused[..., None], 0)
        key, key_scale, key_zero, value, value_scale, value_zero = (x.to(work) for x in unpack_record(records, layout))
        q = self.q[:, :, :, None]
        zero = (q * (key_zero + middle * key_scale)[:, :, None]).sum(-1, keepdim=True)
        scaled = q * key_scale[:, :, None]  # [B, h, n, N, D]
        scaled = scaled if self.native else to_codes(scaled)
        scores = torch.einsum("bhqnd,bhndk->bhqnk", scaled, key - middle) + zero
        scores = self.limited(scores.mul_(self.call.scaling))
        if self.ragged:
            scores = scores.masked_fill_(unused[:, :, None, :, None], -torch.inf)
        return Part(scores.flatten(3), value - middle, value_scale, value_zero + middle * value_scale)

    def weighted(self, part: Part, s: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of exp(s - top), and of the values that it weighs."""
        if part.scale is None or part.zero is None:
            p = torch.exp(s - finite(top))
            return p.sum(-1, keepdim=True), p @ part.value
        s = s.unflatten(-1, (-1, BLOCK))
        most = s.amax(-1, keepdim=True)
        p = torch.exp(s - finite(most))
        share = torch.exp(most - finite(top)[..., None])
        # By its share a block's weights come to the common maximum, after they were rounded below their own.
        total = (p * share).sum((-1, -2))[..., None]
        zero = spread(part.zero, part.value.shape[-1])
        weighted = torch.einsum("bhqnk,bhnkd->bhqd", p * share, zero)
        for group, value in enumerate(part.value.split(GROUP, -1)):
            weights = p * part.scale[:, :, None, :, group]
            weights = weights if self.native else to_codes(weights)
            weighted[..., group * GROUP : (group + 1) * GROUP] += torch.einsum(
                "bhqnk,bhnkd->bhqd", weights * share, value
            )
        return total, weighted

    def limited(self, s: Tensor) -> Tensor:
        """Soft-cap, then absolute clip, of scores `[B, h, n, ...]`."""
        if self.call.softcap:
            s = s.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
        if self.call.clip_absolute is not None:
            bound = self.per_row(self.call.clip_absolute)
            bound = bound if s.dim() == 4 else bound[..., None]
            s = s.clamp_(-bound, bound)
        return s

    def per_row(self, x: Tensor) -> Tensor:
        """`[H]` -> `[h, n, 1]`."""
        x = x.to(self.q).view(self.all_heads, self.group, 1).expand(-1, -1, self.queries)
        return x[self.kv_heads].flatten(1)[..., None]


def to_codes(x: Tensor) -> Tensor:
    """The nearest multiples of max|x| / 127 along the last dimension."""
    top = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, QMAX / top, 0)
    return (x * inverse).round_() * (top * (1 / QMAX))
