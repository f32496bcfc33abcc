"""What each layer of a `SinkCache` keeps."""

from dataclasses import dataclass, field

from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK, Record
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache


@dataclass(frozen=True)
class LayerPolicy:
    """What one attention layer of KVH key/value heads of size D keeps: codes, or exactly its window where its attention
    is sliding."""

    name: str
    index: int
    kv_heads: int
    head_dim: int
    bits: tuple[int, ...]
    """`[KVH]` bits of a code; empty for a sliding layer."""
    windows: tuple[int, ...]
    """`[KVH]` newest tokens that a head keeps beside its sinks, 0: all. Of a sliding layer its one window."""
    options: KVCache = field(repr=False)
    itemsize: int = 4
    """Bytes of a number that stays exact."""

    @classmethod
    def of(cls, layer: AttentionLayer, plan: CachePlan, itemsize: int) -> "LayerPolicy":
        """What `plan` says of a model's layer.

        Raises:
            CacheError: nothing, or a plan for another number of KV heads.
        """
        shape = layer.name, layer.index, layer.kv_heads, layer.head_dim
        if layer.window is not None:
            return cls(*shape, (), (layer.window,), plan.options, itemsize)
        bits = plan.bits.get(layer.name)
        if bits is None or len(bits) != layer.kv_heads:
            heads = "no plan" if bits is None else f"a plan for {len(bits)} KV heads"
            raise CacheError(
                f"{layer.name}: {heads} where the model has {layer.kv_heads}; the plan is for another model"
            )
        return cls(*shape, bits, plan.windows.get(layer.name, (0,) * len(bits)), plan.options, itemsize)

    @property
    def kind(self) -> str:
        """`codes`, or `window` for sliding attention."""
        return "codes" if self.bits else "window"

    @property
    def sink_size(self) -> int:
        """First tokens of a row that stay exact."""
        assert self.options.sink_size is not None
        return self.options.sink_size

    @property
    def max_exact(self) -> int:
        """Exact tokens of a row between passes, at most."""
        return self.sink_size + self.options.residual + BLOCK - 1

    @property
    def bits_per_number(self) -> float:
        """Mean real bits of a number: of a code with its share of scales and zero points, or of an exact one.

        Raises:
            ValueError: a head size for which there are no codes.
        """
        if not self.bits:
            return 8.0 * self.itemsize
        return sum(Record(bits, self.head_dim, self.head_dim).bits_per_number for bits in self.bits) / len(self.bits)


__all__ = ["LayerPolicy"]
