"""`quantization_config` is read strictly."""

import json

import pytest
from tiny import quantized

from quantsink.checkpoint.save_load import load, save
from quantsink.errors import CheckpointError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format 99"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"sink_size": -1}, "damaged"),
        ({"linears": {"model.layers.7.mlp.up_proj": [0, 0]}}, "model.layers.7.mlp.up_proj"),
        ({"attentions": {"model.layers.0.self_attn": [4, 4, 16]}}, "model.layers.0.self_attn"),
        ({"recipe": {"weights": "int3"}}, "'int3'"),
    ],
)
def test_a_damaged_config_is_named(change, message, tiny_llama, tokenizer, tmp_path):
    save(quantized(tiny_llama(), tokenizer), tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "a")
    assert message in str(error.value)
