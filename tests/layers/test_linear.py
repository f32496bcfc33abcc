import pytest
import torch
from torch import nn

from quantsink.errors import QuantSinkError
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.replacement import Site
from quantsink.layers.token_context import TokenContext
from quantsink.plan import LinearPlan


def context(batch=1, length=6, sink_size=1, past=0, mask=None):
    token_context = TokenContext(sink_size)
    token_context.set((batch, length), past, mask, torch.device("cpu"))
    return token_context


def layer(plan, seed=0, n=7, k=12, bias=True, dtype=torch.float32, where=None):
    torch.manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    return linear, QuantizedLinear.of(Site("test", linear, linear.weight.device, where or context()), plan)


def dequantized(q):
    return q.weight.double() * q.weight_scale.double()[:, None]


def test_weights_only_is_the_dequantized_product():
    linear, q = layer(LinearPlan("native", "plain"))
    x = torch.randn(1, 6, 12)
    expected = x.double() @ dequantized(q).T + linear.bias.double()
    assert torch.allclose(q(x).double(), expected, atol=1e-5)
    assert torch.allclose(dequantized(q), linear.weight.double(), atol=float(q.weight_scale.max()) / 2 * 1.001)


def test_per_token_is_the_formula():
    linear, q = layer(LinearPlan("per_token", "plain"))
    x = torch.randn(1, 6, 12)
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    expected = ((x.double() / scale).round() * scale) @ dequantized(q).T + linear.bias.double()
    assert torch.allclose(q(x).double(), expected, atol=1e-5)


def test_native_rows_and_columns_are_exact():
    plan = LinearPlan("per_token", "plain", native_rows=(2, 5), native_columns=(0, 11))
    linear, q = layer(plan)
    assert torch.equal(q(torch.randn(1, 6, 12))[..., [2, 5]].isfinite().all(), torch.tensor(True))
    x = torch.randn(1, 6, 12)
    exact = linear(x)
    assert torch.allclose(q(x)[..., [2, 5]], exact[..., [2, 5]], atol=1e-6)
    only = torch.zeros(1, 6, 12)
    only[..., [0, 11]] = x[..., [0, 11]] * 1000
    assert torch.allclose(q(only), linear(only), atol=1e-3)
    assert int(q.weight[[2, 5]].abs().sum()) == 0
    assert int(q.weight[:, [0, 11]].abs().sum()) == 0


def test_sink_rows_stay_native():
    _, q = layer(LinearPlan("per_token", "native"))
    x = torch.randn(1, 6, 12)
    x[0, 0, 3] = 5000.0
    expected = x[0, 0].double() @ dequantized(q).T + q.bias.double()
    assert torch.allclose(q(x)[0, 0].double(), expected, rtol=1e-5)


def test_static_scales_one_for_sink_rows_and_one_for_the_rest():
    plan = LinearPlan("static", "table", input_scale=0.02, sink_scale=10.0)
    _, q = layer(plan, where=context(batch=2, length=3, mask=torch.tensor([[0, 1, 1], [1, 1, 1]])))
    x = torch.randn(2, 3, 12)
    x[0, 1] *= 300
    x[1, 0] *= 300
    y = q(x)
    for row, token, scale in ((0, 1, 10.0), (1, 0, 10.0), (1, 2, 0.02), (0, 2, 0.02)):
        codes = (x[row, token].double() / scale).round().clamp(-127, 127)
        expected = codes * scale @ dequantized(q).T + q.bias.double()
        assert torch.allclose(y[row, token].double(), expected, rtol=1e-4, atol=1e-4)


def test_an_all_zero_row_stays_exactly_zero():
    torch.manual_seed(0)
    linear = nn.Linear(12, 7, bias=False)
    linear.weight.data[3] = 0
    q = QuantizedLinear.of(Site("test", linear, linear.weight.device, context()), LinearPlan("per_token", "plain"))
    assert torch.equal(q(torch.randn(1, 6, 12))[..., 3], torch.zeros(1, 6))
    assert bool(q.weight_scale.isfinite().all())
    assert torch.equal(q(torch.zeros(1, 6, 12)), torch.zeros(1, 6, 7))


@pytest.mark.parametrize("kind", ["native", "per_token", "static"])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_nan_in_nan_out(kind, fault):
    _, q = layer(LinearPlan(kind, "plain"))
    x = torch.randn(1, 6, 12)
    x[0, 2, 1] = fault
    assert not bool(q(x)[0, 2].isfinite().any())
    assert bool(q(x)[0, 3].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_models_own_type_comes_back(dtype):
    linear, q = layer(LinearPlan("per_token", "native", (1,), (4,)), dtype=dtype)
    x = torch.randn(1, 6, 12, dtype=dtype)
    assert q(x).dtype == dtype
    assert q.native_rows.dtype == q.native_columns.dtype == dtype
    assert torch.allclose(q(x).float(), linear(x).float(), atol=0.05)


def test_rows_that_are_not_tokens_are_refused():
    _, q = layer(LinearPlan("per_token", "native"))
    with pytest.raises(QuantSinkError, match=r"test: .*call the model"):
        q(torch.randn(5, 12))
