"""Attention modules of the laboratory with random parameters, and padded inputs for them."""

from typing import Any

import torch
from torch import Tensor

from quantsink.eval.lab.attention import AttentionSpec, Inputs, LabAttention, Mechanism
from quantsink.eval.lab.normalizers import (
    ClippedSoftmax,
    Entmax,
    Normalizer,
    ReLU,
    Softmax,
    Softmax1,
    Sparsemax,
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
