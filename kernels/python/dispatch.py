"""When an operator's CPU implementation may be called directly. A decoding step calls one a few times a layer, and
PyTorch's dispatcher then takes as long as a small layer does."""

import torch
from torch._C import DispatchKey, DispatchKeySet

_ORDINARY: int = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()


def unwatched() -> bool:
    """Whether nothing wants to see operators: no torch.compile or tracer, no dispatch mode, no functorch transform, no
    profiler. Whatever this PyTorch may have beside them counts as watching."""
    if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
        return False
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    return not keys & ~_ORDINARY
