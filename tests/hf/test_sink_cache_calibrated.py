"""A SinkCache from a calibration, in a recipe and in a checkpoint."""

import copy
import json

import pytest
from transformers import DynamicCache

import quantsink
from quantsink.errors import CheckpointError, RecipeError
from quantsink.recipe import KVCache, Recipe


def test_widths_average_to_the_requested_bits(calibrated):
    model, calibration = calibrated
    for bits in (2, 2.5, 3, 4, 5, 6, 8):
        cache = quantsink.SinkCache.from_calibration(model, calibration, bits=bits)
        uniform = bits + 32 * (1 / 64 + 1 / 32) / 2
        assert cache.bits_per_number == pytest.approx(uniform, rel=0.05 if bits > 2 else 0.02)
        assert cache.bits_per_number <= uniform * 1.02
    control = quantsink.SinkCache.from_calibration(model, calibration, bits=4, widths="random", seed=1)
    measured = quantsink.SinkCache.from_calibration(model, calibration, bits=4)
    assert control.bits_per_number == pytest.approx(measured.bits_per_number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "from 2 to 8"),
        ({"bits": "4"}, "from 2 to 8"),
        ({"bits": 4.5, "widths": "uniform"}, "uniform"),
        ({"widths": "best"}, "measured, uniform, random"),
        ({"sink_size": -1}, "0 or more"),
        ({"stream": "on"}, "auto, off"),
        ({"stream": 0}, "auto, off"),
        ({"max_length": 100}, "at least"),
    ],
)
def test_invalid_options_are_refused(calibrated, options, message):
    model, calibration = calibrated
    with pytest.raises(RecipeError, match=message):
        quantsink.SinkCache.from_calibration(model, calibration, **options)


def test_a_folder_is_not_a_calibration(calibrated):
    with pytest.raises(RecipeError, match=r"Calibration\.load"):
        quantsink.SinkCache.from_calibration(calibrated[0], "calibration")


@pytest.mark.parametrize(
    "damage",
    [
        {"sinks": -1},
        {"layers": {}},
        {"layers": {"model.layers.0.self_attn": {"bits": [5, 4], "windows": [0, 0]}}},
        {"more": 1},
    ],
)
def test_a_damaged_cache_plan_is_refused(calibrated, tmp_path, damage):
    model, calibration = calibrated
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    quantized.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache"].update(damage)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"kv_cache|quantsink_cache"):
        quantsink.load(tmp_path / "model")


def test_an_int8_model_reads_codes_on_its_own_routes(calibrated, token_ids, logits_of):
    model, calibration = calibrated
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, "w8a8")
    tokens = token_ids(batch=1, length=230)
    exact = logits_of(quantized, tokens, DynamicCache(config=quantized.config))
    cache = quantsink.SinkCache.from_calibration(quantized, calibration, bits=8)
    logits = logits_of(quantized, tokens, cache)
    assert (logits - exact).std() < 0.05 * exact.std()
