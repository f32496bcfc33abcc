"""A model with a cache plan makes its own `SinkCache`, and no other model does."""

import copy

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import quantsink
from quantsink.cache.layer import SinkLayer
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.inputs import cache_argument
from quantsink.recipe import KVCache, Recipe


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
