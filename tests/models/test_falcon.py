"""Falcon's attention through the interface gives what its own code gives."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from quantsink.models.falcon import can_use_interface, interface_attributes
from quantsink.models.observe import intercepting

SHAPES = {
    "multi-query": {"multi_query": True, "new_decoder_architecture": False},
    "all heads": {"multi_query": False, "new_decoder_architecture": False},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def falcon(**changes):
    torch.manual_seed(0)
    options = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
    return FalconForCausalLM(FalconConfig(**(options | changes))).eval()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_the_interface_gives_the_models_own_logits(shape):
    model = falcon(**shape)
    ids = torch.arange(2, 40)[None]
    expected = model(ids).logits
    with intercepting(model, {}):
        torch.testing.assert_close(model(ids).logits, expected)


def test_reading_the_attributes_sets_none():
    model = falcon()
    names = [name for name, module, attributes in interface_attributes(model)]
    assert names == ["transformer.h.0.self_attention", "transformer.h.1.self_attention"]
    for _, module, attributes in interface_attributes(model):
        assert set(attributes) == {"forward", "num_key_value_groups"}
        assert not set(attributes) & set(vars(module))


def test_alibi_and_other_models_cannot_use_it(tiny_llama):
    assert can_use_interface(falcon())
    assert not can_use_interface(falcon(alibi=True))
    assert not can_use_interface(tiny_llama())
    assert list(interface_attributes(tiny_llama())) == []
