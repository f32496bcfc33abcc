"""Quantize, save, load: bit for bit, strictly, whole or not at all."""

import copy
import dataclasses
import filecmp
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import quantsink
from quantsink.calibration import plan
from quantsink.checkpoint.save_load import load, save
from quantsink.errors import CalibrationError, CheckpointError, ModelError, QuantSinkError, UsageError
from quantsink.hf.convert import apply
from quantsink.kernels import Route
from quantsink.models.inputs import cache_argument
from quantsink.recipe import Activations, Attention, Recipe

IDS = torch.arange(2, 60)[None]
RECIPES = ["w8a16", "w8a8", "w8a8-static"]


def calibrated(model, tokenizer, **options):
    options = {"seq_len": 64, "max_tokens": 512, **options}
    return quantsink.calibrate(model, tokenizer, "builtin:prose", **options)


def quantized(model, tokenizer, recipe="w8a8"):
    return quantsink.quantize(model, calibrated(model, tokenizer), recipe)


def logits(model, ids=IDS, **arguments):
    with torch.no_grad():
        return model(ids, **arguments).logits


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reload_gives_the_same_bits(recipe, family, dtype, tokenizer, tmp_path, request):
    request.getfixturevalue(family)().save_pretrained(tmp_path / "original")
    # Not .to(dtype): that would round the rotary frequencies too, which no loaded model does.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=dtype)
    model = quantized(model, tokenizer, recipe)
    before = logits(model)
    save(model, tmp_path / "a", tokenizer=tokenizer, max_shard_size="20KB")
    for again in (load(tmp_path / "a"), AutoModelForCausalLM.from_pretrained(tmp_path / "a")):
        assert again.dtype == dtype
        assert torch.equal(logits(again), before)
    again.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    files = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert sum(name.endswith(".safetensors") for name in files) > 1
    _, different, missing = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", files, shallow=False)
    assert (different, missing) == ([], [])


def test_reload_in_a_fresh_process(tiny_llama, tokenizer, tmp_path):
    model = quantized(tiny_llama(), tokenizer)
    save(model, tmp_path / "a")
    torch.save(logits(model), tmp_path / "logits.pt")
    code = (
        "import sys, torch, quantsink; from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "with torch.no_grad(): found = model(torch.arange(2, 60)[None]).logits\n"
        "assert torch.equal(found, torch.load(sys.argv[2])), 'other logits'"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "a", tmp_path / "logits.pt"], check=True, cwd=tmp_path)


