"""The tensors that hold a layer's blocks of codes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quantsink.cache.layout import LayerPolicy
from quantsink.kernels.coded_attention.codes import BLOCK, Metric, Record, encode

SPARE = 32
"""A bank grows by this part of its size, so that it never holds much more than its codes."""
SLICE = 16
"""Blocks that are encoded at once: bounds what encoding needs beside the keys and values."""


class Bank:
    """KV heads of one width and window: uint8 `[B, heads, capacity, record bytes]`, each row's oldest block first.

    How many blocks of a row are in use, its `count`, the layer knows.

    Args:
        heads: the KV heads of the layer that are in it.
        record: what one block of one head looks like.
        window: newest tokens that these heads keep beside the sinks; 0: all.
        metric: of these heads, for rounding keys; None rounds each number by itself.
    """

    def __init__(self, heads: Sequence[int], record: Record, window: int, metric: Metric | None = None) -> None:
        self.heads, self.record, self.window, self.metric = tuple(heads), record, window, metric
        self.clear(0, torch.device("cpu"))

    def clear(self, batch: int, device: torch.device) -> None:
        shape = (batch, len(self.heads), 0, self.record.nbytes)
        self.data = torch.empty(shape, dtype=torch.uint8, device=device)

    def keep(self, blocks: int, newest: int) -> int:
        """Blocks of `blocks` that a row with `newest` exact tokens still needs: one more than its window, so that a few
        tokens can be taken back."""
        return min(blocks, -(-max(self.window - newest, 0) // BLOCK) + 1) if self.window else blocks

    def reserve(self, blocks: int) -> None:
        """Room for `blocks` blocks per row."""
        capacity = self.data.shape[2]
        if blocks > capacity:
            size = max(blocks, capacity + capacity // SPARE + 1 if capacity else 0)
            grown = self.data.new_empty(*self.data.shape[:2], size, self.record.nbytes)
            grown[:, :, :capacity] = self.data
            self.data = grown

    def drop(self, rows: Iterable[int], count: int, blocks: int) -> None:
        """Forget the oldest `blocks` of the `count` blocks of each of `rows`."""
        if blocks > 0:
            for row in rows:
                self.data[row, :, : count - blocks] = self.data[row, :, blocks:count].clone()

    def write(self, key: Tensor, value: Tensor, rows: list[int] | None, count: int) -> None:
        """Encode `key` and `value` `[B, KVH, n * 64, D]` of `rows` (None: of all) behind their `count` blocks.

        Raises:
            ValueError: numbers too large for a scale.
        """
        blocks = key.shape[2] // BLOCK
        self.reserve(count + blocks)
        heads = list(self.heads) if len(self.heads) < key.shape[1] else None
        if self.metric is not None and self.metric.factor.device != key.device:
            self.metric = self.metric.to(key.device)
        for first in range(0, blocks, SLICE):
            last = min(first + SLICE, blocks)
            tokens = slice(first * BLOCK, last * BLOCK)
            k, v = (_pick(x, rows, heads, tokens).unflatten(2, (last - first, BLOCK)) for x in (key, value))
            with torch.autocast(key.device.type, enabled=False):
                codes = encode(k, v, self.record.bits, self.metric)
            if rows is None:
                self.data[:, :, count + first : count + last] = codes
            else:
                self.data[rows, :, count + first : count + last] = codes


def _pick(x: Tensor, rows: list[int] | None, heads: list[int] | None, tokens: slice) -> Tensor:
    x = x[:, :, tokens] if rows is None else x[rows, :, tokens]
    return x if heads is None else x[:, heads]


def banks_of(policy: LayerPolicy, metric: Metric | None = None) -> list[Bank]:
    """Empty banks for every width and window of a layer, the widest first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for head, (bits, window) in enumerate(zip(policy.bits, policy.windows, strict=True)):
        groups.setdefault((bits, window), []).append(head)
    return [
        Bank(
            heads,
            Record(bits, policy.head_dim, policy.head_dim),
            window,
            None if metric is None else metric.heads(heads),
        )
        for (bits, window), heads in sorted(groups.items(), key=lambda group: (-group[0][0], group[0][1]))
    ]


def places_of(banks: Sequence[Bank]) -> Tensor:
    """int64 `[KVH, 2]`: each KV head's bank and its place there."""
    places = {head: (number, place) for number, bank in enumerate(banks) for place, head in enumerate(bank.heads)}
    return torch.tensor([places[head] for head in sorted(places)], dtype=torch.int64)


__all__ = ["Bank", "banks_of", "places_of"]
