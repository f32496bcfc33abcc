"""Attention modules of transformers that do not call its attention interface, and forwards that do."""

import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

PREFIX = "quantsink"
"""All attention implementations of quantsink begin with it."""


def can_use_interface(model: nn.Module) -> bool:
    """Whether `interface_attributes` covers the model's attention. False also with ALiBi, which adds to the scores
    what the interface has no place for."""
    has_alibi = bool(getattr(getattr(model, "config", None), "alibi", False))
    return not has_alibi and any(type(module) in _FORWARDS for module in model.modules())


def interface_attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """The name of each such module, the module, and the attributes that let it call the attention interface whenever
    the attention implementation is one of quantsink's. Nothing is set here."""
    for name, module in model.named_modules():
        forward = _FORWARDS.get(type(module))
        if forward is not None:
            groups = module.num_heads // module.num_kv_heads
            yield name, module, {"forward": types.MethodType(forward, module), "num_key_value_groups": groups}


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    implementation = str(self.config._attn_implementation)
    if not implementation.startswith(PREFIX):
        original: Any = FalconAttention.forward
        result: tuple[Tensor, Tensor | None] = original(
            self, hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions,
            position_embeddings, **kwargs,
        )  # fmt: skip
        return result
    fused, shape = self.query_key_value(hidden_states), hidden_states.shape[:-1]
    if self.new_decoder_architecture:
        groups = fused.view(*shape, self.num_kv_heads, -1, self.head_dim)
        parts = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        parts = self._split_heads(fused)
    query, key, value = (part.transpose(1, 2) for part in parts)
    assert position_embeddings is not None
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS[implementation]
    out, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5)
    return self.dense(out.reshape(*shape, -1)), None


_FORWARDS: dict[type, Any] = {FalconAttention: _falcon}
