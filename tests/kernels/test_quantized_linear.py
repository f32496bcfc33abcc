"""One call per quantized linear layer: every option, on every instruction set, against the formula in float64."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantsink.kernels import Layer, quantize_per_token, quantized_linear, quantized_linears
from quantsink.kernels.cpu import library
from quantsink.kernels.quantized_linear import cpu
from quantsink.kernels.quantized_linear.reference import reference

SIZES = [(1, 576, 192), (3, 65, 97), (8, 63, 48), (9, 1, 7), (16, 576, 33), (33, 65, 49), (130, 577, 101), (2, 64, 1)]
slow = pytest.mark.slow
TYPES = [torch.float32, torch.bfloat16, torch.float16]
INPUTS = [(kind, rows) for kind in ("native", "per_token", "static") for rows in ("plain", "native")]
INPUTS += [("static", "table")]


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of kernels in turn."""
    built = library()
    if built is None:
        pytest.skip("the C++ kernels were not built")
    before = built.isa()
    if not built.select_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    built.select_isa(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    activations: str = "per_token",
    rows: int = 0,
    columns: int = 0,
    bias: bool = False,
    table: bool = False,
) -> Layer:
    """Random weights; what is native is spread over the layer and 0 among the codes."""
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    row_index, column_index = torch.randperm(n)[:rows].int(), torch.randperm(k)[:columns].int()
    weight[row_index.long()] = 0
    weight[:, column_index.long()] = 0
    native_columns = torch.randn(n, columns).to(dtype)
    native_columns[row_index.long()] = 0
    static = activations == "static"
    return Layer(
        weight,
        torch.rand(n) * 0.02 + 0.001,
        torch.randn(n).to(dtype) if bias else None,
        torch.randn(rows, k).to(dtype) if rows else None,
        row_index if rows else None,
        native_columns if columns else None,
        column_index if columns else None,
        torch.tensor([0.02]) if static else None,
        torch.tensor([0.3]) if static and table else None,
        activations,
    )


def formula(x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    """docs/formats.md in float64; only the codes are float32's."""
    exact, rest = x.double(), x.float().clone()
    if layer.native_column_index is not None:
        rest[:, layer.native_column_index.long()] = 0
    amax = rest.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / 127)
    if layer.input_scale is not None:
        scale = layer.input_scale.repeat(len(x), 1)
        if sink is not None and layer.sink_scale is not None:
            scale[sink] = layer.sink_scale
    rounded = (rest / scale).round().clamp(-127, 127).double() * scale.double()
    if layer.activations == "native":
        rounded = rest.double()
    elif sink is not None and layer.sink_scale is None:
        rounded[sink] = rest[sink].double()
    y = rounded @ (layer.weight.double() * layer.weight_scale.double()[:, None]).t()
    if layer.native_columns is not None and layer.native_column_index is not None:
        y += exact[:, layer.native_column_index.long()] @ layer.native_columns.double().t()
    if layer.native_rows is not None and layer.native_row_index is not None:
        y[:, layer.native_row_index.long()] = exact @ layer.native_rows.double().t()
    return y if layer.bias is None else y + layer.bias.double()