def test_without_the_import_the_user_reads_what_to_import(tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode != 0
    assert "import quantsink" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_are_stored_once(tied, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(tie_word_embeddings=tied), tokenizer), tmp_path / "a")
    names = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    again = load(tmp_path / "a")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_an_output_head_in_eight_bits_is_saved_beside_the_embedding(tied, recipe, family, tokenizer, tmp_path, request):
    original = request.getfixturevalue(family)(tie_word_embeddings=tied)
    recipe = dataclasses.replace(Recipe.load(recipe), output_head="int8")
    model = quantized(copy.deepcopy(original), tokenizer, recipe)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert torch.equal(embedding.weight, original.get_input_embeddings().weight)
    assert (head.weight.dtype, head.weight.shape) == (torch.int8, embedding.weight.shape)
    before = logits(model)
    assert torch.allclose(logits(model, logits_to_keep=1), before[:, -1:], atol=1e-5)
    save(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert {"lm_head.weight", "lm_head.weight_scale", "model.embed_tokens.weight"} <= tensors.keys()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["tie_word_embeddings"] is False
    for again in (load(tmp_path / "a"), AutoModelForCausalLM.from_pretrained(tmp_path / "a")):
        again.tie_weights()
        assert torch.equal(logits(again), before)
    again.save_pretrained(tmp_path / "b")
    assert filecmp.cmp(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors", shallow=False)
    bodies = quantized(copy.deepcopy(original), tokenizer, dataclasses.replace(recipe, output_head="native"))
    assert 0 < relative(before, logits(bodies)) < 0.02


def test_an_output_head_that_is_no_linear_layer_is_refused(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    before = logits(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(QuantSinkError, match="output_head: native"):
        apply(model, plan(calibration, Recipe(output_head="int8")))
    assert torch.equal(logits(model), before)


def test_the_last_row_of_a_prompt_keeps_no_strides_of_it(tiny_llama, tokenizer):
    """Or `torch.matmul` copies the head's weights at every prompt."""
    seen = []
    model = quantized(tiny_llama(), tokenizer)
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    logits(model, logits_to_keep=1)
    assert seen == [(48, 48, 1)]


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


def test_padding_on_the_left_changes_nothing(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    pads = 7
    alone = logits(model, IDS)
    batch = torch.cat([torch.ones(1, pads, dtype=torch.long), IDS], 1).repeat(2, 1)
    batch[1] = torch.arange(2, 2 + batch.shape[1])
    mask = torch.ones_like(batch)
    mask[0, :pads] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = logits(model, batch, attention_mask=mask, position_ids=positions)
    assert torch.allclose(together[:1, pads:], alone, atol=2e-4)


def test_decoding_follows_the_full_pass(tiny_llama, tokenizer):
    """INT8 scales of a block change as it fills, so decoding agrees to the error of 8 bits, not to the bit."""
    original = tiny_llama()
    model = quantized(copy.deepcopy(original), tokenizer)
    with torch.no_grad():
        cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        model(IDS[:, :40], **cache)
        steps = [model(IDS[:, i : i + 1], **cache).logits for i in range(40, IDS.shape[1])]
    whole = logits(model)[:, 40:]
    error = (whole - logits(original)[:, 40:]).square().mean().sqrt()
    assert (torch.cat(steps, 1) - whole).square().mean().sqrt() < 2 * error
    assert model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=1).shape == (1, 63)


def test_sliding_layers_decode_after_the_sink_has_left(tiny_gemma, tokenizer):
    original = tiny_gemma()
    model = quantized(copy.deepcopy(original), tokenizer)
    with torch.no_grad():
        cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        model(IDS[:, :50], **cache)
        step = model(IDS[:, 50:51], **cache).logits
    whole = logits(model, IDS[:, :51])[:, -1:]
    error = (whole - logits(original, IDS[:, :51])[:, -1:]).abs().max()
    assert (step - whole).abs().max() < 3 * error


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


def test_an_unquantized_model_is_not_saved_as_a_checkpoint(tiny_llama, tmp_path):
    with pytest.raises(UsageError, match="not quantized"):
        save(tiny_llama(), tmp_path / "a")


def tampered(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


SCALE = "model.layers.1.mlp.down_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(SCALE), f"{SCALE} is missing from model.safetensors"),
        (lambda t: t.update(extra=torch.zeros(3)), "extra in model.safetensors does not belong"),
        (lambda t: t.update({SCALE: torch.zeros(3)}), f"{SCALE} in model.safetensors is F32 [3]"),
        (lambda t: t.update({SCALE: t[SCALE].half()}), f"{SCALE} in model.safetensors is F16"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    ],
)
def test_missing_surplus_and_wrong_tensors_are_named(change, said, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    tampered(tmp_path / "a", change)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "a")
    assert said in str(error.value)
    with pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_a_truncated_shard_is_named(tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 99}, "format 99"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"sink_size": -1}, "damaged"),
        ({"linears": {"model.layers.7.mlp.up_proj": [0, 0]}}, "model.layers.7.mlp.up_proj"),
        ({"attentions": {"model.layers.0.self_attn": [4, 4, 16]}}, "model.layers.0.self_attn"),
        ({"recipe": {"weights": "int3"}}, "'int3'"),
    ],
)
def test_a_damaged_config_is_named(change, said, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "a")
    assert said in str(error.value)


