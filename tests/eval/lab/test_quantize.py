"""The laboratory's 8 bits are those of the operator where both can compute, and exact where nothing is quantized."""

from typing import Any

import pytest
import torch

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import ALL_REAL, AttentionSpec, LabAttention, Parts
from quantsink.eval.lab.mechanisms import LearnableSinks, OutputGate, SinkBias
from quantsink.eval.lab.model import FeatureModel, LabConfig
from quantsink.eval.lab.normalizers import NAMES, ReLU, Softmax, Softmax1, normalizer
from quantsink.eval.lab.quantize import Bits, exact_attention, in_8_bits, quantized_attention
from quantsink.kernels import Route, sink_attention


def parts(spec: AttentionSpec, length: int = 150, seed: int = 0) -> Parts:
    torch.manual_seed(seed)
    attention = LabAttention(24, 3, 8, spec).double()
    x = torch.randn(2, length, 24, dtype=torch.float64)
    x[:, 0] *= 30
    with torch.no_grad():
        return attention.parts(x, ALL_REAL)


SAME = [
    (Bits("row"), Route.INT8, {"weight_scale": "row"}),
    (Bits("block", 64), Route.INT8, {"block": 64}),
    (Bits("block", 16), Route.INT8, {"block": 16}),
    (Bits("block", 64, (0,)), Route.SINK, {"block": 64}),
    (Bits("row", exact=(0,)), Route.SINK, {"weight_scale": "row"}),
    (Bits("block", 64, (0, 1, 2)), Route.SINK, {"block": 64, "sink_size": 3}),
]
# The operator rounds softmax's weights and then takes the learned sink's share off, so `fixed` differs with softmax1.
CASES = [(norm, *case) for norm in (Softmax(), Softmax1()) for case in SAME]
CASES.append((Softmax(), Bits("fixed"), Route.INT8, {"weight_scale": "fixed"}))


@pytest.mark.parametrize(("norm", "bits", "route", "options"), CASES)
def test_softmax_in_8_bits_is_the_operators_reference(norm: Any, bits: Bits, route: Route, options: Any) -> None:
    given = parts(AttentionSpec(norm))
    # One key mean for the operator, so one batch row at a time here.
    one = Parts(given.query[:1], given.key[:1], given.value[:1], None, given.visible, given.scaling, 0)
    found = quantized_attention(one, norm, bits)
    kept = [key for key in range(one.key.shape[2]) if key not in bits.exact]
    expected = sink_attention(
        one.query,
        one.key,
        one.value,
        routes=torch.full((3,), int(route)),
        key_mean=one.key[0, :, kept].mean(1),
        scaling=one.scaling,
        s_aux=torch.zeros(3) if isinstance(norm, Softmax1) else None,
        **options,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mechanisms", [(), (SinkBias(),), (LearnableSinks(2),), (OutputGate(),)])
def test_with_nothing_in_8_bits_it_is_exact(name: str, mechanisms: Any) -> None:
    spec = AttentionSpec(normalizer(name), mechanisms)
    given = parts(spec, 40)
    exact = exact_attention(given, spec.normalizer)
    for bits in (Bits(parts=()), Bits(exact=tuple(range(given.key.shape[2] - 1)), parts=("weights",))):
        found = quantized_attention(given, spec.normalizer, bits)
        error = float((found - exact).norm() / exact.norm())
        assert error < (1e-12 if not bits.parts else 0.05)
    expected = spec.normalizer(given.scores(), given.visible) @ given.value
    torch.testing.assert_close(exact, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_fixed_unit_rounds_what_the_normalizer_gives_out(name: str) -> None:
    norm = normalizer(name)
    given = parts(AttentionSpec(norm), 40)
    weights = (norm(given.scores(), given.visible) * 127).round().clamp(max=127) / 127
    found = quantized_attention(given, norm, Bits("fixed", parts=("weights",)))
    torch.testing.assert_close(found, weights @ given.value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_each_part_adds_an_error_of_its_own(name: str) -> None:
    norm = normalizer(name)
    given = parts(AttentionSpec(norm), 40)
    exact = exact_attention(given, norm)
    for part in ("scores", "weights", "values"):
        found = quantized_attention(given, norm, Bits(parts=(part,)))
        assert 0 < float((found - exact).norm() / exact.norm()) < 0.3, part


def test_a_fixed_unit_cuts_off_what_relu_gives_beyond_one() -> None:
    given = parts(AttentionSpec(ReLU()), 3)
    large = Parts(given.query * 100, given.key, given.value, None, given.visible, given.scaling, 0)
    fixed, row = (quantized_attention(large, ReLU(), Bits(unit, parts=("weights",))) for unit in ("fixed", "row"))
    exact = exact_attention(large, ReLU())
    assert float((row - exact).norm()) < 0.02 * float(exact.norm())
    assert float((fixed - exact).norm()) > 0.5 * float(exact.norm())


def test_a_model_is_itself_again_afterwards() -> None:
    torch.manual_seed(0)
    model = FeatureModel(LabConfig(num_hidden_layers=2, num_attention_heads=2, residual=True), AttentionSpec()).eval()
    x = torch.randn(1, 30, 11)
    with torch.no_grad():
        before = model(x)
        with in_8_bits(model, Bits("fixed")):
            assert not torch.equal(model(x), before)
        assert torch.equal(model(x), before)
        with pytest.raises(RuntimeError, match="stop"), in_8_bits(model, Bits()):
            raise RuntimeError("stop")
        assert torch.equal(model(x), before)
        with in_8_bits(model, None):
            torch.testing.assert_close(model(x), before)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="unit 'column' is not one of fixed, row, block"):
        Bits("column")
    with pytest.raises(UsageError, match="not among scores, weights, values"):
        Bits(parts=("keys",))
