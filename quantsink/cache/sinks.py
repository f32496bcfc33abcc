"""The sink tokens of a layer of a `SinkCache`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rotate = Callable[[Tensor, int], Tensor]
"""`rotate(keys, shift)` turns keys by `shift` positions."""


class SinkTokens:
    """Exact keys and values of every row's first tokens, `[B, KVH, sink_size, D]`; None before a row has a block."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.turned: Tensor | None = None
        """The keys at the positions that they have in a rolling cache; None until the first is turned."""

    @property
    def visible_key(self) -> Tensor | None:
        """The keys as attention reads them."""
        return self.key if self.turned is None else self.turned

    def store(self, key: Tensor, value: Tensor, rows: list[int]) -> None:
        """`key` and `value` `[B, KVH, sink_size, D]`, of which those of `rows` are kept."""
        if self.key is None or self.value is None:
            self.key, self.value = (torch.zeros(key.shape, dtype=key.dtype, device=key.device) for _ in "kv")
        self.key[rows], self.value[rows] = key[rows], value[rows]
        if self.turned is not None:
            self.turned[rows] = self.key[rows]

    def turn(self, shifts: Sequence[int], before: Sequence[int], rotate: Rotate) -> None:
        """Turn each row's keys by its shift; `before` holds the shifts so far. They are always turned from the
        originals, so errors do not add up."""
        if self.key is None:
            return
        if self.turned is None:
            self.turned = self.key.clone()
        for row, (shift, old) in enumerate(zip(shifts, before, strict=True)):
            if shift != old:
                self.turned[row] = rotate(self.key[row : row + 1], shift)[0]

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put `change(tensor)` in the place of each tensor."""
        self.key, self.value, self.turned = (
            None if x is None else change(x) for x in (self.key, self.value, self.turned)
        )

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.key, self.value, self.turned) if x is not None]


__all__ = ["Rotate", "SinkTokens"]
