"""A model's own attention, unquantized."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantsink.kernels import Route, sink_attention


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """PyTorch's SDPA, as transformers calls it. With a soft-cap or learned sinks, which SDPA does not know: the exact
    attention of quantsink's kernel.

    Args:
        module: the attention module.
        query: `[B, H, Lq, D]`.
        key, value: `[B, KVH, Lk, D]` and `[B, KVH, Lk, Dv]`.
        mask: boolean `[B, 1, Lq, Lk]`, true = visible, or None.
        is_causal: without a mask, whether a query sees only the keys before it; None: as the module says.

    Returns:
        `[B, Lq, H, Dv]`.
    """
    if softcap is None and s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal, **options)
        return out
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return exact_attention(
        query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux, causal=causal
    ).transpose(1, 2)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`[B, H, Lq, Dv]` by quantsink's kernel with every head on the native route."""
    return sink_attention(
        query,
        key,
        value,
        routes=native_routes(query.shape[1], query.device),
        key_mean=torch.zeros(key.shape[1], key.shape[3], device=key.device),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=mask,
        causal=causal,
        softcap=softcap,
        s_aux=s_aux,
    )


@functools.lru_cache(maxsize=64)
def native_routes(heads: int, device: torch.device) -> Tensor:
    """`[H]`, every head native."""
    return torch.full((heads,), int(Route.NATIVE), dtype=torch.uint8, device=device)
