"""Removing the newest tokens of a layer of a `SinkCache`, also where they are codes already."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantsink.cache.rows import Row
from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK, decode

if TYPE_CHECKING:
    from quantsink.cache.layer import SinkLayer


def check(layer: "SinkLayer", remove: int) -> None:
    """Refuse to remove `remove` tokens of every row where a streaming head or a rolling cache has dropped what would
    then be needed.

    Raises:
        CacheError: it has.
    """
    sink_size = layer.policy.sink_size
    for row in layer.rows:
        length = max(row.length(layer.total) - remove, 0)
        whole = _whole_blocks(row, length, sink_size)
        for bank, count in zip(layer.banks, row.counts, strict=True):
            if count == row.blocks or length == 0:
                continue
            held = count * BLOCK + row.newest(layer.total, sink_size) - remove
            if held < min(bank.window, length - sink_size) or row.blocks - whole > count or not whole:
                raise CacheError(
                    f"{layer.policy.name}: cropped by {remove} tokens, into what its streaming heads or a rolling "
                    "cache have dropped; call cache.reset()"
                )


def remove(layer: "SinkLayer", count: int) -> None:
    """Remove the newest `count` columns; `check` has passed."""
    if all(count <= newest for newest in layer.newest()):
        layer.used, layer.total = layer.used - count, layer.total - count
    elif count:
        _remove_codes(layer, count)


def _remove_codes(layer: "SinkLayer", count: int) -> None:
    rows, tails = [], []
    total = layer.total - count
    for index, row in enumerate(layer.rows):
        length = max(row.length(layer.total) - count, 0)
        whole = _whole_blocks(row, length, layer.policy.sink_size)
        tails.append(_tail(layer, index, length, whole))
        start = min(row.start, total)
        counts = tuple(held - (row.blocks - whole) for held in row.counts)
        rows.append(Row(start, whole, counts, row.dropped) if length else Row(start, 0, (0,) * len(counts)))
    columns = max(key.shape[1] for key, _ in tails)
    shape = (len(rows), layer.policy.kv_heads, layer.capacity(columns), layer.policy.head_dim)
    keys, values = (torch.zeros(shape, dtype=layer.dtype, device=layer.device) for _ in "kv")
    for index, (key, value) in enumerate(tails):
        keys[index, :, columns - key.shape[1] : columns] = key
        values[index, :, columns - value.shape[1] : columns] = value
    layer.keys, layer.values, layer.used, layer.total, layer.rows = keys, values, columns, total, rows


def _whole_blocks(row: Row, length: int, sink_size: int) -> int:
    """Blocks that a row of `length` tokens keeps whole."""
    return min(row.blocks, max(length - sink_size, 0) // BLOCK)


def _tail(layer: "SinkLayer", index: int, length: int, whole: int) -> tuple[Tensor, Tensor]:
    """Exact keys and values `[KVH, n, D]` of a row that is cropped to `length` tokens and keeps `whole` blocks."""
    assert layer.keys is not None
    assert layer.values is not None
    row, sink_size = layer.rows[index], layer.policy.sink_size
    if not length:
        return layer.keys[index, :, :0], layer.values[index, :, :0]
    missing = row.blocks - whole
    if missing:
        key, value = _decoded(layer, index, missing)
    else:
        newest = slice(layer.used - row.newest(layer.total, sink_size), layer.used)
        key, value = layer.keys[index, :, newest], layer.values[index, :, newest]
    length -= whole * BLOCK + (sink_size if whole else 0)
    if row.blocks and sink_size and not whole:
        assert layer.sinks.key is not None
        assert layer.sinks.value is not None
        key, value = torch.cat([layer.sinks.key[index], key], 1), torch.cat([layer.sinks.value[index], value], 1)
    return key[:, :length], value[:, :length]


def _decoded(layer: "SinkLayer", index: int, missing: int) -> tuple[Tensor, Tensor]:
    """The numbers `[KVH, 64, D]` of the oldest of the newest `missing` blocks of a row."""
    shape = (layer.policy.kv_heads, BLOCK, layer.policy.head_dim)
    key, value = (torch.empty(shape, dtype=layer.dtype, device=layer.device) for _ in "kv")
    for bank, count in zip(layer.banks, layer.rows[index].counts, strict=True):
        k, v = decode(bank.data[index, :, count - missing], bank.record)
        heads = list(bank.heads)
        key[heads], value[heads] = k.to(layer.dtype), v.to(layer.dtype)
    return key, value


__all__ = ["check", "remove"]
