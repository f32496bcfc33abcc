"""Buffers that keep their type when a model is converted to another."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def keep_float32(
    module: Any, fn: Callable[[Tensor], Tensor], names: tuple[str, ...], apply: Callable[..., Any], recurse: bool
) -> Any:
    """Run `module._apply(fn)`, but let the named buffers follow only to another device, never to another type."""
    kept = {name: module._buffers[name] for name in names if module._buffers.get(name) is not None}
    apply(fn, recurse)
    for name, before in kept.items():
        after = module._buffers[name]
        module._buffers[name] = after if after.dtype == before.dtype else before.to(after.device)
    return module
