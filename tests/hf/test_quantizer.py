"""transformers loads a checkpoint through quantsink's quantizer."""

import copy
import dataclasses
import filecmp
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import logits, quantized
from transformers import AutoModelForCausalLM

from quantsink.checkpoint.save_load import load, save
from quantsink.recipe import Activations, Recipe

RECIPES = ["w8a16", "w8a8", "w8a8-static"]


def relative(result, expected):
    return float((result - expected).norm() / expected.norm())


def test_without_the_import_the_user_reads_what_to_import(tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    process = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode != 0
    assert "import quantsink" in process.stderr.splitlines()[-1]


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


def test_another_type_afterwards_leaves_the_tables_alone(tiny_llama, tokenizer, tmp_path):
    model = quantized(tiny_llama(), tokenizer).to(torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float32
    assert model.model.layers[0].self_attn.quantsink_table.key_mean.dtype == torch.float32
    save(model, tmp_path / "a")
    assert load(tmp_path / "a").dtype == torch.bfloat16
