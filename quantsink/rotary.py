"""Turn keys that carry their rotary position to another one, with the model's own rotary code."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import ArchitectureError

CHANGING = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the length."""


def rotation(model: Any, module: nn.Module, head_dim: int) -> Callable[[Tensor, int], Tensor]:
    """`rotate(keys [..., L, D], shift)`: what the keys would be `shift` positions further on.

    Rotations add up, R(p + shift) = R(shift) R(p), so keys need not be kept unrotated; StreamingLLM (Xiao et al., 2024,
    section 3.2) counts positions inside its cache, and only distances matter.

    Raises:
        ArchitectureError: no rotary positions, or none for which rotations add up.
    """
    kind = model.config.model_type
    embedding = getattr(model.get_decoder(), "rotary_emb", None)
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    text = model.config.get_text_config(decoder=True)
    types = _rope_types(text)
    if embedding is None or apply is None or types & set(CHANGING):
        found = ", ".join(sorted(types)) if embedding is not None else "no rotary positions"
        raise ArchitectureError(
            f"{kind}: a rolling cache (max_length) needs fixed rotary positions, the model has {found}"
        )
    known = inspect.signature(embedding.forward).parameters
    layer_type = getattr(module, "layer_type", None) or "full_attention"
    options = {"layer_type": layer_type} if "layer_type" in known else {}
    scaling = getattr(embedding, f"{layer_type}_attention_scaling", None) or getattr(
        embedding, "attention_scaling", 1.0
    )

    def rotate(keys: Tensor, shift: int) -> Tensor:
        wide = keys.float()
        position = torch.full((1, keys.shape[-2]), shift, device=keys.device)
        cos, sin = embedding(wide, position, **options)
        turned: Tensor = apply(wide, wide, cos.float() / scaling, sin.float() / scaling)[1]
        return turned.to(keys.dtype)

    device = next(embedding.buffers()).device
    x = torch.randn(1, 1, 2, head_dim, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        there, back = rotate(rotate(x, 7), 5), rotate(x, 12)
        if not torch.allclose(there, back, atol=1e-4) or not torch.allclose(rotate(back, -12), x, atol=1e-4):
            raise ArchitectureError(f"{kind}: a rolling cache (max_length) needs rotary positions that add up")
    return rotate


def _rope_types(text: Any) -> set[str]:
    """Kinds of rotary embedding that a config names, over all kinds of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", part.get("type", "default"))) for part in nested or [rope]}
