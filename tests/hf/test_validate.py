"""Tensors of a checkpoint that are missing, surplus, damaged or impossible are named before anything is computed."""

import pytest
import torch
from tiny import quantized, tampered
from transformers import AutoModelForCausalLM

from quantsink.checkpoint.save_load import load, save
from quantsink.errors import CheckpointError

SCALE = "model.layers.1.mlp.down_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), f"{SCALE} is missing from model.safetensors"),
        (lambda t: t.update(extra=torch.zeros(3)), "extra in model.safetensors does not belong"),
        (lambda t: t.update({SCALE: torch.zeros(3)}), f"{SCALE} in model.safetensors is F32 [3]"),
        (lambda t: t.update({SCALE: t[SCALE].half()}), f"{SCALE} in model.safetensors is F16"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    ],
)
def test_missing_surplus_and_wrong_tensors_are_named(change, message, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    tampered(tmp_path / "a", change)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "a")
    assert message in str(error.value)
    with pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_a_truncated_shard_is_named(tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        load(tmp_path / "a")


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
