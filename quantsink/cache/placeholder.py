"""Placeholders for cached keys and values on their way through the model, and the mask of a pass, read once."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantsink.errors import CacheError

if TYPE_CHECKING:
    from quantsink.cache.layer import SinkLayer


class Placeholder(Tensor):
    """A tensor with the shape, type and device of cached keys (or values) and no data, because the data are codes.

    Only quantsink's attention reads it. Every other use is an error that says what to do.
    """

    layer: "SinkLayer"

    @staticmethod
    def of(like: Tensor, length: int, layer: "SinkLayer") -> "Placeholder":
        """In place of `length` tokens like `like` `[B, KVH, L, D]`."""
        shape = (*like.shape[:2], length, like.shape[3])
        placeholder: Placeholder = Tensor._make_wrapper_subclass(
            Placeholder, shape, dtype=like.dtype, device=like.device
        )
        placeholder.layer = layer
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "__len__", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CacheError(
            f"SinkCache: {getattr(func, '__name__', func)} was called on cached keys, which are codes; the model must "
            'run with attn_implementation="quantsink" (SinkCache.from_calibration sets it) and use cached keys nowhere '
            "else"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as an instance method there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CacheError(f"SinkCache: {func} was called on cached keys, which are codes")


class PassMask:
    """The mask of the pass in progress and the first column of each of its rows. The layers of a cache share it, so
    that the mask is read once per pass."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.starts: list[int] = []


__all__ = ["PassMask", "Placeholder"]
