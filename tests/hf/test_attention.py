"""Quantized attention in a model: padding, caches, masks, and what it refuses."""

import copy

import pytest
import torch
from tiny import IDS, logits, quantized
from transformers import DynamicCache

from quantsink.errors import QuantSinkError
from quantsink.models.inputs import cache_argument

RECIPES = ["w8a16", "w8a8", "w8a8-static"]


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


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_a_static_cache_is_as_good_as_a_dynamic_one(family, tokenizer, request):
    model = quantized(request.getfixturevalue(family)(), tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    tokens = model.generate(IDS, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(tokens, model.generate(IDS, **options))


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
