"""When an operator's CPU implementation may be called directly. A decoding step calls one a few times a layer, and
PyTorch's dispatcher then takes as long as a small layer does."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

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


def check_devices(operator: OpOverload, given: Sequence[object], anywhere: tuple[str, ...] = ()) -> None:
    """Refuse tensors that lie elsewhere than the first: offloaded weights would become results of uninitialised memory.

    `given`: the arguments in the order of the operator's schema; `anywhere`: the names of those that may lie elsewhere.
    """
    first, name = given[0], operator._schema.name.split("::")[1]
    assert isinstance(first, Tensor)
    for argument, value in zip(operator._schema.arguments, given, strict=False):
        for n, one in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(one, Tensor) and one.device != first.device and argument.name not in anywhere:
                what = f"{argument.name}[{n}]" if isinstance(value, list) else argument.name
                raise ValueError(f"{name}: {what} is on {one.device}, its input on {first.device}; move it there")