def check(numerics: ModuleType, x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    with numerics.poisoned_memory():
        found = quantized_linear(x, sink, layer)
    assert found.dtype == x.dtype
    assert found.is_contiguous()
    numerics.assert_within_budget(found, reference(x, sink, layer), formula(x, sink, layer))
    return found


# Every option against the formula.


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_every_size_and_type(
    isa: str, threads: int, m: int, k: int, n: int, dtype: torch.dtype, numerics: ModuleType
) -> None:
    torch.manual_seed(m)
    check(numerics, torch.randn(m, k).to(dtype), None, make(n, k, dtype))
    check(numerics, torch.randn(m, k).to(dtype), None, make(n, k, dtype, columns=min(k, 5), bias=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, pytest.param(8, marks=slow), 9, pytest.param(33, marks=slow)])
@pytest.mark.parametrize(("activations", "sink_rows"), INPUTS)
@pytest.mark.parametrize("native", ["none", "rows", "columns", "both"])
def test_every_option(
    isa: str, m: int, activations: str, sink_rows: str, native: str, dtype: torch.dtype, numerics: ModuleType
) -> None:
    torch.manual_seed(0)
    rows, columns = 5 if native in ("rows", "both") else 0, 3 if native in ("columns", "both") else 0
    layer = make(
        49, 65, dtype, activations=activations, rows=rows, columns=columns, bias=True, table=sink_rows == "table"
    )
    x = torch.randn(m, 65)
    x[0] *= 20
    sink = None if sink_rows == "plain" else torch.tensor([0, m // 2]).unique()
    check(numerics, x.to(dtype), sink, layer)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 9, 130])
@pytest.mark.parametrize(("activations", "sink_rows"), INPUTS)
def test_layers_of_one_input_together_are_the_same_bits(
    isa: str, threads: int, m: int, activations: str, sink_rows: str, dtype: torch.dtype, numerics: ModuleType
) -> None:
    """Some share what turns the input into codes with the one before, others do not."""
    torch.manual_seed(0)
    table, k = sink_rows == "table", 577
    layers = [
        make(n, k, dtype, activations=activations, rows=rows, columns=columns, bias=bias, table=table)
        for n, rows, columns, bias in [(600, 0, 5, True), (97, 3, 5, False), (1, 0, 0, True), (50, 0, 0, False)]
    ]
    layers[1] = layers[1]._replace(native_column_index=layers[0].native_column_index)
    layers.insert(1, layers[0]._replace(input_scale=None if layers[0].input_scale is None else torch.tensor([0.05])))
    sink = None if sink_rows == "plain" else torch.tensor([0, m // 2]).unique()
    x = torch.randn(m, k).to(dtype)
    with numerics.poisoned_memory():
        together = quantized_linears(x, sink, layers)
        apart = [quantized_linear(x, sink, layer) for layer in layers]
    if activations == "native" and m > cpu.UNQUANTIZED_ROWS:
        assert together is None
        return
    assert together is not None
    assert len(together) == len(layers)
    assert all(torch.equal(found, expected) for found, expected in zip(together, apart, strict=True))


@pytest.mark.skipif(library() is None, reason="the C++ kernels were not built")
def test_one_layer_of_several_that_does_not_fit() -> None:
    """None, and nothing is computed: the caller takes them one by one."""
    good, x = make(7, 16, torch.float32), torch.randn(2, 16)
    wrong = [
        make(7, 15, torch.float32),
        good._replace(weight=good.weight.to("meta")),
        good._replace(weight_scale=good.weight_scale.double()),
        good._replace(weight_scale=good.weight_scale[:6]),
        good._replace(bias=torch.randn(8)),
        good._replace(activations="native"),
        good._replace(activations="static"),
        good._replace(native_columns=torch.randn(7, 1), native_column_index=torch.tensor([16], dtype=torch.int32)),
        good._replace(native_columns=torch.randn(7, 1), native_column_index=torch.tensor([-1], dtype=torch.int32)),
        good._replace(input_scale=torch.tensor([0.1], device="meta")),
    ]
    assert quantized_linears(x, None, [good, good]) is not None
    assert all(quantized_linears(x, None, [good, bad]) is None for bad in wrong)
    assert quantized_linears(x, None, []) is None
    assert quantized_linears(x.requires_grad_(), None, [good]) is None


def test_what_cannot_be_multiplied_is_refused() -> None:
    layer = make(7, 16, torch.float32)
    with pytest.raises(ValueError, match=r"an input \[2, 3, 16\] for weights \[7, 16\]; give \[M, K\] for \[N, K\]"):
        quantized_linear(torch.randn(2, 3, 16), None, layer)
    with pytest.raises(ValueError, match="activations 'eight' are not one of native, per_token, static"):
        quantized_linear(torch.randn(2, 16), None, layer._replace(activations="eight"))


def test_work_for_two_threads(isa: str, threads: int, numerics: ModuleType) -> None:
    torch.manual_seed(0)
    sink = torch.tensor([0, 300])
    for n in (40, 700):
        check(numerics, torch.randn(515, 600).bfloat16(), sink, make(n, 600, torch.bfloat16, columns=7, rows=3))


def test_threads_change_no_bit(isa: str) -> None:
    torch.manual_seed(0)
    x, layer, before = torch.randn(515, 600), make(300, 600, torch.float32, columns=7), torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(quantized_linear(x, None, layer))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_row_is_computed_the_same_in_any_company(isa: str) -> None:
    """Few rows and many take different paths to the same integers."""
    torch.manual_seed(0)
    x, layer = torch.randn(40, 200), make(100, 200, torch.float32)
    whole = quantized_linear(x, None, layer)
    for m in (1, 4, 5, 8, 9, 16):
        assert torch.equal(quantized_linear(x[:m], None, layer), whole[:m])


def test_sums_do_not_wrap(isa: str) -> None:
    for m in (1, 40):
        weight = torch.full((50, 16384), 127, dtype=torch.int8)
        x = torch.ones(m, 16384)
        x[:, 1::2] = torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0)[:, None]
        found = quantized_linear(x, None, Layer(weight, torch.ones(50)))
        assert torch.allclose(found[0], torch.tensor(16384 * 127.0))
        if m > 1:
            assert torch.equal(found[1], torch.zeros(50))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_codes_are_those_of_the_rule(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 257).to(dtype)
    x[1] = 0
    x[2] *= 1000
    x[3] = torch.linspace(-127, 127, 257).mul(2).round().div(2).to(dtype)  # ties
    x[4, 1:] = 0
    x[5] *= 1e-40
    x[6] = 0
    x[6, 3] = 1e-44  # a scale of 0
    codes, scale = torch.empty(400, 257, dtype=torch.int8), torch.empty(400)
    built = library()
    assert built is not None
    assert built.quantize(x.data_ptr(), x.stride(0), cpu.TYPES[dtype], 400, 257, codes.data_ptr(), scale.data_ptr(), 2)
    expected_codes, expected_scale = quantize_per_token(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale[:, 0])


# Faults, extremes, strides.


@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("activations", ["native", "per_token", "static"])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [4, 1])
def test_a_fault_shows_in_its_row_alone(isa: str, fault: float, activations: str, m: int, column: int) -> None:
    torch.manual_seed(0)
    layer = make(50, 65, torch.float32, activations=activations, columns=1)
    layer.weight[:] = layer.weight.abs().clamp(min=1)
    layer = layer._replace(native_column_index=torch.tensor([1], dtype=torch.int32))
    layer.weight[:, 1] = 0
    x = torch.randn(m, 65)
    x[2, column] = fault
    for sink in (None, torch.tensor([2])):
        found = quantized_linear(x, sink, layer)
        assert not found[2].isfinite().any()
        assert found[[0, 1]].isfinite().all()


def test_zero_rows_are_zero(isa: str) -> None:
    for m in (2, 20):
        x = torch.zeros(m, 65)
        x[0] = 1
        found = quantized_linear(x, None, make(50, 65, torch.float32, columns=3))
        assert torch.equal(found[1:], torch.zeros(m - 1, 50))


def test_no_rows_give_no_rows(isa: str) -> None:
    assert quantized_linear(torch.empty(0, 64), None, make(7, 64, torch.float32)).shape == (0, 7)


@pytest.mark.parametrize("activations", ["native", "per_token"])
def test_massive_activations_in_float16_do_not_overflow_on_the_way(isa: str, activations: str) -> None:
    layer = make(50, 576, torch.float16, activations=activations)._replace(weight_scale=torch.full((50,), 1e-6))
    for m in (1, 20):
        x = torch.full((m, 576), 60000.0, dtype=torch.float16)
        assert quantized_linear(x, torch.tensor([0]), layer).isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rounding_of_results_is_torchs(isa: str, dtype: torch.dtype) -> None:
    """Weights of 1 pass values through: overflow, subnormal numbers and ties included."""
    values = torch.cat(
        [torch.randn(4096) * 10.0 ** torch.randint(-9, 6, (4096,)), torch.tensor([65519.9, 65520.0, 3e38])]
    )
    weight = torch.zeros(len(values), 1, dtype=torch.int8)
    layer = Layer(weight + 1, values.abs(), activations="native")
    for x in (1.0, -1.0):
        found = quantized_linear(torch.tensor([[x]], dtype=dtype), None, layer)
        assert torch.equal(found[0], (values.abs() * x).to(dtype))


def test_strided_inputs_give_the_same(isa: str) -> None:
    torch.manual_seed(0)
    layer = make(50, 65, torch.float32, columns=3)
    wide = torch.randn(20, 130)
    for x in (wide[:, :65], wide[:, ::2], wide.t()[:65, :20].t(), wide[::2, 65:]):
        assert torch.equal(quantized_linear(x, None, layer), quantized_linear(x.contiguous(), None, layer))
    one = torch.randn(1, 5, 65)[:, -1, :]
    assert torch.equal(quantized_linear(one, None, layer), quantized_linear(one.clone(), None, layer))


# What C++ does not know goes to the reference.


def test_float64_keeps_its_precision(numerics: ModuleType) -> None:
    x, layer = torch.randn(9, 65, dtype=torch.double), make(7, 65, torch.double, activations="native")
    found = quantized_linear(x, None, layer)
    assert found.dtype == torch.double
    expected = x @ (layer.weight.double() * layer.weight_scale.double()[:, None]).t()
    assert numerics.rms_error(found, expected) < 1e-6


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch, numerics: ModuleType) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    torch.manual_seed(0)
    x, layer = torch.randn(9, 65), make(7, 65, torch.float32, columns=3, rows=2, bias=True)
    assert torch.equal(check(numerics, x, None, layer), reference(x, None, layer))


