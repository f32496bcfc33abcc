"""The tables that an attention module holds beside its projections: for its heads, and for its KV cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.kernels.coded_attention.codes import Metric
from quantsink.layers.buffers import keep_float32
from quantsink.layers.token_context import TokenContext
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import AttentionPlan
from quantsink.recipe import Attention

TABLE = "quantsink_table"
"""Attribute under which an attention module holds its table."""


CACHE_TABLE = "quantsink_cache"
"""Attribute under which an attention module holds its `CacheTable`."""


class AttentionTable(nn.Module):
    """What one attention module's heads are quantized with; saved beside its projections.

    Tensors: `routes` uint8 `[H]` (a `Route` each), `key_mean` float32 `[KVH, D]`, `clip` float32 `[H]` where clipped.
    """

    routes: Tensor
    key_mean: Tensor
    clip: Tensor | None

    def __init__(self, heads: int, kv_heads: int, head_dim: int, rule: Attention, context: TokenContext) -> None:
        super().__init__()
        self.rule, self.context = rule, context
        self.register_buffer("routes", torch.empty(heads, dtype=torch.uint8))
        self.register_buffer("key_mean", torch.empty(kv_heads, head_dim, dtype=torch.float32))
        clipped = rule.clip.kind != "none"
        self.register_buffer("clip", torch.empty(heads, dtype=torch.float32) if clipped else None)

    @classmethod
    def of(cls, layer: AttentionLayer, plan: AttentionPlan, rule: Attention, context: TokenContext) -> "AttentionTable":
        table = cls(layer.heads, layer.kv_heads, layer.head_dim, rule, context)
        table.routes = torch.tensor(plan.routes, dtype=torch.uint8)
        table.key_mean = torch.tensor(plan.key_mean, dtype=torch.float32)
        if plan.clip is not None:
            table.clip = torch.tensor(plan.clip, dtype=torch.float32)
        return table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return keep_float32(self, fn, ("key_mean", "clip"), super()._apply, recurse)


class CacheTable(nn.Module):
    """What an attention module's own `SinkCache` rounds keys with; saved beside its projections.

    Tensor: `query_gram` float32 `[KVH, D, D]`.
    """

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return keep_float32(self, fn, ("query_gram",), super()._apply, recurse)
