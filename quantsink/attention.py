"""transformers' attention interface on one side, `quantsink::sink_attention` on the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantsink.architecture import AttentionLayer
from quantsink.context import TokenContext
from quantsink.errors import QuantSinkError
from quantsink.kernels import Route, sink_attention
from quantsink.linear import keep_float32
from quantsink.plan import AttentionPlan
from quantsink.recipe import Attention

NAME = "quantsink"
TABLE = "quantsink_table"
"""Attribute under which an attention module holds its table."""


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


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query `[B, H, Lq, D]`, key and value `[B, KVH, Lk, D]` after rotary and cache -> `[B, Lq, H, D]`."""
    table = getattr(module, TABLE, None)
    if not isinstance(table, AttentionTable):
        raise QuantSinkError(
            f"{type(module).__name__} {getattr(module, 'layer_idx', '?')} has no quantsink table; quantize the model "
            "first, or load it with another attn_implementation"
        )
    if dropout or position_bias is not None:
        raise QuantSinkError("quantsink attention has no dropout and no position bias; call model.eval() first")
    if torch.is_grad_enabled() and query.requires_grad:
        raise QuantSinkError("quantsink attention has no gradient; call the model under torch.no_grad()")
    if attention_mask is None:
        # A static cache has unused slots behind the real keys, and without padding transformers gives no mask for them.
        used = table.context.keys_in_use(key.shape[2])
        key, value = key[:, :, :used], value[:, :, :used]
    elif attention_mask.dtype != torch.bool:
        attention_mask = attention_mask == 0
    rule = table.rule
    out = sink_attention(
        query,
        key,
        value,
        routes=table.routes,
        key_mean=table.key_mean,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=attention_mask,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        sink_size=table.context.sink_size,
        sink_start=table.context.sink_start(key.shape[2]),
        weight_scale=rule.weight_scale,
        block=rule.block,
        softcap=softcap,
        clip_row=table.clip if rule.clip.kind == "row" else None,
        clip_absolute=table.clip if rule.clip.kind == "absolute" else None,
        s_aux=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="quantsink"` known, with the mask function that carries padding and windows."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


__all__ = ["NAME", "TABLE", "AttentionTable", "Route", "forward", "register"]