def test_native_activations_have_a_gradient() -> None:
    x, layer = torch.randn(2, 65, requires_grad=True), make(7, 65, torch.float32, activations="native")
    quantized_linear(x, None, layer).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], (layer.weight.float() * layer.weight_scale[:, None]).sum(0), atol=1e-5)


def test_inputs_are_left_alone() -> None:
    x, layer = torch.randn(9, 65), make(7, 65, torch.float32, columns=3, rows=2, bias=True)
    before = x.clone(), *(t.clone() for t in layer if isinstance(t, Tensor))
    quantized_linear(x, torch.tensor([0]), layer)
    after = x, *(t for t in layer if isinstance(t, Tensor))
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# The contract.


@pytest.mark.parametrize("activations", ["native", "per_token", "static"])
def test_operator_is_registered_as_torch_expects(activations: str) -> None:
    layer = make(7, 65, torch.float32, activations=activations, columns=3, rows=2, bias=True)
    arguments = (torch.randn(9, 65), torch.tensor([0]), *layer)
    torch.library.opcheck(torch.ops.quantsink.quantized_linear.default, arguments)


def test_fake_tensors_pass_through() -> None:
    x, layer = torch.randn(9, 65), make(7, 65, torch.float32)
    real = quantized_linear(x, None, layer)
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in layer]
        fake = quantized_linear(mode.from_tensor(x), None, Layer(*tensors))  # type: ignore[arg-type]
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_meta_tensors_give_shapes() -> None:
    layer = Layer(*(t.to("meta") if isinstance(t, Tensor) else t for t in make(7, 65, torch.float32)))  # type: ignore[arg-type]
    assert quantized_linear(torch.empty(9, 65, device="meta"), None, layer).shape == (9, 7)


