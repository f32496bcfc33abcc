"""Keys and values as codes of 8 or 4 bits: what `quantsink::coded_attention` reads, and how they are made.

A block is 64 keys. Keys take one scale and zero point per (block, channel), values one per (key, 64 channels),
as KIVI does (Liu et al., 2024); both in float16. Four codes make a cell; in 4 bits a byte holds a code of one cell in
its low half and of the next cell in its high half. kernels/csrc/coded_kernel.h reads the same layout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Keys of a block."""
HALF_MAX = 65504.0
GROUP = 64
"""Channels of a value that share a scale."""


@dataclass(frozen=True)
class CodedKV:
    """Keys in the order: `sinks` exact ones, N blocks of codes, the newest exact ones.

    Shapes: `exact_key` `[B, KVH, E, D]` and `exact_value` `[B, KVH, E, Dv]` hold sinks and newest together;
    `key_codes` uint8 `[B, KVH, N, 64 * D * bits / 8]`, `key_scale` and `key_zero` float16 `[B, KVH, N, D]`;
    `value_codes` uint8 `[B, KVH, N, 64 * Dv * bits / 8]`, `value_scale` and `value_zero` float16 `[B, KVH, N, G, 64]`
    with G groups of at most 64 channels.
    """

    bits: int
    sinks: int
    exact_key: Tensor
    exact_value: Tensor
    key_codes: Tensor
    key_scale: Tensor
    key_zero: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_zero: Tensor

    def __len__(self) -> int:
        """Keys in all."""
        return int(self.exact_key.shape[2] + self.key_codes.shape[2] * BLOCK)

    @classmethod
    def encode(cls, key: Tensor, value: Tensor, *, bits: int, sinks: int = 1, newest: int = 64) -> "CodedKV":
        """Codes of all whole blocks between the first `sinks` and at least the `newest` last tokens.

        Args:
            key, value: `[B, KVH, L, D]` and `[B, KVH, L, Dv]`; D a multiple of 8, Dv of 16.
            bits: 8 or 4.

        Raises:
            ValueError: sizes or bits that the layout has no place for.
        """
        check(bits, key.shape[3], value.shape[3])
        sinks = min(sinks, key.shape[2])
        blocks = max(key.shape[2] - sinks - newest, 0) // BLOCK
        middle = slice(sinks, sinks + blocks * BLOCK)
        k = key[:, :, middle].float().unflatten(2, (blocks, BLOCK))
        key_codes, key_scale, key_zero = asymmetric(k, bits, 3)
        groups = -(-value.shape[3] // GROUP)
        v = value[:, :, middle].float().unflatten(2, (blocks, BLOCK))
        parts = [asymmetric(part, bits, 4) for part in v.split(GROUP, 4)]
        assert len(parts) == groups
        return cls(
            bits,
            sinks,
            torch.cat([key[:, :, :sinks], key[:, :, middle.stop :]], 2),
            torch.cat([value[:, :, :sinks], value[:, :, middle.stop :]], 2),
            pack(key_codes.transpose(3, 4), bits),
            key_scale.squeeze(3),
            key_zero.squeeze(3),
            pack(torch.cat([codes for codes, _, _ in parts], 4), bits),
            torch.stack([scale.squeeze(4) for _, scale, _ in parts], 3),
            torch.stack([zero.squeeze(4) for _, _, zero in parts], 3),
        )


def check(bits: int, head_dim: int, value_dim: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"coded_attention: codes have 8 or 4 bits, not {bits}")
    if head_dim % 8 or value_dim % 16:
        raise ValueError(
            f"coded_attention: head sizes must be multiples of 8 (keys) and 16 (values), not {head_dim} and {value_dim}"
        )


def asymmetric(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x ~ zero + scale * codes` over `dim`: codes uint8 in 0..2^bits - 1, scale and zero in float16, `dim` kept."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = saturated(low, -HALF_MAX)
    scale = saturated((high - zero.float()) / (2**bits - 1), 0)
    step = scale.float().masked_fill(scale == 0, 1)
    codes = ((x - zero.float()) / step).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, zero


def saturated(x: Tensor, least: float) -> Tensor:
    """In float16; what is finite stays so, what is not stays visible."""
    return torch.where(x.isfinite(), x.clamp(least, HALF_MAX), x).half()


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[B, KVH, N, rows, columns]` -> bytes `[B, KVH, N, rows * columns * bits / 8]`: cells of 4 rows, by column.

    Rows are what a product sums over: channels of keys, keys of values.
    """
    cells: Tensor = codes.unflatten(3, (-1, 4)).transpose(4, 5)  # [..., rows / 4, columns, 4]
    if bits == 4:
        cells = cells[:, :, :, 0::2] | cells[:, :, :, 1::2] << 4
    return cells.flatten(3).contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`: uint8 `[B, KVH, N, rows, columns]`."""
    cells: Tensor = packed.unflatten(3, (-1, columns, 4))
    if bits == 4:
        cells = torch.stack([cells & 15, cells >> 4], 4).flatten(3, 4)
    return cells.transpose(4, 5).flatten(3, 4)


def spread(x: Tensor, value_dim: int) -> Tensor:
    """`[..., G, 64]` per channel group -> `[..., 64, Dv]` per channel."""
    wide = x.transpose(-1, -2).repeat_interleave(GROUP, -1)
    return wide[..., :value_dim]


__all__ = ["BLOCK", "GROUP", "CodedKV", "asymmetric", "check", "pack", "spread", "unpack"]
