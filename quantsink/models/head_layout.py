"""Which channels of an attention module's projections are each head's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadSlices:
    """Which channels of a linear layer are each head's: `size` of them from `starts[head]` on."""

    module: str
    starts: tuple[int, ...]
    size: int

    def channels(self, heads: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.starts[head] + i for head in heads for i in range(self.size))

    @classmethod
    def even(cls, module: str, heads: int, size: int, first: int = 0, step: int | None = None) -> "HeadSlices":
        return cls(module, tuple(first + head * (step or size) for head in range(heads)), size)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: H query heads on KVH key/value heads; keys of size D, values of size Dv.

    Head h's query is the slice `h` of output channels of `q`, its result the slice `h` of input channels of `o`; it
    reads KV head `h * KVH // H`, slices of `k` and `v`. With latent attention `k` holds the part without positions.
    """

    name: str
    index: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q: HeadSlices
    k: HeadSlices
    v: HeadSlices
    o: HeadSlices
    window: int | None = None
    """Newest tokens that a sliding layer sees; None: all."""
    causal: bool = True
    """False: an encoder's, every token sees every other."""

    def kv_head(self, head: int) -> int:
        return head * self.kv_heads // self.heads

    @property
    def outline(self) -> tuple[Any, ...]:
        """All but the places of the slices, which a model without weights cannot show."""
        linears = (self.q.module, self.k.module, self.v.module, self.o.module)
        return (
            self.name, self.index, self.heads, self.kv_heads, self.head_dim, self.value_dim, self.window, self.causal,
            linears,
        )  # fmt: skip


Cut = tuple[HeadSlices, HeadSlices, HeadSlices]


def separate(inputs: list[str], rows: list[int], heads: int, size: int) -> list[Cut]:
    kv_heads = rows[1] // size
    if rows != [heads * size, kv_heads * size, kv_heads * size] or not kv_heads or heads % kv_heads:
        return []
    q, k, v = (HeadSlices.even(n, h, size) for n, h in zip(inputs, (heads, kv_heads, kv_heads), strict=True))
    return [(q, k, v)]


def fused(name: str, rows: int, heads: int, size: int) -> list[Cut]:
    """All queries, then all keys, then all values; or group by group a KV head's queries, its key and its value."""
    kv_heads = (rows - heads * size) // (2 * size)
    if kv_heads < 1 or rows != (heads + 2 * kv_heads) * size or heads % kv_heads:
        return []
    q, k, v = (
        HeadSlices.even(name, count, size, first * size)
        for count, first in ((heads, 0), (kv_heads, heads), (kv_heads, heads + kv_heads))
    )
    group = heads // kv_heads
    step = (group + 2) * size
    starts = tuple(head // group * step + head % group * size for head in range(heads))
    grouped = (
        HeadSlices(name, starts, size),
        HeadSlices.even(name, kv_heads, size, group * size, step),
        HeadSlices.even(name, kv_heads, size, (group + 1) * size, step),
    )
    return [(q, k, v), grouped] if kv_heads > 1 else [(q, k, v)]


def latent(inputs: list[str], rows: list[int], heads: int, size: int, value_dim: int, plain: int) -> list[Cut]:
    step = plain + value_dim
    if rows != [heads * size, heads * step] or not 0 < plain <= size:
        return []
    q, kv = inputs
    k, v = HeadSlices.even(kv, heads, plain, 0, step), HeadSlices.even(kv, heads, value_dim, plain, step)
    return [(HeadSlices.even(q, heads, size), k, v)]
