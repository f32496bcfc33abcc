"""Chunks: what each one reads, and what the memory carries between them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec, Inputs, LabAttention, Mechanism
from quantsink.eval.lab.chunks import Chunked
from quantsink.eval.lab.mechanisms import (
    LearnableSinks,
    OutputGate,
    SinkBias,
)
from quantsink.eval.lab.normalizers import (
    ClippedSoftmax,
    Entmax,
    Normalizer,
    ReLU,
    Softmax,
    Softmax1,
    Sparsemax,
)
from quantsink.eval.lab.windows import (
    SegmentWindow,
)

DIM, HEADS, SIZE = 12, 3, 4
NORMALIZERS: tuple[Normalizer, ...] = (
    Softmax(), Softmax1(), ReLU(), ClippedSoftmax(-0.03, 1.03), Sparsemax(), Entmax(1.5),
)  # fmt: skip


def made(*mechanisms: Mechanism, normalizer: Normalizer = NORMALIZERS[0], **options: Any) -> LabAttention:
    """In float64, with parameters that are nowhere 0."""
    torch.manual_seed(0)
    attention = LabAttention(DIM, HEADS, SIZE, AttentionSpec(normalizer, mechanisms, **options)).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return attention


def given(length: int, batch: int = 3, seed: int = 1) -> tuple[Tensor, Inputs]:
    """Row 0 is whole, row 1 padded on the left, row 2 on the right; where padding is, x is large."""
    torch.manual_seed(seed)
    real = torch.ones(3, length, dtype=torch.bool)
    cut = length // 3
    real[1, :cut] = False
    real[2, length - cut :] = False
    x = torch.randn(3, length, DIM, dtype=torch.float64)
    marked = torch.rand(3, length) < 0.2
    x[~real] *= 100
    return x[:batch], Inputs(real[:batch], marked[:batch])


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
