"""A plan: what will be done to each head and each linear layer. Plain data, no model; all that reaches the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from quantsink.errors import CacheError
from quantsink.kernels import Route
from quantsink.recipe import WIDTHS, KVCache, Recipe, Rounding

__all__ = [
    "AttentionPlan",
    "AttentionShape",
    "CachePlan",
    "LinearPlan",
    "LinearShape",
    "Outline",
    "Plan",
    "Route",
    "head_plan",
]


@dataclass(frozen=True)
class LinearShape:
    """What a quantized linear layer is built from before its numbers are known."""

    activations: Literal["native", "per_token", "static"]
    sink_rows: Literal["native", "table", "plain"]
    rows: int = 0
    """Native output channels."""
    columns: int = 0
    """Native input channels."""


@dataclass(frozen=True)
class LinearPlan:
    """One linear layer `[N, K]`."""

    activations: Literal["native", "per_token", "static"] = "per_token"
    sink_rows: Literal["native", "table", "plain"] = "native"
    native_rows: tuple[int, ...] = ()
    """Output channels that stay native (the heads' slices of q, k, v)."""
    native_columns: tuple[int, ...] = ()
    """Input channels that stay native (named by calibration; the heads' slices of o)."""
    input_scale: float = 1.0
    """Static scale of ordinary rows."""
    sink_scale: float = 1.0
    """Static scale of the sink tokens' rows."""

    @property
    def shape(self) -> LinearShape:
        return LinearShape(self.activations, self.sink_rows, len(self.native_rows), len(self.native_columns))


def head_plan(recipe: Recipe) -> LinearPlan:
    """The output head's: no calibration watches its inputs, and it need not see every token of a pass."""
    return LinearPlan("native" if recipe.activations.kind == "native" else "per_token", "plain")


class AttentionShape(NamedTuple):
    """What an attention module's table is built from before its numbers are known."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionPlan:
    """One attention layer of H query heads on KVH key/value heads of size D."""

    routes: tuple[Route, ...]
    key_mean: tuple[tuple[float, ...], ...]
    """`[KVH][D]`, the mean key without sink tokens."""
    clip: tuple[float, ...] | None = None
    """`[H]` score bound of each head, inf = not clipped; None where the recipe clips nothing."""

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(len(self.routes), len(self.key_mean), len(self.key_mean[0]) if self.key_mean else 0)


@dataclass(frozen=True)
class CachePlan:
    """What a `SinkCache` keeps, by attention module. Sliding-window layers are not in it: they keep their window exact.

    Raises:
        CacheError: a width or a window that codes do not have, or options without a `sink_size`.
    """

    options: KVCache
    """`sink_size` is a number: `KVCache.with_sinks`."""
    bits: Mapping[str, tuple[int, ...]]
    """`[KVH]` bits of a code in each layer: 8, 4, 3 or 2."""
    windows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """`[KVH]` newest tokens that a head keeps beside its sinks (a streaming head); 0, or no entry: all."""
    query_gram: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Where `rounding` is `query`: float32 `[KVH, D, D]`, the mean of `q q^T` over the queries of a head's group."""

    def __post_init__(self) -> None:
        if self.options.sink_size is None:
            raise CacheError("CachePlan: sink_size is None; a plan needs a number")
        for name, bits in self.bits.items():
            windows = self.windows.get(name, (0,) * len(bits))
            if not bits or any(type(width) is not int or width not in WIDTHS for width in bits):
                raise CacheError(f"{name}: bits {list(bits)}: one of {', '.join(map(str, WIDTHS))} for each KV head")
            if len(windows) != len(bits) or any(type(window) is not int or window < 0 for window in windows):
                raise CacheError(f"{name}: windows {list(windows)}: a whole number for each KV head, 0 for all tokens")

    @property
    def sink_size(self) -> int:
        """First real tokens of each row that stay exact."""
        assert self.options.sink_size is not None
        return self.options.sink_size

    @property
    def rounding(self) -> Rounding:
        """How a key's codes are chosen."""
        return self.options.rounding


@dataclass(frozen=True)
class Outline:
    """What a checkpoint's config.json says of its plan: enough to build every module, without its numbers."""

    recipe: Recipe
    sink_size: int
    linears: Mapping[str, tuple[int, int]]
    """By module name: native rows and native columns."""
    attentions: Mapping[str, AttentionShape]
    experts: tuple[str, ...]
    cache: CachePlan | None


@dataclass(frozen=True)
class Plan:
    """Everything `apply` needs, by module name."""

    recipe: Recipe
    sink_size: int
    linears: Mapping[str, LinearPlan] = field(default_factory=dict)
    attentions: Mapping[str, AttentionPlan] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    """Experts modules whose weights become INT8; their inputs stay native."""
    cache: CachePlan | None = None
    notes: tuple[str, ...] = ()
    """What the user should know: heads that were not clipped, layers left native, ..."""

    @property
    def outline(self) -> Outline:
        return Outline(
            self.recipe,
            self.sink_size,
            {name: (len(linear.native_rows), len(linear.native_columns)) for name, linear in self.linears.items()},
            {name: attention.shape for name, attention in self.attentions.items()},
            self.experts,
            self.cache,
        )

    def count(self, route: Route) -> int:
        """Heads on one route."""
        return sum(plan.routes.count(route) for plan in self.attentions.values())
