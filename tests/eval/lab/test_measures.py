"""Ways to spend 8 bits, and what calibration finds of a model."""

import pytest
import torch

from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.measures import (
    methods,
    outputs_in_8_bits,
    relative_error,
    single_parts,
    sink_heads,
    weight_by_head,
)
from quantsink.eval.lab.model import FeatureModel, LabConfig
from quantsink.eval.lab.quantize import Bits


def test_random_keeps_as_many_other_keys_exact() -> None:
    ways = methods(3, 40, seed=0)
    assert ways["sink"].exact == (0, 1, 2)
    assert len(set(ways["random"].exact)) == 3
    assert min(ways["random"].exact) >= 3
    assert max(ways["random"].exact) < 40
    assert ways["random"] != methods(3, 40, seed=1)["random"]


def test_single_parts_leave_the_others_exact() -> None:
    parts = single_parts(2)
    assert [parts[name].parts for name in ("scores", "weights", "values")] == [("scores",), ("weights",), ("values",)]
    assert parts["scores and weights, sinks exact"].exact == (0, 1)
    assert all(bits.unit == "block" for bits in parts.values())


@torch.no_grad()
def test_outputs_in_8_bits_leave_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model = FeatureModel(LabConfig(num_attention_heads=2), AttentionSpec()).eval()
    x = torch.randn(2, 30, 11)
    before = model(x)
    exact, outputs = outputs_in_8_bits(model, x, {"nothing": Bits(parts=()), "all": Bits()})
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, before.double(), atol=1e-5, rtol=1e-5)
    assert relative_error(outputs["nothing"], exact) < 1e-12
    assert 1e-5 < relative_error(outputs["all"], exact) < 0.1
    assert torch.equal(model(x), before)


def test_an_error_is_relative_to_what_is_exact() -> None:
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)


def test_weight_on_a_key_is_a_mean_over_sequences_and_rows() -> None:
    weights = torch.zeros(2, 3, 8, 8)
    weights[:, 1, :, 0] = 0.5
    weights[0, 2, 4:, 0] = 1
    mass = weight_by_head([weights, weights], 0, first_row=4)
    assert mass == {(layer, head): (0, 0.5, 0.5)[head] for layer in (0, 1) for head in range(3)}
    assert weight_by_head([weights], 0)[0, 2] == 0.25
    assert sink_heads({(0, 0): 0.29, (0, 1): 0.3, (1, 0): 0.9}) == ((0, 1), (1, 0))
