"""The C++ kernels: loading them, and tensors in the form in which they take them."""

import functools
import logging
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from quantsink.kernels.attention import Route

poison = False
"""Fill the kernels' workspaces with NaN first; tests set it."""


@functools.cache
def library() -> ModuleType | None:
    """`quantsink.kernels._cpu`; None, with one warning, where it was not built: the PyTorch reference then runs."""
    try:
        return import_module("quantsink.kernels._cpu")
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "quantsink's C++ kernels cannot be loaded (%s): the PyTorch reference runs instead, many times slower. To"
            " build them, install a C++ compiler (Debian: apt-get install g++) and reinstall quantsink",
            error,
        )
        return None


def working_type(*tensors: Tensor) -> torch.dtype:
    """bfloat16 where all tensors are; else float32, so that a float32 input is not rounded."""
    return torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in tensors) else torch.float32


def typed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes a microsecond where there is nothing to do, and more with cold caches."""
    return x if x.dtype == dtype else x.to(dtype)


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` `[B, H, L, D]` in `dtype`, its last dimension without gaps."""
    x = typed(x, dtype)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def empty(batch: int, heads: int, queries: int, dim: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, Lq, D]`, the heads of a query side by side in memory."""
    row = heads * dim
    return torch.empty_strided((batch, heads, queries, dim), (queries * row, dim, row, 1), dtype=dtype, device="cpu")


def route_bytes(routes: Tensor) -> Tensor:
    """`routes` as uint8, which the kernels check; a wider type could wrap into the range.

    Raises:
        ValueError: a number that is no `Route`, in a wider type.
    """
    if routes.dtype != torch.uint8:
        if not bool(((routes >= 0) & (routes <= max(Route))).all()):
            raise ValueError(f"routes must be 0 (int8), 1 (sink) or 2 (native), not {routes.tolist()}")
        routes = routes.to(torch.uint8)
    return routes.contiguous()


def address(x: Tensor | None) -> int:
    """Where the tensor's memory starts; 0 for None."""
    return 0 if x is None else x.data_ptr()
