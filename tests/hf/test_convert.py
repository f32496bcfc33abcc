"""A plan is checked before it is applied, and applied exactly."""

import copy
import dataclasses

import pytest
import torch
from tiny import calibrated, logits

import quantsink
from quantsink.calibration import plan
from quantsink.checkpoint.save_load import load, save
from quantsink.errors import ModelError, QuantSinkError
from quantsink.hf.convert import apply
from quantsink.kernels import Route
from quantsink.recipe import Attention, Recipe


def test_an_output_head_that_is_no_linear_layer_is_refused(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    before = logits(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(QuantSinkError, match="output_head: native"):
        apply(model, plan(calibration, Recipe(output_head="int8")))
    assert torch.equal(logits(model), before)


def test_native_heads_are_exact_slices(tiny_llama, tokenizer, tmp_path):
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=2)
    original = copy.deepcopy(model)
    recipe = Recipe(attention=Attention(native_heads=5))
    calibration = calibrated(model, tokenizer)
    decided = plan(calibration, recipe)
    quantsink.quantize(model, calibration, recipe)
    for index, name in enumerate(decided.attentions):
        native = [h for h, route in enumerate(decided.attentions[name].routes) if route is Route.NATIVE]
        groups = sorted({h * 2 // 8 for h in native})
        new, old = model.get_submodule(name), original.get_submodule(name)
        rows = [h * 16 + i for h in native for i in range(16)]
        kv_rows = [g * 16 + i for g in groups for i in range(16)]
        for projection, expected in (("q_proj", rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            layer = getattr(new, projection)
            assert (layer.native_row_index.tolist() if layer.shape.rows else []) == expected, index
            if expected:
                assert torch.equal(layer.native_rows, getattr(old, projection).weight[expected])
        if native:
            assert set(rows) <= set(new.o_proj.native_column_index.tolist())
    assert decided.count(Route.NATIVE) == 5


def test_quantizing_twice_is_refused(tiny_llama, tokenizer, tmp_path):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    quantsink.quantize(model, calibration)
    save(model, tmp_path / "a")
    for again in (model, load(tmp_path / "a")):
        with pytest.raises(ModelError, match="already quantized"):
            quantsink.quantize(again, calibration)
        with pytest.raises(ModelError, match="already quantized"):
            calibrated(again, tokenizer)


def test_a_failed_quantization_changes_nothing(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    decided = plan(calibration, "w8a8")
    last = list(decided.linears)[-1]
    for broken in (
        dataclasses.replace(decided.linears[last], native_columns=(10**6,)),
        dataclasses.replace(decided.linears[last], input_scale=float("nan")),
    ):
        linears = {**decided.linears, last: broken}
        with pytest.raises(QuantSinkError, match="calibrate this model again"):
            apply(model, dataclasses.replace(decided, linears=linears))
    with pytest.raises(QuantSinkError, match=r"model\.norm"):
        apply(model, dataclasses.replace(decided, linears={**decided.linears, "model.norm": decided.linears[last]}))
    assert torch.equal(logits(model), logits(tiny_llama()))
