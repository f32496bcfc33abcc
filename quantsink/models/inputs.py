"""What a model's forward takes: its smallest input, where that belongs, and the name of its cache argument."""

import inspect
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn

from quantsink.errors import ArchitectureError, ModelError

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""transformers renamed the argument in 5.21; models before that have the second."""


def cache_argument(model: nn.Module) -> str:
    """The name under which this model's forward takes its cache."""
    known = inspect.signature(model.forward).parameters
    return CACHE_ARGUMENTS[0] if CACHE_ARGUMENTS[0] in known else CACHE_ARGUMENTS[1]


def input_device(model: nn.Module) -> torch.device:
    """The device for token ids, also where accelerate keeps the weights elsewhere until they are needed."""
    for module in model.modules():
        if has_offloaded_params(module):
            hook: Any = module._hf_hook
            return torch.device(hook.execution_device)
        for parameter in module.parameters(recurse=False):
            return parameter.device
    raise ModelError(f"{type(model).__name__}: no parameters")


def example(model: Any) -> dict[str, Tensor]:
    """The smallest input that a model takes: one token, one picture, or the vectors of its `dummy_inputs`."""
    device = input_device(model)
    if model.main_input_name == "pixel_values":
        config = model.config
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        dtype = next(model.parameters()).dtype
        return {"pixel_values": torch.zeros(1, config.num_channels, *size, device=device, dtype=dtype)}
    if model.main_input_name == "inputs_embeds":
        vectors = model.dummy_inputs.get("inputs_embeds")
        if not isinstance(vectors, Tensor):
            raise ArchitectureError(f"{model.config.model_type}: its dummy_inputs hold no inputs_embeds to try it with")
        return {"inputs_embeds": vectors.to(device, next(model.parameters()).dtype)}
    return {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}
