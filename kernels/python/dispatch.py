"""How operators meet PyTorch's dispatcher: registration, and when it may be left out.

A decoding step calls an operator a few times per layer, and the dispatcher then takes as long as a small layer does.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

_ORDINARY: int = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()
_PLAIN = {Tensor, torch.nn.Parameter}
_ON_CPU = operator.attrgetter("is_cpu")

Call = TypeVar("Call")


def register(
    name: str,
    schema: str,
    call: Callable[..., Call],
    *,
    reference: Callable[[Call], Tensor],
    fake: Callable[[Call], Tensor],
    cpu: Callable[[Call], Tensor] | None = None,
    cuda: Callable[[Call], Tensor] | None = None,
) -> OpOverload:
    """Define `quantsink::name`, whose implementations take its arguments as one `call`, made of them in their order."""
    operator = f"quantsink::{name}"
    torch.library.define(operator, schema)
    for key, implementation in (("CompositeExplicitAutograd", reference), ("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            torch.library.impl(operator, key, _from_arguments(implementation, call))
    torch.library.register_fake(operator, _from_arguments(fake, call))
    overload: OpOverload = getattr(torch.ops.quantsink, name).default
    return overload


def _from_arguments(implementation: Callable[[Call], Tensor], call: Callable[..., Call]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: implementation(call(*arguments, **options))


def direct(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the dispatcher would do nothing but call the CPU implementation.

    That is so when nothing watches (`unwatched`), all tensors are plain ones in this machine's memory, and the input
    `x` is not negated or zero by a flag, as complex arithmetic and forward differentiation leave some.
    """
    if not unwatched() or x.is_neg() or x._is_zerotensor():
        return False
    tensors = [x, *(other for other in others if other is not None)]
    return _PLAIN.issuperset(map(type, tensors)) and all(map(_ON_CPU, tensors))


def unwatched() -> bool:
    """Whether nothing watches operators: no torch.compile, tracer, mode, functorch transform or profiler.

    A default device is a mode. Any other dispatch key that is set for this thread counts as watching.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled() or torch._C._len_torch_function_stack():
        return False
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr()
    return not keys & ~_ORDINARY


def check_devices(operator: OpOverload, arguments: Sequence[object], anywhere: tuple[str, ...] = ()) -> None:
    """Refuse tensors on another device than the first: offloaded weights would become results of uninitialised memory.

    `arguments`: in the order of the operator's schema; `anywhere`: the names of those that may be on another device.
    """
    first, name = arguments[0], operator._schema.name.split("::")[1]
    assert isinstance(first, Tensor)
    for parameter, argument in zip(operator._schema.arguments, arguments, strict=False):
        for n, tensor in enumerate(argument if isinstance(argument, list | tuple) else [argument]):
            if isinstance(tensor, Tensor) and tensor.device != first.device and parameter.name not in anywhere:
                place = f"{parameter.name}[{n}]" if isinstance(argument, list | tuple) else parameter.name
                raise ValueError(f"{name}: {place} is on {tensor.device}, its input on {first.device}; move it there")
