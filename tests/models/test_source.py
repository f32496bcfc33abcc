"""MODEL is found without loading anything, and what it cannot be is said in one line."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig

from quantsink.errors import ModelError, UsageError
from quantsink.models.source import check_length, check_vocabulary, find, model_class, shard_names


@pytest.fixture
def folder(tiny_llama, tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_loaded_in_eval_mode_with_its_tokenizer(folder):
    source = find(str(folder))
    model = source.model()
    assert not model.training
    assert model.dtype == torch.float32
    assert source.model("bfloat16").dtype == torch.bfloat16
    assert source.tokenizer().bos_token == "<s>"
    assert source.notes == ()
    assert [file.name for file in source.weight_files()] == sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.gguf", r"no such \.gguf file"), ("a/b/c", "neither a folder"), ("not an id", "neither a folder")],
)
def test_what_cannot_be_a_model(name, message):
    with pytest.raises(ModelError, match=message):
        find(name)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"the folder has no config\.json"):
        find(str(tmp_path))


def test_a_hub_id_is_only_named(tmp_path):
    assert find("HuggingFaceTB/SmolLM2-135M").root == "HuggingFaceTB/SmolLM2-135M"


def test_an_unknown_type_and_a_device_that_is_not_there(folder):
    source = find(str(folder))
    with pytest.raises(UsageError, match="--dtype int4: not one of auto, float32, bfloat16, float16"):
        source.dtype("int4")
    with pytest.raises(UsageError, match="--device nowhere"):
        source.model(device="nowhere")


def test_a_missing_tensor_is_named(folder):
    index = folder / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    (folder / shard).unlink()
    with pytest.raises(ModelError, match=f"{shard} is not there; fetch the model again"):
        find(str(folder)).model()


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "x.bin", ""])
def test_an_index_names_files_beside_it_only(name, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="no file beside it"):
        shard_names(index)
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    assert shard_names(index) == ["1.safetensors", "2.safetensors"]


def test_an_encoder_is_loaded_by_its_own_class():
    assert model_class(LlamaConfig(architectures=["LlamaForCausalLM"])) is AutoModelForCausalLM
    assert model_class(LlamaConfig()) is AutoModelForCausalLM
    assert model_class(BertConfig(architectures=["BertModel"])) is BertModel


def test_texts_and_windows_that_do_not_fit_the_model(tiny_llama):
    model = tiny_llama()
    check_length(model, 512, "--length")
    with pytest.raises(UsageError, match="--length 513: the model takes at most 512 tokens"):
        check_length(model, 513, "--length")
    check_vocabulary(model, 257)
    with pytest.raises(ModelError, match="token id 258 from the tokenizer, the model has 258"):
        check_vocabulary(model, 258)
