"""A kernel called without the dispatcher: only where nobody watches operators."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantsink.kernels import CodedKV, Layer, coded_attention, quantize_per_channel, quantized_linear, sink_attention
from quantsink.kernels.dispatch import unwatched


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Marked(Tensor):
    """A subclass that records what is called on it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)


def attention() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    codes = CodedKV.encode(torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64), bits=8)
    routes = torch.zeros(4, dtype=torch.uint8)
    return lambda query: coded_attention(query, codes, routes=routes, scaling=0.125), torch.randn(1, 4, 1, 64)


def linear() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    layer = Layer(*quantize_per_channel(torch.randn(50, 64)))
    return lambda x: quantized_linear(x, None, layer), torch.randn(3, 64)


CALLS = {"quantsink.coded_attention.default": attention, "quantsink.quantized_linear.default": linear}


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_plain_call_is_unwatched(context: Callable[[], AbstractContextManager[Any]]) -> None:
    with context():
        assert unwatched()


def test_what_watches_is_noticed() -> None:
    answers = {}

    def look(x: Tensor) -> Tensor:
        answers["transform"] = unwatched()
        return x.sum()

    with Seen():
        answers["mode"] = unwatched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        answers["profiler"] = unwatched()
    torch.func.grad(look)(torch.ones(3))

    def traced(x: Tensor) -> Tensor:
        answers["tracer"] = unwatched()
        return x + 1

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert answers == {"mode": False, "profiler": False, "transform": False, "tracer": False}
    assert unwatched()


@pytest.mark.parametrize("name", CALLS)
def test_modes_tracers_and_profilers_see_the_operator(name: str) -> None:
    call, x = CALLS[name]()
    plain = call(x)
    with Seen() as seen:
        assert torch.equal(call(x), plain)
    assert name in seen.names
    graph = torch.jit.trace(call, x, check_trace=False)
    assert name.replace(".default", "").replace(".", "::") in str(graph.graph)
    other = x * 2 + 1
    assert torch.equal(graph(other), call(other))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x)
    assert any(name.split(".")[1] in event.name for event in profile.events())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_changes_nothing(name: str, device: str) -> None:
    call, x = CALLS[name]()
    expected = call(x)
    with torch.device(device):
        assert torch.equal(call(x), expected)


@pytest.mark.parametrize("name", CALLS)
def test_flags_of_a_tensor_are_heeded(name: str) -> None:
    """One that is negated or zero by a flag holds other numbers than its memory."""
    call, x = CALLS[name]()
    assert torch.equal(call(torch._neg_view(x)), call(-x))
    assert torch.equal(call(torch._efficientzerotensor(x.shape)), call(torch.zeros_like(x)))


def test_tensors_on_another_device_are_refused() -> None:
    x, layer = torch.randn(3, 64), Layer(*quantize_per_channel(torch.randn(50, 64)))
    message = "weight_scale is on meta, its input on cpu; move it there"
    with pytest.raises(ValueError, match=message):
        quantized_linear(x, None, layer._replace(weight_scale=layer.weight_scale.to("meta")))
    query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 300, 64)
    codes, routes = CodedKV.encode(key, key, bits=8), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="clip_row is on meta"):
        coded_attention(query, codes, routes=routes, scaling=0.1, clip_row=torch.ones(4, device="meta"))
    away = dataclasses.replace(codes, banks=(codes.banks[0].to("meta"),))
    with pytest.raises(ValueError, match=r"banks\[0\] is on meta"):
        coded_attention(query, away, routes=routes, scaling=0.1)
    with pytest.raises(ValueError, match="routes is on meta"):
        sink_attention(query, key, key, routes=routes.to("meta"), key_mean=torch.zeros(2, 64), scaling=0.1)


@pytest.mark.parametrize("name", CALLS)
def test_a_subclass_sees_the_operator(name: str) -> None:
    call, x = CALLS[name]()
    expected = call(x)
    Marked.seen.clear()
    marked = call(x.as_subclass(Marked))
    assert name.split(".")[1] in " ".join(Marked.seen)
    torch.testing.assert_close(marked.as_subclass(Tensor), expected, rtol=0, atol=0)
