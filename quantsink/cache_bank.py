"""What a layer of a `SinkCache` keeps, and the tensors that hold its blocks of codes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK, Record

SPARE = 32
"""A bank grows by this part of its size, so that it never holds much more than its codes."""


@dataclass(frozen=True)
class LayerRule:
    """What one layer keeps. `bits` and `windows` by KV head; window 0 keeps every block, n those that reach into the
    newest n tokens. `max_length`: tokens that the layer may hold, sinks included; None: all."""

    name: str
    index: int
    bits: tuple[int, ...]
    windows: tuple[int, ...]
    head_dim: int
    sinks: int
    residual: int
    max_length: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("sinks", 0), ("residual", 0), ("max_length", self.sinks + self.residual + 2 * BLOCK)):
            value = getattr(self, field)
            if field == "max_length" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CacheError(f"{self.name}: {field} {value!r}: a whole number, at least {least}")
        if any(isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in self.windows):
            raise CacheError(f"{self.name}: windows {list(self.windows)}: whole numbers, 0 for all tokens")

    @property
    def kv_heads(self) -> int:
        return len(self.bits)

    @property
    def held(self) -> int:
        """Exact tokens of a row between passes, at most."""
        return self.sinks + self.residual + BLOCK - 1


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


__all__ = ["Bank", "LayerRule", "banks_of"]
