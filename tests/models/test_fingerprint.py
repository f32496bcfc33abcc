"""What identifies a model, whatever type it is loaded in."""

import copy

import pytest
import torch
from tiny import calibrated

import quantsink
from quantsink.errors import CalibrationError, ModelError


def test_a_calibration_in_float32_serves_the_model_in_float16(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    for dtype in (torch.float16, torch.bfloat16):
        quantsink.quantize(copy.deepcopy(model).to(dtype), calibration)
    other = copy.deepcopy(model)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(CalibrationError, match="not those of the calibrated"):
        quantsink.quantize(other, calibration)


def test_weights_that_are_not_finite_are_named(tiny_llama, tokenizer):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        calibrated(model, tokenizer)
