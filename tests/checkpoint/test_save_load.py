"""Quantize, save, load: bit for bit, strictly, whole or not at all."""

import filecmp
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import logits, quantized
from transformers import AutoModelForCausalLM

from quantsink.checkpoint.save_load import load, save
from quantsink.errors import CheckpointError, UsageError

RECIPES = ["w8a16", "w8a8", "w8a8-static"]


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
        "with torch.no_grad(): logits = model(torch.arange(2, 60)[None]).logits\n"
        "assert torch.equal(logits, torch.load(sys.argv[2])), 'other logits'"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "a", tmp_path / "logits.pt"], check=True, cwd=tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_are_stored_once(tied, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(tie_word_embeddings=tied), tokenizer), tmp_path / "a")
    names = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    again = load(tmp_path / "a")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied


def test_an_unquantized_model_is_not_saved_as_a_checkpoint(tiny_llama, tmp_path):
    with pytest.raises(UsageError, match="not quantized"):
        save(tiny_llama(), tmp_path / "a")


SCALE = "model.layers.1.mlp.down_proj.weight_scale"


def test_a_folder_that_is_no_checkpoint(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a quantsink checkpoint"):
        load(tmp_path / "a")


def relative(result, expected):
    return float((result - expected).norm() / expected.norm())
