"""When an operator's CPU implementation may be called directly. A decoding step calls one a few times a layer, and
PyTorch's dispatcher then takes as long as a small layer does."""

import operator

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

_ORDINARY: int = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()
_PLAIN = {Tensor, torch.nn.Parameter}
_ON_CPU = operator.attrgetter("is_cpu")


def direct(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the dispatcher would do nothing but call the CPU implementation: `unwatched`, and all tensors are memory
    of this machine and no subclass of `Tensor`; the input `x` is not negated or zero by a flag, as complex arithmetic
    and forward differentiation leave some."""
    if not unwatched() or x.is_neg() or x._is_zerotensor():
        return False
    given = [x, *(other for other in others if other is not None)]
    return _PLAIN.issuperset(map(type, given)) and all(map(_ON_CPU, given))


def unwatched() -> bool:
    """Whether nothing wants to see operators: no torch.compile or tracer, no mode (a default device is one), no
    functorch transform, no profiler. Any other key that is set for this thread counts as watching."""
    if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack():
        return False
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    return not keys & ~_ORDINARY


def check_devices(operator: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that lie elsewhere than `x`: offloaded weights would become results of uninitialised memory."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{operator}: {name} is on {other.device}, its input on {x.device}; move it there")
