"""One layer's KV cache as attention reads it: sinks and newest tokens exact, what lies between in codes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.kernels.coded_attention.codes import BLOCK, Record, encode


@dataclass(frozen=True)
class CodedKV:
    """What attention over a coded cache needs to know; it copies none of it.

    `sink_key` `[B, KVH, S, D]`, `sink_value` `[B, KVH, S, Dv]`: the first tokens, exact; S may be 0.
    `key` `[B, KVH, R, D]`, `value` `[B, KVH, R, Dv]`: the newest tokens, exact, aligned at the end.
    `banks`: one for each width, uint8 `[B, heads of that width, capacity, record bytes]`; no gaps within a record.
    `bits`: those of each bank.
    `heads`: int64 `[KVH, 2]` on the CPU, each KV head's bank and its place there.
    `rows`: int64 `[B, 2 + banks]` on the CPU: of each batch row the used sinks (the first), newest tokens (the last)
    and blocks of each bank (the first). What is not used is never read into a result.
    """

    sink_key: Tensor
    sink_value: Tensor
    key: Tensor
    value: Tensor
    banks: tuple[Tensor, ...]
    bits: tuple[int, ...]
    heads: Tensor
    rows: Tensor

    @classmethod
    def encode(
        cls, key: Tensor, value: Tensor, bits: int | tuple[int, ...] = 4, sinks: int = 1, newest: int = 64
    ) -> "CodedKV":
        """`[B, KVH, L, D]` and `[B, KVH, L, Dv]`, all rows alike: whole blocks between the sinks and the newest tokens.

        Args:
            bits: of every KV head, or of each.
            newest: tokens at least that stay exact; without a whole block before them all do.
        """
        batch, kv_heads, tokens = key.shape[:3]
        widths = (bits,) * kv_heads if isinstance(bits, int) else bits
        banks, heads = tuple(dict.fromkeys(widths)), []
        for h, width in enumerate(widths):
            heads.append((banks.index(width), widths[:h].count(width)))
        blocks = max(tokens - sinks - newest, 0) // BLOCK
        first = sinks if blocks else 0
        last = first + blocks * BLOCK
        k, v = (x[:, :, first:last].unflatten(2, (blocks, BLOCK)) for x in (key, value))
        coded = []
        for width in banks:
            chosen = [w == width for w in widths]
            coded.append(encode(k[:, chosen], v[:, chosen], width))
        return cls(
            key[:, :, :first],
            value[:, :, :first],
            key[:, :, last:],
            value[:, :, last:],
            tuple(coded),
            banks,
            torch.tensor(heads).view(-1, 2),
            torch.tensor([[first, tokens - last, *[blocks] * len(banks)]]).repeat(batch, 1),
        )


record = functools.lru_cache(Record)


def check(codes: CodedKV, query: Tensor, routes: Tensor) -> None:
    """Refuse shapes and types that do not fit together; bind_coded.cpp compares the same."""
    for name in ("sink_key", "sink_value", "key", "value"):
        if getattr(codes, name).dim() != 4:
            raise _misfit(name, getattr(codes, name), ["B", "KV heads", "tokens", "D"])
    if query.dim() != 4:
        raise _misfit("query", query, ["B", "heads", "Lq", "D"])
    batch, heads, _, head_dim = query.shape
    key, value, sink_key, sink_value = codes.key.shape, codes.value.shape, codes.sink_key.shape, codes.sink_value.shape
    kv_heads, newest, sinks, value_dim = key[1], key[2], sink_key[2], value[3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"coded_attention: {heads} query heads cannot share {kv_heads} KV heads evenly")
    if sink_key != (batch, kv_heads, sinks, head_dim):
        raise _misfit("sink_key", codes.sink_key, [batch, kv_heads, sinks, head_dim])
    if sink_value != (batch, kv_heads, sinks, value_dim):
        raise _misfit("sink_value", codes.sink_value, [batch, kv_heads, sinks, value_dim])
    if key != (batch, kv_heads, newest, head_dim):
        raise _misfit("key", codes.key, [batch, kv_heads, newest, head_dim])
    if value != (batch, kv_heads, newest, value_dim):
        raise _misfit("value", codes.value, [batch, kv_heads, newest, value_dim])
    if codes.heads.shape != (kv_heads, 2):
        raise _misfit("heads", codes.heads, [kv_heads, 2])
    if codes.rows.shape != (batch, 2 + len(codes.banks)):
        raise _misfit("rows", codes.rows, [batch, 2 + len(codes.banks)])
    if routes.shape != (heads,):
        raise _misfit("routes", routes, [heads])
    for name, table in (("heads", codes.heads), ("rows", codes.rows)):
        if table.dtype != torch.int64 or not table.is_cpu:
            raise ValueError(f"coded_attention: {name} must be int64 on the CPU, not {table.dtype} on {table.device}")


def check_banks(head_dim: int, value_dim: int, banks: Sequence[Tensor], bits: Sequence[int], batch: int) -> None:
    """Refuse banks that are not what `bits` says."""
    if not banks or len(bits) != len(banks):
        raise ValueError(f"coded_attention: {len(banks)} banks with {len(bits)} widths; at least one, a width for each")
    for n, (bank, width) in enumerate(zip(banks, bits, strict=True)):
        size = record(width, head_dim, value_dim).nbytes
        if bank.dim() != 4 or bank.shape[0] != batch or bank.shape[3] != size:
            raise _misfit(f"banks[{n}]", bank, [batch, "heads", "blocks", size])
        if bank.dtype != torch.uint8 or (bank.stride(3) != 1 and bank.numel()):
            raise ValueError(f"coded_attention: banks[{n}] must be uint8, no gaps within a record, not {bank.dtype}")


def check_tables(codes: CodedKV) -> tuple[list[list[int]], list[list[int]]]:
    """Refuse `heads` and `rows` that the banks do not have; both as lists."""
    heads, rows = codes.heads.tolist(), codes.rows.tolist()
    limits = [codes.sink_key.shape[2], codes.key.shape[2], *(bank.shape[2] for bank in codes.banks)]
    for h, (bank, place) in enumerate(heads):
        if not (0 <= bank < len(codes.banks) and 0 <= place < codes.banks[bank].shape[1]):
            raise ValueError(f"coded_attention: heads[{h}] is {[bank, place]}, where no bank has a head")
    for b, row in enumerate(rows):
        for used, limit in zip(row, limits, strict=True):
            if not 0 <= used <= limit:
                raise ValueError(
                    f"coded_attention: rows[{b}] is {row}; sinks, newest tokens and blocks by bank are at most {limits}"
                )
    return heads, rows


def _misfit(name: str, tensor: Tensor, shape: list[int | str]) -> ValueError:
    return ValueError(f"coded_attention: {name} must be {shape}, not {list(tensor.shape)}")
