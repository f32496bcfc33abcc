"""transformers' attention interface on one side, `quantsink::sink_attention` on the other."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantsink.cache.layer import SinkLayer
from quantsink.cache.placeholder import Placeholder
from quantsink.errors import CacheError, QuantSinkError
from quantsink.hf.register import NAME
from quantsink.kernels import CodedKV, coded_attention, sink_attention
from quantsink.layers.tables import TABLE, AttentionTable
from quantsink.models.native_attention import native_attention, native_routes


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query `[B, H, Lq, D]`, key and value `[B, KVH, Lk, D]` after rotary and cache -> `[B, Lq, H, D]`.

    With a table, as it says. Without one, what PyTorch's SDPA computes. Keys of a `SinkCache` are read as codes.
    """
    if position_bias is not None:
        raise QuantSinkError("quantsink attention has no position bias")
    table = getattr(module, TABLE, None)
    cached = key.layer if isinstance(key, Placeholder) else None
    if isinstance(table, AttentionTable) or cached is not None:
        if dropout:
            raise QuantSinkError("quantsink attention has no dropout; call model.eval() first")
        if torch.is_grad_enabled() and query.requires_grad:
            raise QuantSinkError("quantsink attention has no gradient; call the model under torch.no_grad()")
    mask = attention_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if cached is None:
        if isinstance(table, AttentionTable):
            return _with_table(table, query, key, value, mask, causal, **options), None
        out = native_attention(module, query, key, value, mask, is_causal=causal, dropout=dropout, **options)
        return out.contiguous(), None
    if not causal:
        raise CacheError(f"{cached.policy.name}: a SinkCache holds causal attention only")
    cached.begin(module, row_starts(mask, cached, attention_mask))
    if cached.first:
        assert cached.pending is not None
        key, value = cached.pending
        if isinstance(table, AttentionTable):
            out = _with_table(table, query, key, value, mask, True, **options)
        else:
            out = native_attention(module, query, key, value, mask, is_causal=True, **options).contiguous()
    else:
        out = _with_codes(table, query, cached.view(), **options)
    cached.commit()
    return out, None


def _with_table(
    table: AttentionTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    *,
    scaling: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Each head on its route. `[B, Lq, H, D]`."""
    if mask is None:
        # A static cache has unused slots behind the real keys, and without padding transformers gives no mask for them.
        used = table.context.keys_in_use(key.shape[2])
        key, value = key[:, :, :used], value[:, :, :used]
    rule = table.rule
    out = sink_attention(
        query,
        key,
        value,
        routes=table.routes,
        key_mean=table.key_mean,
        scaling=scaling,
        mask=mask,
        causal=causal,
        sink_size=table.context.sink_size,
        sink_start=table.context.sink_start(key.shape[2]),
        weight_scale=rule.weight_scale,
        block=rule.block,
        softcap=softcap,
        clip_row=table.clip if rule.clip.kind == "row" else None,
        clip_absolute=table.clip if rule.clip.kind == "absolute" else None,
        s_aux=s_aux,
    )
    return out.transpose(1, 2).contiguous()


def _with_codes(
    table: Any, query: Tensor, codes: CodedKV, *, scaling: float, softcap: float | None, s_aux: Tensor | None
) -> Tensor:
    """Keys and values as a cache holds them; without a table exact arithmetic on what the codes stand for."""
    clip, kind, routes = None, "none", native_routes(query.shape[1], query.device)
    if isinstance(table, AttentionTable):
        clip, kind, routes = table.clip, table.rule.clip.kind, table.routes
    out = coded_attention(
        query,
        codes,
        routes=routes,
        scaling=scaling,
        softcap=softcap,
        clip_row=clip if kind == "row" else None,
        clip_absolute=clip if kind == "absolute" else None,
        s_aux=s_aux,
    )
    return out.transpose(1, 2).contiguous()


def row_starts(mask: Tensor | None, layer: SinkLayer, model_mask: Tensor | None = None) -> list[int] | None:
    """Column of each row's first real token, read from a boolean mask `[B, 1, Lq, L]`; None: no padding.

    Args:
        model_mask: the mask as the model gave it. All layers of a pass that are given the same one read it once.

    Raises:
        CacheError: a mask that is not causal attention over rows padded on the left.
    """
    name, pass_mask = layer.policy.name, layer.pass_mask
    columns, first = layer.mask_sizes
    if mask is None:
        # transformers gives none where all that a rolling cache's mask would cover is visible.
        return [row.start if row.start <= first else 0 for row in layer.rows] if first else None
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != columns:
        raise CacheError(
            f"{name}: a mask {list(mask.shape)} where [B, 1, L, {columns}] belongs; give the attention_mask of all "
            "tokens so far"
        )
    if pass_mask.mask is None or pass_mask.mask is not model_mask:
        pass_mask.mask, pass_mask.starts = model_mask, _read_starts(mask, name)
    starts = pass_mask.starts * len(layer.rows) if len(pass_mask.starts) == 1 else pass_mask.starts
    # A row that fills a rolling cache's mask began before it, as earlier passes have pass_mask.
    return [row.start if first and not new else new + first for row, new in zip(layer.rows, starts, strict=True)]


def _read_starts(mask: Tensor, name: str) -> list[int]:
    queries, keys = mask.shape[2:]
    last = mask[:, 0, -1]
    starts = torch.where(last.any(1), last.to(torch.uint8).argmax(1), keys)
    column = torch.arange(keys, device=mask.device)
    for first in range(0, queries, 64):
        part = mask[:, 0, first : first + 64]
        row = torch.arange(first, first + part.shape[1], device=mask.device) + keys - queries
        causal = (column >= starts[:, None, None]) & (column <= row[:, None])
        if not bool(((part == causal) | (row < starts[:, None])[..., None]).all()):
            raise CacheError(
                f"{name}: a SinkCache holds causal attention over rows padded on the left only; pad with "
                'padding_side="left", give the attention_mask of all tokens so far, and no other mask'
            )
    return [int(x) for x in starts]


# In place of the function that `import quantsink` registers to import this module.
ALL_ATTENTION_FUNCTIONS.register(NAME, forward)

__all__ = ["NAME", "forward"]
