"""What a pass carries through the model in place of cached keys and values, and of its mask."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantsink.errors import CacheError

if TYPE_CHECKING:
    from quantsink.cache.layer import SinkLayer


class Standin(Tensor):
    """Has the shape, type and device of cached keys (or values) and no data: they are codes. Only quantsink's attention
    knows what to do with it; every other use is an error that says so."""

    layer: "SinkLayer"

    @staticmethod
    def of(like: Tensor, length: int, layer: "SinkLayer") -> "Standin":
        shape = (*like.shape[:2], length, like.shape[3])
        made: Standin = Tensor._make_wrapper_subclass(Standin, shape, dtype=like.dtype, device=like.device)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "__len__", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CacheError(
            f"SinkCache: {getattr(func, '__name__', func)} was called on cached keys, which are codes; the model must "
            'run with attn_implementation="quantsink" (SinkCache.from_calibration sets it) and leave keys to it'
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as an instance method there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CacheError(f"SinkCache: {func} was called on cached keys, which are codes")


class PassMask:
    """The mask of the pass in progress and where its rows begin, so that not every layer reads it again."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.starts: list[int] = []
