"""The modules of a quantized model that were not there before: one registry, and what all of them have in common.

Quantizing, loading and exporting tensor by tensor know no type of module. They ask each registered type where it
stands, and let it make itself: `of` from the original, `empty` for a checkpoint to fill; `check` looks at what was
filled in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import Architecture
from quantsink.models.finite import all_finite
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import Outline, Plan


@dataclass(frozen=True)
class ReadModel:
    """A model, its architecture, and its modules by name, before anything was exchanged."""

    model: Any
    architecture: Architecture
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, model: Any) -> "ReadModel":
        return cls(model, Architecture.of(model), dict(model.named_modules()))

    @property
    def layers(self) -> dict[str, AttentionLayer]:
        """Attention layers by the name of their module."""
        return {layer.name: layer for layer in self.architecture.attentions}


@dataclass(frozen=True)
class Site:
    """One place in a model that a module is made for."""

    place: str
    """Dotted name."""
    original: Any
    """What stands there: a module, a parameter, or None for nothing."""
    device: torch.device
    context: TokenContext


class Replacement(nn.Module):
    """Base of every module type that stands in a quantized model. `register` makes a type known."""

    FLOAT32: ClassVar[tuple[str, ...]] = ()
    """Buffers that follow `.to(device)` but keep their type on `.to(dtype)`."""
    CONFIG: ClassVar[Mapping[str, Any]] = {}
    """Attributes that the configs of a model with such a module must have."""

    @classmethod
    def planned(cls, plan: Plan, read: ReadModel) -> Mapping[str, Any]:
        """`{place: specification for "of"}` of a model that is quantized.

        Raises:
            QuantSinkError: the plan does not fit the model.
        """
        raise NotImplementedError

    @classmethod
    def stored(cls, outline: Outline, read: ReadModel) -> Mapping[str, Any]:
        """`{place: specification for "empty"}` of a checkpoint that is loaded.

        Raises:
            CheckpointError: the config does not fit the model.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, site: Site, specification: Any) -> "Replacement":
        """Quantize what stands at a site."""
        raise NotImplementedError

    @classmethod
    def empty(cls, site: Site, specification: Any) -> "Replacement":
        """The same module with tensors that hold nothing yet."""
        raise NotImplementedError

    def check(self, name: str, tensor: Tensor) -> bool:
        """Whether a buffer that was loaded holds values that can be right."""
        return not tensor.is_floating_point() or all_finite(tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = {name: self._buffers[name] for name in self.FLOAT32 if self._buffers.get(name) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            assert before is not None
            assert after is not None
            self._buffers[name] = after if after.dtype == before.dtype else before.to(after.device)
        return self


REPLACEMENTS: list[type[Replacement]] = []
"""Every registered type, in the order in which places are exchanged."""

Type = TypeVar("Type", bound=type[Replacement])


def register(replacement: Type) -> Type:
    """Class decorator: from now on models are quantized, loaded and exported with this type as well."""
    REPLACEMENTS.append(replacement)
    return replacement


def locate(model: nn.Module, place: str) -> tuple[nn.Module, str, Any]:
    """The module that holds a place, the name it has there, and what stands there: a module, a parameter, or None."""
    owner, _, name = place.rpartition(".")
    parent = model.get_submodule(owner)
    return parent, name, parent._modules.get(name, parent._parameters.get(name))


def site_of(model: nn.Module, place: str, context: TokenContext) -> Site:
    """A place as it is now. A module in an empty place goes to the device of its neighbours."""
    parent, _, original = locate(model, place)
    tensors = [*original.parameters(), *original.buffers()] if isinstance(original, nn.Module) else [original]
    neighbours = (tensor for module in (parent, model) for tensor in (*module.parameters(), *module.buffers()))
    first = next(tensor for tensor in (*tensors, *neighbours) if tensor is not None)
    return Site(place, original, first.device, context)
