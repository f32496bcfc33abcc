"""The tables that an attention module holds beside its projections: for its heads, and for its KV cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.errors import CheckpointError, QuantSinkError
from quantsink.kernels import Route
from quantsink.kernels.coded_attention.codes import Metric
from quantsink.layers.replacement import ReadModel, Replacement, Site, register
from quantsink.layers.token_context import TokenContext
from quantsink.plan import AttentionPlan, AttentionShape, Outline, Plan
from quantsink.recipe import Attention

TABLE = "quantsink_table"
"""Attribute under which an attention module holds its table."""
CACHE_TABLE = "quantsink_cache"
"""Attribute under which an attention module holds its `CacheTable`."""


@dataclass(frozen=True)
class TableSpecification:
    """What a table is made from; `plan` is None where its numbers are loaded."""

    shape: AttentionShape
    rule: Attention
    plan: AttentionPlan | None = None


@register
class AttentionTable(Replacement):
    """What one attention module's heads are quantized with; saved beside its projections.

    Tensors: `routes` uint8 `[H]` (a `Route` each), `key_mean` float32 `[KVH, D]`, `clip` float32 `[H]` where clipped.
    """

    FLOAT32 = ("key_mean", "clip")

    routes: Tensor
    key_mean: Tensor
    clip: Tensor | None

    def __init__(self, shape: AttentionShape, rule: Attention, context: TokenContext) -> None:
        super().__init__()
        self.rule, self.context = rule, context
        self.register_buffer("routes", torch.empty(shape.heads, dtype=torch.uint8))
        self.register_buffer("key_mean", torch.empty(shape.kv_heads, shape.head_dim, dtype=torch.float32))
        clipped = rule.clip.kind != "none"
        self.register_buffer("clip", torch.empty(shape.heads, dtype=torch.float32) if clipped else None)

    @classmethod
    def planned(cls, plan: Plan, read: ReadModel) -> dict[str, TableSpecification]:
        for name, attention in plan.attentions.items():
            if not _fits(name, attention.shape, read) or {len(row) for row in attention.key_mean} != {
                attention.shape.head_dim
            }:
                raise QuantSinkError(
                    f"{name}: the plan's heads {tuple(attention.shape)} are not the model's; calibrate this model again"
                )
            if not torch.tensor(attention.key_mean).isfinite().all():
                raise QuantSinkError(f"{name}: the plan's mean key is not finite; calibrate this model again")
        return {
            f"{name}.{TABLE}": TableSpecification(attention.shape, plan.recipe.attention, attention)
            for name, attention in plan.attentions.items()
        }

    @classmethod
    def stored(cls, outline: Outline, read: ReadModel) -> dict[str, TableSpecification]:
        for name, shape in outline.attentions.items():
            if not _fits(name, shape, read):
                raise CheckpointError(
                    f"config.json: {name} with heads {list(shape)} is not in the model it describes; "
                    "load it with AutoModelForCausalLM"
                )
        return {
            f"{name}.{TABLE}": TableSpecification(shape, outline.recipe.attention)
            for name, shape in outline.attentions.items()
        }

    @classmethod
    def empty(cls, site: Site, specification: TableSpecification) -> "AttentionTable":
        with site.device:
            return cls(specification.shape, specification.rule, site.context)

    @classmethod
    def of(cls, site: Site, specification: TableSpecification) -> "AttentionTable":
        plan = specification.plan
        assert plan is not None
        table = cls(specification.shape, specification.rule, site.context)
        table.routes = torch.tensor(plan.routes, dtype=torch.uint8)
        table.key_mean = torch.tensor(plan.key_mean, dtype=torch.float32)
        if plan.clip is not None:
            table.clip = torch.tensor(plan.clip, dtype=torch.float32)
        return table.to(site.device)

    def check(self, name: str, tensor: Tensor) -> bool:
        if name == "routes":
            return bool((tensor <= max(Route)).all())
        if name == "clip":
            return bool((tensor > 0).all())
        return super().check(name, tensor)


def _fits(name: str, shape: AttentionShape, read: ReadModel) -> bool:
    layer = read.layers.get(name)
    return layer is not None and (layer.heads, layer.kv_heads, layer.head_dim) == tuple(shape)


@dataclass(frozen=True)
class GramSpecification:
    """What a cache table is made from; `query_gram` is None where it is loaded."""

    kv_heads: int
    head_dim: int
    query_gram: Tensor | None = None


@register
class CacheTable(Replacement):
    """What an attention module's own `SinkCache` rounds keys with; saved beside its projections.

    Tensor: `query_gram` float32 `[KVH, D, D]`.
    """

    FLOAT32 = ("query_gram",)

    query_gram: Tensor

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("query_gram", torch.empty(kv_heads, head_dim, head_dim, dtype=torch.float32))
        self._metric: Metric | None = None

    @property
    def metric(self) -> Metric:
        if self._metric is None:
            self._metric = Metric.of(self.query_gram)
        return self._metric

    @classmethod
    def planned(cls, plan: Plan, read: ReadModel) -> dict[str, GramSpecification]:
        """A plan without what its rounding needs is refused where its cache is looked at (`hf.sink_cache`)."""
        cache = plan.cache
        if cache is None or cache.rounding != "query":
            return {}
        return {
            f"{name}.{CACHE_TABLE}": GramSpecification(layer.kv_heads, layer.head_dim, cache.query_gram[name])
            for name, layer in read.layers.items()
            if name in cache.bits
        }

    @classmethod
    def stored(cls, outline: Outline, read: ReadModel) -> dict[str, GramSpecification]:
        cache = outline.cache
        if cache is None or cache.rounding != "query":
            return {}
        specifications = {}
        for name in cache.bits:
            layer = read.layers.get(name)
            if layer is None:
                raise CheckpointError(f"config.json: kv_cache: {name} is not in the model it describes; export again")
            specifications[f"{name}.{CACHE_TABLE}"] = GramSpecification(layer.kv_heads, layer.head_dim)
        return specifications

    @classmethod
    def empty(cls, site: Site, specification: GramSpecification) -> "CacheTable":
        with site.device:
            return cls(specification.kv_heads, specification.head_dim)

    @classmethod
    def of(cls, site: Site, specification: GramSpecification) -> "CacheTable":
        assert specification.query_gram is not None
        table = cls(specification.kv_heads, specification.head_dim)
        table.query_gram = specification.query_gram.to(site.device)
        return table


__all__ = ["CACHE_TABLE", "TABLE", "AttentionTable", "CacheTable"]
