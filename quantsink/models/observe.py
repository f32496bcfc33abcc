"""Watch or replace what a model's attention modules compute, for as long as a block runs."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from quantsink.models.falcon import interface_attributes

NAME = "quantsink_observe"

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""As transformers' attention functions: `(module, query, key, value, mask, **options) -> ([B, L, H, Dv], None)`."""

_ACTIVE: "weakref.WeakKeyDictionary[nn.Module, Attend]" = weakref.WeakKeyDictionary()


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and of the models inside it, each once."""
    return list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())


@contextlib.contextmanager
def intercepting(model: nn.Module, attend: Mapping[nn.Module, Attend]) -> Iterator[None]:
    """Let `attend` compute the attention of its modules, in eval mode; afterwards the model is what it was."""
    undo = contextlib.ExitStack()
    with undo:
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()
        for _, module, attributes in interface_attributes(model):
            for name, value in attributes.items():
                if name not in vars(module):
                    vars(module)[name] = value
                    undo.callback(vars(module).pop, name)
        for config in configs_of(model):
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
            config._attn_implementation_internal = NAME
        for module, function in attend.items():
            _ACTIVE[module] = function
            undo.callback(_ACTIVE.pop, module, None)
        yield


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    attend: Attend = _ACTIVE.get(module, sdpa_attention_forward)
    return attend(module, query, key, value, attention_mask, **options)


ALL_ATTENTION_FUNCTIONS.register(NAME, _forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
