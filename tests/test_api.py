"""`quantsink.quantize`: what it accepts, and that a refused model is unchanged."""

import pytest
import torch
from tiny import IDS, calibrated, logits

import quantsink
from quantsink.errors import CalibrationError, ModelError, RecipeError


def test_a_calibration_and_its_folder_quantize_alike(tiny_llama, tokenizer, tmp_path):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    calibration.save(tmp_path / "calibration")
    assert quantsink.quantize(model, calibration) is model
    from_folder = quantsink.quantize(tiny_llama(), str(tmp_path / "calibration"))
    assert torch.equal(logits(model), logits(from_folder))


@pytest.mark.parametrize(
    ("seed", "recipe", "error", "message"),
    [
        (1, "w8a8", CalibrationError, "LlamaForCausalLM: its weights are not those of the calibrated"),
        (0, "w9", RecipeError, "neither a preset"),
    ],
)
def test_a_refused_model_is_unchanged(seed, recipe, error, message, tiny_llama, tokenizer):
    calibration = calibrated(tiny_llama(), tokenizer)
    model = tiny_llama(seed)
    before = logits(model, IDS)
    with pytest.raises(error, match=message):
        quantsink.quantize(model, calibration, recipe)
    assert all(type(module).__module__.partition(".")[0] != "quantsink" for module in model.modules())
    assert torch.equal(logits(model, IDS), before)


def test_a_quantized_model_is_refused(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    quantsink.quantize(model, calibration)
    with pytest.raises(ModelError, match="already quantized"):
        quantsink.quantize(model, calibration)
