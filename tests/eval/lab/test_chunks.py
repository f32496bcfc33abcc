"""Chunks: what each one reads, and what the memory carries between them."""

import pytest
import torch
from lab_attention import DIM, given, made
from torch import Tensor, nn

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import Inputs, Mechanism
from quantsink.eval.lab.chunks import Chunked
from quantsink.eval.lab.mechanisms import (
    LearnableSinks,
    OutputGate,
    SinkBias,
)
from quantsink.eval.lab.windows import (
    SegmentWindow,
)


def chunked(*mechanisms: Mechanism, carry: bool = True, causal: bool = True) -> Chunked:
    return Chunked(made(*mechanisms, causal=causal), DIM, 5, carry).double()


@torch.no_grad()
def test_chunks_are_bos_memory_tokens_memory() -> None:
    model = chunked(SinkBias())
    x, _ = given(13)
    memory, outputs = model.memory.expand(3, 1, DIM), []
    for first, last in ((0, 5), (5, 10), (10, 13)):
        found = model.block(torch.cat([x[:, :1], memory, x[:, first:last], memory], 1))
        outputs.append(found[:, 2:-1])
        memory = found[:, -1:]
    torch.testing.assert_close(model(x), torch.cat(outputs, 1))


@pytest.mark.parametrize("length", [1, 2, 5, 16, 63])
@pytest.mark.parametrize("batch", [1, 3])
def test_chunks_of_any_length_train(length: int, batch: int) -> None:
    model = chunked(LearnableSinks(), OutputGate())
    x, _ = given(length, batch)
    out = model(x, Inputs(torch.ones(batch, length, dtype=torch.bool)))
    assert out.shape == x.shape
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert model.memory.grad is not None
    assert model.memory.grad.any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("carry", [True, False])
@torch.no_grad()
def test_the_memory_alone_carries_a_token_to_later_chunks(carry: bool, causal: bool) -> None:
    model = chunked(carry=carry, causal=causal)
    x, _ = given(15, 1)
    same = unchanged(model, x, 3)
    assert same[:3].all() == causal
    assert not same[3:5].any()
    assert same[5:].all() != carry
    assert same[5:].any() != carry
    assert not unchanged(model, x, 0).any()


def unchanged(model: nn.Module, x: Tensor, token: int, inputs: Inputs = Inputs()) -> Tensor:  # noqa: B008
    """`[L]`: outputs that are the same, to the last bit, when one token of the one row is another."""
    other = x.clone()
    other[:, token] += 1
    return (model(x, inputs) == model(other, inputs))[0].all(-1)


@torch.no_grad()
def test_no_window_hides_the_memory_of_a_chunk_with_segments() -> None:
    x, _ = given(15, 1)
    marked = torch.zeros(1, 15, dtype=torch.bool)
    same = unchanged(chunked(SegmentWindow(1, keep_sink=False)), x, 3, Inputs(marked=marked))
    assert same.tolist() == [True] * 3 + [False] + [True] + [False] * 10
    marked[:, 3] = True
    same = unchanged(chunked(SegmentWindow(1, keep_sink=False)), x, 3, Inputs(marked=marked))
    assert same.tolist() == [True] * 3 + [False] * 12


def test_chunks_refuse_padding() -> None:
    x, inputs = given(16)
    with pytest.raises(UsageError, match="padding is not supported"):
        chunked()(x, inputs)
