"""Keys and values as codes of 8, 4, 3 or 2 bits: how a block of them is made, and how it lies in memory.

A block is 64 tokens of one KV head, one run of bytes: a record. Keys take one scale and zero point per (block,
channel), values one per (token, 64 channels), as KIVI does (Liu et al., 2024); all in float16. In a record follow

    key codes | key scales [D] | key zero points [D] | value codes | value scales [G, 64] | value zero points [G, 64]

with G groups of at most 64 channels. Codes lie in cells of four: four channels of one key, four tokens of one value
channel, cells `[D / 4, 64, 4]` and `[16, Dv, 4]`. In 8 bits a cell is four bytes. In 4 bits a byte holds the codes of
cells 2i and 2i + 1 along the first axis, low bits first; in 2 bits those of 4i to 4i + 3. 3 bits are the low two as in
2 bits, then the high ones, eight to a byte. What a last byte does not need is 0. kernels/csrc/coded_codes.h reads the
same.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 64
"""Tokens of a block."""
GROUP = 64
"""Channels of a value that share a scale."""
WIDTHS = (8, 4, 3, 2)
"""Bits of a code."""
HALF_MAX = 65504.0
SHRINKS = {2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}
METRIC_SHRINKS = {2: (1.0, 0.9, 0.8)}
"""Parts of a key channel's range among which its scale is chosen, by squared error; other widths take the whole range,
and so do values (docs/decisions/0007-cache.md has the measurements)."""
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits of a code by the planes they lie in, the lowest first."""


