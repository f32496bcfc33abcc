"""The INT8 linear product and the quantization rule that feeds it."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantsink.kernels import int8_linear, quantize_per_channel, quantize_per_token
from quantsink.kernels.int8_linear import aligned_product, integer_product, quantize_static

SHAPES = [(1, 576, 192), (1, 1, 1), (2, 7, 5), (33, 577, 191), (512, 64, 64), (0, 8, 8)]


def codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


# The product.


@pytest.mark.parametrize("product", [integer_product, aligned_product])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_sums_are_exact(product: Callable[[Tensor, Tensor], Tensor], m: int, k: int, n: int) -> None:
    a, b = codes(m, k), codes(n, k, seed=1)
    assert torch.equal(product(a, b).long(), a.long() @ b.long().t())


def test_sums_are_exact_where_float32_would_round() -> None:
    a = torch.full((2, 4095), 127, dtype=torch.int8)
    a[1, 0] = 126
    exact = int8_linear(a, a, torch.ones(2, 1, dtype=torch.double), torch.ones(2, dtype=torch.double))
    assert exact.tolist() == (a.long() @ a.long().t()).tolist()
    assert exact.max() > 2**24


@pytest.mark.parametrize("rows", ["per token", "static"])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_scales_apply_per_row_and_per_output_channel(rows: str, m: int, k: int, n: int) -> None:
    a, b = codes(m, k), codes(n, k, seed=1)
    scale = torch.rand(m if rows == "per token" else 1, 1) + 0.5
    weight_scale = torch.rand(n) + 0.5
    expected = (a.double() * scale) @ (b.double() * weight_scale[:, None]).t()
    out = int8_linear(a, b, scale, weight_scale)
    assert out.dtype == torch.float
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-3)


def test_float64_scales_give_float64() -> None:
    out = int8_linear(codes(3, 8), codes(5, 8), torch.ones(3, 1, dtype=torch.double), torch.ones(5))
    assert out.dtype == torch.double


def test_strided_inputs_give_the_same() -> None:
    a, b = codes(18, 24), codes(10, 24, seed=1)
    scale, weight_scale = torch.rand(9, 1), torch.rand(5)
    strided = int8_linear(a[::2, ::2], b[::2, ::2], scale, weight_scale)
    assert torch.equal(strided, int8_linear(a[::2, ::2].contiguous(), b[::2, ::2].contiguous(), scale, weight_scale))
    columns = a.t(), b.t()[:, :5].repeat(1, 4)[:, :18], torch.ones(24, 1), torch.ones(24)
    assert torch.equal(int8_linear(*columns), int8_linear(*(x.contiguous() for x in columns)))


def test_inputs_are_left_alone() -> None:
    arguments = codes(4, 8), codes(5, 8), torch.rand(4, 1), torch.rand(5)
    before = [x.clone() for x in arguments]
    int8_linear(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


# The quantization rule.


@pytest.mark.parametrize("dtype", [torch.double, torch.float, torch.bfloat16, torch.float16])
def test_per_token_codes_use_all_eight_bits(dtype: torch.dtype) -> None:
    x = torch.randn(20, 65, dtype=torch.double).to(dtype)
    x[3] *= 1000
    q, scale = quantize_per_token(x)
    assert q.dtype == torch.int8
    assert scale.dtype == (torch.double if dtype == torch.double else torch.float)
    assert (q.abs().amax(-1) == 127).all()
    assert ((q * scale - x).abs() <= scale * 0.5001).all()


def test_minus_128_is_never_a_code() -> None:
    x = torch.tensor([[-1.0, 0.5], [1.0, -0.999]])
    assert quantize_per_token(x)[0].tolist() == [[-127, 64], [127, -127]]
    assert quantize_static(torch.tensor([[-1000.0, 1000.0, 0.26]]), torch.tensor([[0.5]])).tolist() == [[-127, 127, 1]]


def test_what_a_fixed_scale_does_not_cover_saturates_even_at_infinity() -> None:
    x = torch.tensor([[torch.inf, -torch.inf, 1e30, 1.0]])
    assert quantize_static(x, torch.tensor([[1.0]])).tolist() == [[127, -127, 127, 1]]


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_zero_rows_give_exact_zeros_under_a_finite_scale(dtype: torch.dtype) -> None:
    x = torch.randn(4, 16).to(dtype)
    x[1] = 0
    q, scale = quantize_per_token(x)
    weight, weight_scale = quantize_per_channel(torch.zeros(8, 16))
    assert scale[1] == 1
    assert (weight_scale == 1).all()
    out = int8_linear(q, quantize_per_channel(torch.randn(8, 16))[0], scale, weight_scale)
    assert (out[1] == 0).all()
    assert (int8_linear(q, weight, scale, weight_scale) == 0).all()


def test_the_smallest_numbers_stay_finite() -> None:
    x = torch.tensor([[1e-45, 0.0], [1e-38, -1e-38]])
    q, scale = quantize_per_token(x)
    out = int8_linear(q, codes(3, 2), scale, torch.ones(3))
    assert out.isfinite().all()


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_fault_in_one_row_shows_in_that_row_alone(fault: float) -> None:
    x = torch.randn(5, 16)
    x[2, 3] = fault
    q, scale = quantize_per_token(x)
    weight, weight_scale = quantize_per_channel(torch.randn(8, 16))
    out = int8_linear(q, weight, scale, weight_scale)
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3, 4]].isfinite().all()


def test_per_channel_is_per_token_of_the_weight() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 10).t())
    q, scale = quantize_per_channel(weight)
    assert q.shape == (10, 6)
    assert q.is_contiguous()
    assert not scale.requires_grad
    assert ((q * scale[:, None] - weight.detach()).abs() <= scale[:, None] * 0.5001).all()


def test_eight_bit_product_is_near_the_full_one(numerics: ModuleType) -> None:
    x, weight = torch.randn(64, 576), torch.randn(192, 576)
    q, scale = quantize_per_token(x)
    weight_codes, weight_scale = quantize_per_channel(weight)
    out = int8_linear(q, weight_codes, scale, weight_scale)
    assert numerics.rms_error(out, x.double() @ weight.double().t()) < 0.015


# The contract.


def test_what_does_not_fit_is_refused() -> None:
    a, b, scale, weight_scale = codes(4, 8), codes(5, 8), torch.ones(4, 1), torch.ones(5)
    with pytest.raises(ValueError, match="int8"):
        int8_linear(a.float(), b, scale, weight_scale)
    for wrong in (
        (a, codes(5, 7), scale, weight_scale),
        (a, b, torch.ones(3, 1), weight_scale),
        (a, b, torch.ones(4), weight_scale),
        (a, b, scale, torch.ones(4)),
    ):
        with pytest.raises(ValueError, match="int8_linear: codes"):
            int8_linear(*wrong)


@pytest.mark.parametrize("rows", [4, 1])
def test_operator_is_registered_as_torch_expects(rows: int) -> None:
    arguments = codes(4, 8), codes(5, 8), torch.rand(rows, 1), torch.rand(5)
    torch.library.opcheck(torch.ops.quantsink.int8_linear.default, arguments)


def test_fake_tensors_pass_through() -> None:
    arguments = codes(4, 8), codes(5, 8), torch.rand(4, 1), torch.rand(5)
    real = int8_linear(*arguments)
    with FakeTensorMode() as mode:
        fake = int8_linear(*(mode.from_tensor(x) for x in arguments))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_compiled_code_holds_the_operator_in_one_graph() -> None:
    weight, weight_scale = quantize_per_channel(torch.randn(8, 16))

    def layer(x: Tensor) -> Tensor:
        q, scale = quantize_per_token(x)
        return int8_linear(q, weight, scale, weight_scale)

    x = torch.randn(4, 16)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
