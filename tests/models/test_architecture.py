import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from quantsink.errors import ArchitectureError
from quantsink.models.architecture import Architecture


def test_llama_with_grouped_queries(tiny_llama):
    architecture = Architecture.of(tiny_llama(num_attention_heads=8, num_key_value_heads=2))
    assert [(layer.heads, layer.kv_heads, layer.head_dim) for layer in architecture.attentions] == [(8, 2, 16)] * 2
    assert [architecture.attentions[0].kv_head(head) for head in (0, 1, 3, 4, 6)] == [0, 0, 0, 1, 1]
    assert architecture.decoder == "model"
    assert len(architecture.linears) == 14
    assert "lm_head" not in architecture.linears


def test_head_size_is_independent_of_the_hidden_size(tiny_llama):
    layer = Architecture.of(tiny_llama(hidden_size=40, head_dim=24)).attentions[0]
    assert layer.head_dim == 24


def test_gemma3(tiny_gemma):
    architecture = Architecture.of(tiny_gemma())
    assert (
        architecture.attentions[3].heads,
        architecture.attentions[3].kv_heads,
        architecture.attentions[3].head_dim,
    ) == (4, 1, 32)


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=64, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4)
    with pytest.raises(ArchitectureError, match="encoder-decoder"):
        Architecture.of(T5ForConditionalGeneration(config))


def test_no_language_model():
    with pytest.raises(ArchitectureError, match="not a transformers"):
        Architecture.of(torch.nn.Linear(2, 2))


def test_a_module_that_contradicts_the_config(tiny_llama):
    model = tiny_llama()
    model.config.num_attention_heads = 8
    with pytest.raises(ArchitectureError, match="its config says 8"):
        Architecture.of(model)


def test_an_adapted_projection(tiny_llama):
    class Adapted(torch.nn.Linear):
        pass

    model = tiny_llama()
    model.model.layers[1].self_attn.v_proj = Adapted(48, 32)
    with pytest.raises(ArchitectureError, match=r"layers\.1\.self_attn\.v_proj is a Adapted"):
        Architecture.of(model)


def test_attention_that_bypasses_the_interface():
    with pytest.raises(ArchitectureError, match="bloom: its attention does not go through"):
        Architecture.of(BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)))
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    with pytest.raises(ArchitectureError, match="falcon: its attention does not go through"):
        Architecture.of(FalconForCausalLM(config))
