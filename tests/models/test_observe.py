"""Attention is observed for as long as a block runs, and the model is what it was afterwards."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from quantsink.models.observe import NAME, configs_of, intercepting


@torch.no_grad()
def test_only_the_chosen_module_is_replaced_and_only_in_the_block(tiny_llama):
    model = tiny_llama().train()
    ids = torch.arange(2, 20)[None]
    expected = model(ids).logits
    shapes = []

    def attend(module, query, key, value, mask, **options):
        shapes.append((tuple(query.shape), tuple(key.shape), options["scaling"]))
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    with intercepting(model, {model.model.layers[1].self_attn: attend}):
        assert not model.training
        assert {config._attn_implementation for config in configs_of(model)} == {NAME}
        observed = model(ids).logits
    assert shapes == [((1, 4, 18, 16), (1, 2, 18, 16), 0.25)]
    assert not torch.equal(observed, expected)
    assert torch.equal(model(ids).logits, expected)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_an_exception_restores_the_model_too(tiny_llama):
    def attend(*_, **__):
        raise KeyboardInterrupt

    model = tiny_llama()
    model.model.layers[0].train()
    with pytest.raises(KeyboardInterrupt), intercepting(model, {model.model.layers[0].self_attn: attend}):
        model(torch.arange(2, 9)[None])
    assert model.config._attn_implementation == "sdpa"
    assert [layer.training for layer in model.model.layers] == [True, False]


@torch.no_grad()
def test_falcon_calls_the_interface_in_the_block_only():
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=False)
    model = FalconForCausalLM(config).eval()
    module = model.transformer.h[0].self_attention
    called = []

    def attend(module, query, key, value, mask, **_):
        called.append(module)
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    attributes = set(vars(module))
    with intercepting(model, {module: attend}):
        model(torch.arange(2, 9)[None])
    assert called == [module]
    assert set(vars(module)) == attributes
    model(torch.arange(2, 9)[None])
    assert len(called) == 1
