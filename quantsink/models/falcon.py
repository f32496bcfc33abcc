"""Attention modules of transformers that do not call its attention interface, led through it."""

import types
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

OURS = "quantsink"
ADOPTED = ("falcon",)
"""Their model types."""


def adopt(model: nn.Module) -> bool:
    """Give each such module a forward that uses the interface whenever the implementation is one of quantsink's.

    False where there is none, or it adds something to the scores that the interface has no place for (ALiBi).
    """
    found = [m for m in model.modules() if type(m) in _FORWARDS]
    if not found or getattr(getattr(model, "config", None), "alibi", False):
        return False
    for module in found:
        if "forward" not in vars(module):
            vars(module)["forward"] = types.MethodType(_FORWARDS[type(module)], module)
            module.num_key_value_groups = module.num_heads // module.num_kv_heads  # type: ignore[operator]
    type(model)._can_set_attn_implementation_cached_value = True  # type: ignore[attr-defined]  # not by its source
    return True


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
    if not implementation.startswith(OURS):
        own: Any = FalconAttention.forward
        found: tuple[Tensor, Tensor | None] = own(
            self, hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions,
            position_embeddings, **kwargs,
        )  # fmt: skip
        return found
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
