"""Turn keys that carry their rotary position to another one, with the model's own rotary code.

Rotations add up, R(p + shift) = R(shift) R(p), so keys need not be kept unrotated; StreamingLLM (Xiao et al., 2024,
section 3.2) counts positions inside its cache, and only distances matter. Whether a layer really rotates
its keys so is checked: the model runs on one token at two positions, where nothing but the rotation can differ.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quantsink.errors import ArchitectureError
from quantsink.models.architecture import attention_layers
from quantsink.models.inputs import cache_argument

Rotate = Callable[[Tensor, int], Tensor]

CHANGING = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the length."""
_KNOWN: "weakref.WeakKeyDictionary[nn.Module, dict[int, Rotate]]" = weakref.WeakKeyDictionary()
POSITIONS = (5, 42)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of the largest number in a key."""


def rotations(model: Any, layers: list[int]) -> dict[int, Rotate]:
    """By layer: `rotate(keys [..., L, D], shift)`, what the keys would be `shift` positions further on.

    Raises:
        ArchitectureError: a layer whose keys change with their position in another way.
    """
    model_type = model.config.model_type
    types = _rope_types(model.config.get_text_config(decoder=True))
    if types & set(CHANGING):
        names = ", ".join(sorted(types))
        raise ArchitectureError(
            f"{model_type}: a rolling cache (max_length) needs fixed rotary positions, the model has {names}"
        )
    if model.device.type == "meta":
        raise ArchitectureError(f"{model_type}: a rolling cache (max_length) needs a model with its weights loaded")
    if model not in _KNOWN:
        modules = {layer.index: model.get_submodule(layer.name) for layer in attention_layers(model)}
        before, after = (keys_at(model, position) for position in POSITIONS)
        _KNOWN[model] = {index: _rotation(model, modules[index], before[index], after[index]) for index in layers}
    return _KNOWN[model]


@torch.no_grad()
def keys_at(model: Any, position: int) -> dict[int, Tensor]:
    """Keys `[3, KVH, 1, D]` of each layer for three rows of one token at a position. One token attends to itself alone,
    so what reaches a layer does not depend on where it stands."""
    cache: Any = DynamicCache(config=model.config)
    keys: dict[int, Tensor] = {}
    keep = cache.update

    def update(key: Tensor, value: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
        keys[layer] = key.detach().clone()
        return keep(key, value, layer, *rest, **named)

    cache.update = update
    text = model.config.get_text_config(decoder=True)
    padding = getattr(text, "pad_token_id", None)  # its embedding is zero
    ids = [i for i in range(1, text.vocab_size) if i != padding]
    token = torch.tensor([[ids[len(ids) * part // 4]] for part in (1, 2, 3)], device=model.device)
    where = torch.full((3, 1), position, device=model.device)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ArchitectureError(f"{model.config.model_type}: takes no position_ids; its cache cannot roll")
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        model(input_ids=token, position_ids=where, use_cache=True, **{cache_argument(model): cache})
    finally:
        for module in training:
            module.training = True
    return keys


def _rotation(model: Any, module: nn.Module, before: Tensor, after: Tensor) -> Rotate:
    if torch.equal(before, after) and bool(before.any()):  # no positions in this layer
        return lambda keys, _: keys
    shift, bound = POSITIONS[1] - POSITIONS[0], TOLERANCE[before.dtype] * float(after.abs().max())
    try:
        rotate = _by_module(model, module)
        turned = rotate(before, shift)
        good = (
            bool(before.any())
            and turned.shape == after.shape
            and float((turned.float() - after.float()).abs().max()) <= bound
        )
    except (RuntimeError, TypeError, AttributeError, KeyError):
        good = False
    if not good:
        raise ArchitectureError(
            f"{model.config.model_type}: layer {getattr(module, 'layer_idx', '?')}: a rolling cache (max_length) needs "
            "keys whose positions are rotations and nothing else after them"
        )
    return rotate


def _by_module(model: Any, module: nn.Module) -> Rotate:
    """What the module's own file calls `apply_rotary_pos_emb`, with the decoder's rotary embedding."""
    embedding: Any = model.get_decoder().rotary_emb
    apply = vars(sys.modules[type(module).__module__])["apply_rotary_pos_emb"]
    layer_type = getattr(module, "layer_type", None) or "full_attention"
    options = {"layer_type": layer_type} if "layer_type" in inspect.signature(embedding.forward).parameters else {}
    scaling = getattr(embedding, f"{layer_type}_attention_scaling", getattr(embedding, "attention_scaling", 1.0))

    def rotate(keys: Tensor, shift: int) -> Tensor:
        wide = keys.float()
        position = torch.full((1, keys.shape[-2]), shift, device=keys.device)
        cos, sin = embedding(wide, position, **options)
        cos, sin = cos.float() / scaling, sin.float() / scaling
        size = cos.shape[-1]
        turned: Tensor = apply(wide[..., :size], wide[..., :size], cos, sin)[1]
        return torch.cat([turned, wide[..., size:]], -1).to(keys.dtype)

    return rotate


def _rope_types(text: Any) -> set[str]:
    """Kinds of rotary embedding that a config names, over all kinds of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", part.get("type", "default"))) for part in nested or [rope]}
