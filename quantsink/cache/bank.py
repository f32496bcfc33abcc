"""What a layer of a `SinkCache` keeps, and the tensors that hold its blocks of codes."""

from collections.abc import Sequence

import torch

from quantsink.cache.layout import LayerRule
from quantsink.kernels.coded_attention.codes import BLOCK, Record

SPARE = 32
"""A bank grows by this part of its size, so that it never holds much more than its codes."""


class Bank:
    """KV heads of one width and window: their blocks, oldest first. `count[b]` of row b are in use."""

    def __init__(self, heads: Sequence[int], record: Record, window: int) -> None:
        self.heads, self.record, self.window = tuple(heads), record, window
        self.clear(0, torch.device("cpu"))

    def clear(self, batch: int, device: torch.device) -> None:
        shape = (batch, len(self.heads), 0, self.record.nbytes)
        self.data = torch.empty(shape, dtype=torch.uint8, device=device)
        self.count = [0] * batch

    def keep(self, blocks: int, newest: int) -> int:
        """Blocks of `blocks` that a row with `newest` exact tokens still needs: one more than its window, so that a few
        tokens can be taken back."""
        return min(blocks, -(-max(self.window - newest, 0) // BLOCK) + 1) if self.window else blocks

    def reserve(self, blocks: int) -> None:
        """Room for `blocks` blocks a row."""
        have = self.data.shape[2]
        if blocks > have:
            size = max(blocks, have + have // SPARE + 1 if have else 0)
            new = self.data.new_empty(*self.data.shape[:2], size, self.record.nbytes)
            new[:, :, :have] = self.data
            self.data = new

    def drop(self, row: int, blocks: int) -> None:
        """Forget a row's oldest blocks."""
        if blocks > 0:
            left = self.count[row] - blocks
            self.data[row, :, :left] = self.data[row, :, blocks : blocks + left].clone()
            self.count[row] = left


def banks_of(rule: LayerRule) -> list[Bank]:
    """Empty banks for every width and window of a layer."""
    kinds = list(zip(rule.bits, rule.windows, strict=True))
    return [
        Bank(
            [head for head, own in enumerate(kinds) if own == kind],
            Record(kind[0], rule.head_dim, rule.head_dim),
            kind[1],
        )
        for kind in sorted(set(kinds), key=lambda kind: (-kind[0], kind[1]))
    ]


__all__ = ["Bank", "banks_of"]
