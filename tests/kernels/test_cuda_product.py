"""The INT8 product on CUDA: which library computes which shape. bitsandbytes' operator also runs on the CPU."""

from importlib import import_module

import pytest
import torch

from quantsink.kernels.int8_linear import cuda_product

linear = import_module("quantsink.kernels.int8_linear")


@pytest.mark.parametrize(
    ("m", "k", "n", "served"),
    [
        (1, 576, 192, True),
        (33, 64, 20, True),
        (3, 577, 64, False),
        (3, 64, 63, False),
        (0, 64, 64, False),
    ],
)
def test_bitsandbytes_takes_the_shapes_that_cublaslt_does(
    m: int, k: int, n: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    monkeypatch.setattr(linear, "aligned_product", lambda a, b: filled.append(a) or linear.integer_product(a, b))
    codes, weight = (torch.randint(-127, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    product = cuda_product(codes, weight)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), codes.long() @ weight.long().t())
    assert bool(filled) != served


def test_without_bitsandbytes_pytorch_computes_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "bitsandbytes_there", lambda: False)
    codes = torch.randint(-127, 128, (2, 64), dtype=torch.int8)
    assert torch.equal(cuda_product(codes, codes).long(), codes.long() @ codes.long().t())