def test_compiled_code_holds_the_operator_in_one_graph() -> None:
    layer = make(7, 65, torch.float32, columns=3)

    def call(x: Tensor) -> Tensor:
        return quantized_linear(x, None, layer) * 2

    x = torch.randn(9, 65)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))


def test_sink_rows_may_be_any_index_type_and_lie_inside() -> None:
    layer, x = make(33, 64, torch.float32), torch.randn(6, 64)
    expected = quantized_linear(x, torch.tensor([0, 3]), layer)
    assert torch.equal(quantized_linear(x, torch.tensor([0, 3], dtype=torch.int32), layer), expected)
    torch.testing.assert_close(quantized_linear(x, torch.tensor([0, -3]), layer), expected)
    with pytest.raises(IndexError):
        quantized_linear(x, torch.tensor([6]), layer)


def test_tensors_that_c_would_misread_go_to_the_reference() -> None:
    layer, x = make(33, 64, torch.float32, columns=2), torch.randn(6, 64)
    expected = reference(x, None, layer)
    assert layer.native_column_index is not None
    for changed in (
        layer._replace(weight_scale=layer.weight_scale.double()),
        layer._replace(native_column_index=layer.native_column_index.long()),
    ):
        torch.testing.assert_close(quantized_linear(x, None, changed), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"need weight \[N, 32\]"):
        quantized_linear(torch.randn(6, 32), None, make(33, 64, torch.float32))
