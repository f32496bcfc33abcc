"""A SinkCache from a calibration, in a recipe and in a checkpoint."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import quantsink
from quantsink.cache.layer import SinkLayer
from quantsink.errors import CheckpointError, RecipeError
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.inputs import cache_argument
from quantsink.recipe import KVCache, Recipe


@pytest.fixture(scope="module")
def calibrated(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.1, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return model, quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=300, max_tokens=2400)


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


def test_a_loaded_model_makes_its_own_cache(calibrated, tmp_path, token_ids):
    model, calibration = calibrated
    recipe = Recipe(kv_cache=KVCache(bits=4))
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, recipe)
    quantized.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = token_ids(batch=1, length=200)
    for either in (quantized, loaded):
        with torch.no_grad():
            out = either(tokens)
        cache = getattr(out, cache_argument(either))
        assert isinstance(cache, SinkCache)
        assert cache.plan == quantized.kv_cache_plan
        assert all(isinstance(layer, SinkLayer) for layer in cache.layers)
        answer = either.generate(tokens, max_new_tokens=5, return_dict_in_generate=True, do_sample=False)
        assert isinstance(getattr(answer, cache_argument(either)), SinkCache)
        passed = DynamicCache(config=either.config)
        either.generate(tokens, max_new_tokens=5, do_sample=False, **{cache_argument(either): passed})
        assert passed.get_seq_length() == 204
        with torch.no_grad():
            assert getattr(either(tokens, use_cache=False), cache_argument(either)) is None
    generated = [
        either.generate(tokens, max_new_tokens=20, do_sample=False)
        for either in (quantized, loaded, copy.deepcopy(loaded))
    ]
    assert torch.equal(generated[0], generated[1])
    assert torch.equal(generated[0], generated[2])
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()


def test_a_loaded_model_with_another_attention_makes_an_ordinary_cache(calibrated, tmp_path, token_ids):
    model, calibration = calibrated
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    quantized.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded.set_attn_implementation("sdpa")
    out = loaded.generate(token_ids(batch=1), max_new_tokens=3, return_dict_in_generate=True, do_sample=False)
    assert type(getattr(out, cache_argument(loaded))) is DynamicCache
    assert loaded.config._attn_implementation == "sdpa"


def test_a_model_that_makes_a_cache_scores_text_padded_on_the_right(calibrated, token_ids):
    model, calibration = calibrated
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    tokens, mask = token_ids(length=100), torch.ones(2, 100, dtype=torch.long)
    mask[1, 80:] = 0
    with torch.no_grad():
        logits = quantized(tokens, attention_mask=mask).logits
        assert torch.equal(logits, quantized(tokens, attention_mask=mask, use_cache=False).logits)


def test_a_recipe_with_only_a_cache_leaves_the_model_unquantized(calibrated, tmp_path, token_ids):
    model, calibration = calibrated
    recipe = Recipe.from_dict(
        {"weights": "native", "activations": {"kind": "native", "native_columns": 0.0, "sink_rows": "plain"},
         "attention": {"kind": "native", "sinks": "none"}, "kv_cache": {"bits": 8}}
    )  # fmt: skip
    assert Recipe.from_json(recipe.to_json()) == recipe
    quantized = quantsink.quantize(copy.deepcopy(model), calibration, recipe)
    quantsink.save(quantized, tmp_path / "model")
    loaded = quantsink.load(tmp_path / "model")
    tokens = token_ids(batch=1, length=200)
    with torch.no_grad():
        assert torch.equal(loaded(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
        assert isinstance(getattr(loaded(tokens), cache_argument(loaded)), SinkCache)


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
