"""Watch or replace what a model's attention modules compute, for as long as a block runs."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

NAME = "quantsink_observe"

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""As transformers' attention functions: `(module, query, key, value, mask, **options) -> ([B, L, H, Dv], None)`."""

_ACTIVE: "weakref.WeakKeyDictionary[nn.Module, Attend]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def intercepting(model: nn.Module, attend: Mapping[nn.Module, Attend]) -> Iterator[None]:
    """Let `attend` compute the attention of its modules, in eval mode; everything is as it was afterwards."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        _ACTIVE.update(attend)
        for config in configs.values():
            config._attn_implementation_internal = NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for module in attend:
            _ACTIVE.pop(module, None)
        for module, mode in training.items():
            module.training = mode


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    attend: Attend = _ACTIVE.get(module, sdpa_attention_forward)
    return attend(module, query, key, value, attention_mask, **options)


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