def test_a_folder_that_is_no_checkpoint(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a quantsink checkpoint"):
        load(tmp_path / "a")


def test_another_type_on_request_leaves_the_codes_alone(tiny_llama, tokenizer, tmp_path):
    recipe = Recipe(activations=Activations(native_columns=0.1))
    save(quantized(tiny_llama(), tokenizer, recipe), tmp_path / "a")
    again = load(tmp_path / "a", dtype="bfloat16")
    layer = again.model.layers[0].mlp.up_proj
    assert (layer.weight.dtype, layer.weight_scale.dtype, layer.native_columns.dtype) == (
        torch.int8,
        torch.float32,
        torch.bfloat16,
    )
    assert bool(logits(again).isfinite().all())


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_a_static_cache_is_as_good_as_a_dynamic_one(family, tokenizer, request):
    model = quantized(request.getfixturevalue(family)(), tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    found = model.generate(IDS, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(found, model.generate(IDS, **options))


def test_prepared_masks_of_every_kind_show_the_padding(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    batch = torch.cat([torch.ones(1, 5, dtype=torch.long), IDS], 1)
    mask = torch.ones_like(batch)
    mask[:, :5] = 0
    visible = torch.ones(batch.shape[1], batch.shape[1], dtype=torch.bool).tril() & mask[0].bool()
    expected = logits(model, batch, attention_mask=mask)[:, 5:]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    for prepared in (visible[None, None], additive):
        assert torch.allclose(logits(model, batch, attention_mask=prepared)[:, 5:], expected, atol=1e-4)
    positional = model.model(batch, mask).last_hidden_state
    assert torch.allclose(model.lm_head(positional)[:, 5:], expected, atol=1e-4)


def test_massive_activations_do_not_overflow_float16(tiny_llama, tokenizer):
    model = tiny_llama()
    with torch.no_grad():
        for name in ("up_proj", "gate_proj"):
            getattr(model.model.layers[1].mlp, name).weight *= 15
        model.model.layers[1].mlp.down_proj.weight *= 0.001
    model = model.half()
    for recipe in RECIPES:
        copied = quantized(copy.deepcopy(model), tokenizer, recipe)
        assert bool(logits(copied).isfinite().all()), recipe


def test_another_type_afterwards_leaves_the_tables_alone(tiny_llama, tokenizer, tmp_path):
    model = quantized(tiny_llama(), tokenizer).to(torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float32
    assert model.model.layers[0].self_attn.quantsink_table.key_mean.dtype == torch.float32
    save(model, tmp_path / "a")
    assert load(tmp_path / "a").dtype == torch.bfloat16


def test_a_calibration_in_float32_serves_the_model_in_float16(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = calibrated(model, tokenizer)
    for dtype in (torch.float16, torch.bfloat16):
        quantsink.quantize(copy.deepcopy(model).to(dtype), calibration)
    other = copy.deepcopy(model)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(CalibrationError, match="not those of the calibrated"):
        quantsink.quantize(other, calibration)


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


def test_layers_called_alone_raise_also_after_a_forward_pass(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    logits(model)
    with pytest.raises(QuantSinkError, match="call the model"), torch.no_grad():
        model.model.layers[0].mlp(torch.randn(1, IDS.shape[1], 48))


def test_there_is_no_gradient_rather_than_a_wrong_one(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    assert not model(IDS).logits.requires_grad
    embedded = model.get_input_embeddings()(IDS).requires_grad_(True)
    with pytest.raises(QuantSinkError, match="no gradient"):
        model(inputs_embeds=embedded)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.0.mlp.down_proj.weight_scale", -1.0),
        ("model.layers.0.mlp.down_proj.weight_scale", torch.nan),
        ("model.layers.0.mlp.down_proj.native_column_index", -1),
        ("model.layers.0.mlp.down_proj.native_column_index", 9999),
        ("model.layers.0.self_attn.quantsink_table.routes", 9),
        ("model.layers.0.self_attn.quantsink_table.key_mean", torch.inf),
    ],
)
def test_values_that_cannot_be_right_are_named(name, value, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    tampered(tmp_path / "a", lambda tensors: tensors[name].view(-1)[:1].fill_(value))
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "a")


def test_weights_that_are_not_finite_are_named(tiny_llama, tokenizer):
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        calibrated(model, tokenizer)