@dataclass(frozen=True)
class Record:
    """Where things lie in one block's bytes.

    Raises:
        ValueError: bits or sizes that the layout has no place for.
    """

    bits: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"coded_attention: codes have 8, 4, 3 or 2 bits, not {self.bits}")
        if self.head_dim % 8 or self.value_dim % 16:
            raise ValueError(
                "coded_attention: head sizes must be multiples of 8 (keys) and 16 (values), "
                f"not {self.head_dim} and {self.value_dim}"
            )

    @property
    def groups(self) -> int:
        return -(-self.value_dim // GROUP)

    @cached_property
    def parts(self) -> tuple[slice, slice, slice, slice, slice, slice]:
        """Bytes of key codes, scales and zero points, then of the values'."""
        scales, value_scales = 2 * self.head_dim, 2 * self.groups * BLOCK
        sizes = (
            packed_bytes(self.head_dim // 4, BLOCK, self.bits), scales, scales,
            packed_bytes(BLOCK // 4, self.value_dim, self.bits), value_scales, value_scales,
        )  # fmt: skip
        ends = [sum(sizes[: i + 1]) for i in range(6)]
        a, b, c, d, e, f = (slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
        return a, b, c, d, e, f

    @cached_property
    def nbytes(self) -> int:
        return int(self.parts[-1].stop)

    @property
    def bits_per_number(self) -> float:
        """Real bits, scales and zero points included."""
        return self.nbytes * 8 / (BLOCK * (self.head_dim + self.value_dim))


def packed_bytes(cells: int, columns: int, bits: int) -> int:
    """Bytes of codes in `cells x columns` cells of four."""
    return sum(_plane_bytes(cells, columns, plane) for plane in PLANES[bits])


def _plane_bytes(cells: int, columns: int, plane: int) -> int:
    return -(-cells * plane // 8) * columns * 4


@dataclass(frozen=True)
class Metric:
    """What an error of a key costs its head, for rounding: made from `E[q q^T]`, q the queries of the head's group.

    `order` int64 `[H, D]`: channels, the one that queries weigh most first. `factor` float32 `[H, D, D]`: upper
    Cholesky factor of the inverse, channels in that order.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, gram: Tensor, damping: float = 0.1) -> "Metric":
        """From `[H, D, D]`, symmetric and not negative; `damping` of the mean diagonal is added to it.

        Raises:
            ValueError: not finite.
        """
        gram = gram.detach().to("cpu", torch.float64)
        if not bool(gram.isfinite().all()):
            raise ValueError("query_gram: not finite")
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        order = diagonal.argsort(dim=-1, descending=True, stable=True)
        # A head that no query was measured for rounds each number by itself.
        mean = diagonal.mean(-1)
        mean = torch.where(mean > 0, mean, 1)
        turned = gram.gather(1, order[:, :, None].expand_as(gram)).gather(2, order[:, None].expand_as(gram))
        turned = turned + damping * mean[:, None, None] * torch.eye(gram.shape[-1], dtype=torch.float64)
        inverse = torch.linalg.inv(turned / mean[:, None, None])
        return cls(order, torch.linalg.cholesky((inverse + inverse.mT) / 2, upper=True).float())

    def to(self, device: torch.device) -> "Metric":
        return Metric(self.order.to(device), self.factor.to(device))

    def heads(self, index: list[int]) -> "Metric":
        return Metric(self.order[index], self.factor[index])


def encode(key: Tensor, value: Tensor, bits: int, metric: Metric | None = None) -> Tensor:
    """Blocks `[..., 64, D]` and `[..., 64, Dv]` -> records uint8 `[..., nbytes]`.

    Args:
        metric: of H heads; blocks are `[B, H, N, 64, D]` then. Keys are rounded so that the scores of the metric's
            queries change least, not each number by itself: the error of one channel is made good in those that follow,
            as GPTQ does with weights (Frantar et al., 2023, section 3.3).
    """
    record = Record(bits, key.shape[-1], value.shape[-1])
    # One layout whatever was asked for together, so that a block's codes depend on nothing but the block.
    k = key.reshape(-1, BLOCK, record.head_dim).float().contiguous()
    v = value.reshape(-1, BLOCK, record.value_dim).float().contiguous()
    if metric is None:
        key_codes, key_scale, key_zero = _key_codes(k, bits)
    else:
        key_zero, key_scale = grid(k, bits, 1, METRIC_SHRINKS.get(bits, (1.0,)))
        key_codes = rounded(k, key_zero, key_scale, bits, metric, key.shape[0], key.shape[1])
    parts = _value_parts(v, bits)
    value_codes = torch.cat([codes for codes, _, _ in parts], 2)
    value_scale = torch.cat([scale for _, scale, _ in parts], 2).transpose(1, 2)
    value_zero = torch.cat([zero for _, _, zero in parts], 2).transpose(1, 2)
    out = torch.empty(len(k), record.nbytes, dtype=torch.uint8, device=key.device)
    tensors = (
        pack(key_codes.transpose(1, 2), bits), as_bytes(key_scale), as_bytes(key_zero),
        pack(value_codes, bits), as_bytes(value_scale), as_bytes(value_zero),
    )  # fmt: skip
    for part, tensor in zip(record.parts, tensors, strict=True):
        out[:, part] = tensor
    records: Tensor = out.view(*key.shape[:-2], record.nbytes)
    return records


def decode(records: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    """Records `[..., nbytes]` -> the keys `[..., 64, D]` and values `[..., 64, Dv]` they stand for, float32."""
    key_codes, key_scale, key_zero, value_codes, value_scale, value_zero = unpack_record(records, record)
    key = key_codes.float() * key_scale.float()[..., None] + key_zero.float()[..., None]
    step, zero = spread(value_scale.float(), record.value_dim), spread(value_zero.float(), record.value_dim)
    return key.transpose(-1, -2), value_codes.float() * step + zero


def coded_keys(key: Tensor, bits: int) -> Tensor:
    """What blocks `[..., 64, D]` of keys stand for once encoded, without a metric; `decode(encode(...))`, float32."""
    k = key.reshape(-1, BLOCK, key.shape[-1]).float().contiguous()
    codes, scale, zero = _key_codes(k, bits)
    return (codes.float() * scale.float() + zero.float()).view(key.shape)


def coded_values(value: Tensor, bits: int) -> Tensor:
    """What tokens `[..., Dv]` of values stand for once encoded; each token by itself. float32."""
    parts = _value_parts(value.reshape(1, -1, value.shape[-1]).float().contiguous(), bits)
    return torch.cat([codes.float() * scale.float() + zero.float() for codes, scale, zero in parts], 2).view(
        value.shape
    )


def _key_codes(k: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    zero, scale = grid(k, bits, 1, SHRINKS.get(bits, (1.0,)))
    return nearest(k, zero, scale, bits).to(torch.uint8), scale, zero


def _value_parts(v: Tensor, bits: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Codes, scale and zero point of each group of channels."""
    return [asymmetric(part.contiguous(), bits, 2) for part in v.split(GROUP, 2)]


def unpack_record(records: Tensor, record: Record) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Key codes uint8 `[..., D, 64]`, their scales and zero points float16 `[..., D]`, value codes `[..., 64, Dv]`,
    their scales and zero points `[..., G, 64]`."""
    parts = [records[..., part] for part in record.parts]
    halves = [part.contiguous().view(torch.float16) for part in (parts[1], parts[2], parts[4], parts[5])]
    groups = (record.groups, BLOCK)
    return (
        unpack(parts[0], record.bits, record.head_dim, BLOCK), halves[0], halves[1],
        unpack(parts[3], record.bits, BLOCK, record.value_dim), halves[2].unflatten(-1, groups),
        halves[3].unflatten(-1, groups),
    )  # fmt: skip


def rounded(key: Tensor, zero: Tensor, scale: Tensor, bits: int, metric: Metric, batch: int, heads: int) -> Tensor:
    """Codes uint8 `[batch * heads * N, 64, D]` of keys of that shape, rounded for the metric's queries."""
    blocks, _, dim = key.shape
    each = blocks // (batch * heads)

    def by_channel(x: Tensor) -> Tensor:
        """`[blocks, L, D]` -> `[D, H, B * N, L]`, channels in the metric's order."""
        x = x.view(batch, heads, each, x.shape[1], dim).permute(4, 1, 0, 2, 3).flatten(2, 3)
        return x.gather(0, metric.order.T[:, :, None, None].expand_as(x))

    rest, low, step = by_channel(key).contiguous(), by_channel(zero.float()), by_channel(scale.float())
    step = step.masked_fill(step == 0, 1)
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=key.device)
    for d in range(dim):
        code = ((rest[d] - low[d]) / step[d]).round_().clamp_(0, 2**bits - 1)
        codes[d] = code
        error = (rest[d] - (code * step[d] + low[d])) / metric.factor[:, d, d, None, None]
        if d + 1 < dim:
            rest[d + 1 :] -= error * metric.factor[:, d, d + 1 :].T[:, :, None, None]
    back = torch.empty_like(codes).scatter_(0, metric.order.T[:, :, None, None].expand_as(codes), codes)
    chosen: Tensor = back.unflatten(2, (batch, each)).permute(2, 1, 3, 4, 0).reshape(blocks, BLOCK, dim)
    return chosen


def asymmetric(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x ~ zero + scale * codes` over `dim`: codes uint8 in 0..2^bits - 1, scale and zero in float16, `dim` kept."""
    zero, scale = grid(x, bits, dim)
    return nearest(x, zero, scale, bits).to(torch.uint8), scale, zero


def grid(x: Tensor, bits: int, dim: int, shrinks: tuple[float, ...] = (1.0,)) -> tuple[Tensor, Tensor]:
    """Zero point and scale over `dim`, from the range of `x`, or from that part of it whose codes have least error."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    middle = (low + high) / 2
    zero = scale = least = None
    for shrink in shrinks:
        bottom = low if shrink == 1 else middle - (middle - low) * shrink
        top = high if shrink == 1 else middle + (high - middle) * shrink
        new_zero = -half_above(-bottom)
        new_scale = half_above((top - new_zero.float()) / (2**bits - 1))
        if len(shrinks) == 1:
            zero, scale = new_zero, new_scale
            break
        back = nearest(x, new_zero, new_scale, bits) * new_scale.float() + new_zero.float()
        error = (back - x).square_().sum(dim, keepdim=True)
        if least is None or zero is None or scale is None:
            zero, scale, least = new_zero, new_scale, error
        else:
            better = error < least
            zero, scale = torch.where(better, new_zero, zero), torch.where(better, new_scale, scale)
            least = torch.where(better, error, least)
    assert zero is not None
    assert scale is not None
    return zero, scale


def nearest(x: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensor:
    step = scale.float().masked_fill(scale == 0, 1)
    return ((x - zero.float()) / step).round_().clamp_(0, 2**bits - 1)


def half_above(x: Tensor) -> Tensor:
    """The least float16 that is not below `x`: a scale never rounds to 0, a range never loses its ends.

    Raises:
        ValueError: a finite number that float16 cannot hold. One that is not finite stays visible.
    """
    near = x.half()
    bits = near.view(torch.int16)
    above = (
        torch.where(bits == -32768, 1, torch.where(bits >= 0, bits + 1, bits - 1)).to(torch.int16).view(torch.float16)
    )
    up = torch.where(near.float() < x, above, near)
    if not bool(up.isfinite().all()) and bool((x.isfinite() & ~up.isfinite()).any()):
        raise ValueError(f"coded_attention: numbers beyond {HALF_MAX:,.0f} cannot be held as codes")
    return up


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[..., rows, columns]` -> bytes `[..., packed_bytes(rows / 4, columns, bits)]`.

    Rows are what a product sums over: channels of keys, tokens of values.
    """
    cells = codes.unflatten(-2, (-1, 4)).transpose(-1, -2)  # [..., rows / 4, columns, 4]
    planes, shift = [], 0
    for plane in PLANES[bits]:
        part = (cells >> shift & (2**plane - 1)) if plane < bits else cells
        planes.append(_fold(part, plane))
        shift += plane
    return torch.cat(planes, -1)


def _fold(cells: Tensor, plane: int) -> Tensor:
    """Cells of `plane` bits -> bytes, 8 / plane neighbours along the first axis of cells in each."""
    share = 8 // plane
    missing = -cells.shape[-3] % share
    if missing:
        cells = torch.cat([cells, cells.new_zeros(*cells.shape[:-3], missing, *cells.shape[-2:])], -3)
    parts = cells.unflatten(-3, (-1, share))
    whole: Tensor = parts[..., 0, :, :]
    for i in range(1, share):
        whole = whole | parts[..., i, :, :] << i * plane
    return whole.flatten(-3)


def unpack(packed: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """The inverse of `pack`: uint8 `[..., rows, columns]`."""
    cells, shift, first = None, 0, 0
    for plane in PLANES[bits]:
        size = _plane_bytes(rows // 4, columns, plane)
        folded = packed[..., first : first + size].unflatten(-1, (-1, columns, 4))
        share = 8 // plane
        parts = [folded >> i * plane & (2**plane - 1) for i in range(share)] if share > 1 else [folded]
        part = torch.stack(parts, -3).flatten(-4, -3)[..., : rows // 4, :, :]
        cells = part if cells is None else cells | part << shift
        shift, first = shift + plane, first + size
    assert cells is not None
    return cells.transpose(-1, -2).flatten(-3, -2)


def spread(x: Tensor, value_dim: int) -> Tensor:
    """`[..., G, 64]` per channel group -> `[..., 64, Dv]` per channel."""
    wide = x.transpose(-1, -2).repeat_interleave(GROUP, -1)
    return wide[..., :value_dim]


def as_bytes(x: Tensor) -> Tensor:
    return x.flatten(1).contiguous().view(torch.uint8)


__all__ = [
    "BLOCK",
    "GROUP",
    "WIDTHS",
    "Record",
    "asymmetric",
    "coded_keys",
    "coded_values",
    "decode",
    "encode",
    "pack",
    "spread",
    "unpack",
    "unpack_record",
]
