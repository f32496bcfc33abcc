"""What a SinkCache refuses: other models, attentions and masks, gradients, interrupted passes."""

import pytest
import torch
from transformers import DynamicCache

import quantsink
from quantsink.errors import CacheError
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.inputs import cache_argument


def test_replacing_another_attention_is_logged(tiny_llama, caplog, cache_of):
    model = tiny_llama()
    model.set_attn_implementation("eager")
    cache_of(model)
    assert "'eager' becomes 'quantsink'" in caplog.text


def test_another_attention_is_refused_and_the_error_says_what_to_do(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="attn_implementation"):
        logits_of(model, token_ids(length=20), cache, [20])
    model.set_attn_implementation("quantsink")
    with pytest.raises(CacheError, match="reset"):
        logits_of(model, token_ids(length=20), cache, [20])
    cache.reset()
    assert torch.isfinite(logits_of(model, token_ids(length=20), cache, [20])).all()


def test_a_cache_of_another_model_is_refused(tiny_llama, plan_of, cache_of, token_ids, logits_of):
    model, twin = tiny_llama(), tiny_llama()
    cache = cache_of(model)
    twin.set_attn_implementation("quantsink")
    with pytest.raises(CacheError, match="another model"):
        logits_of(twin, token_ids(length=20), cache, [20])
    for other in (tiny_llama(num_hidden_layers=3), tiny_llama(num_key_value_heads=4), tiny_llama(head_dim=32)):
        other.set_attn_implementation("quantsink")
        with pytest.raises(CacheError):
            logits_of(other, token_ids(length=20), cache_of(model), [20])
    with pytest.raises(CacheError, match="another model"):
        SinkCache(tiny_llama(num_hidden_layers=3), plan_of(model))
    assert torch.isfinite(logits_of(model, token_ids(length=20), cache_of(model), [20])).all()


def test_a_model_that_shares_its_config_keeps_its_logits(tiny_llama, cache_of, token_ids, logits_of):
    first = tiny_llama()
    second = type(first)(first.config).eval()
    plain = logits_of(second, token_ids(), None, [230])
    logits_of(first, token_ids(), cache_of(first))
    assert torch.equal(logits_of(second, token_ids(), None, [230]), plain)
    exact = logits_of(second, token_ids(), DynamicCache(config=second.config))
    logits = logits_of(second, token_ids(), cache_of(second))
    assert (logits - exact).std() < 0.01 * exact.std()


def test_a_layer_that_was_not_updated_is_named(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    cache.layers[0].pending = None
    with pytest.raises(CacheError, match=r"layers\.1\.self_attn.*not updated"):
        logits_of(model, token_ids(batch=1, length=5), cache, [5])
    with pytest.raises(CacheError, match="2 layers"):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 2)


def test_an_interrupted_pass_is_refused_until_reset(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    tokens = token_ids()
    logits_of(model, tokens[:, :100], cache, [100])

    def fail(*_):
        raise MemoryError("planted")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    other = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        logits_of(model, tokens[:, 100:101], cache, [1])
    other.remove()
    handle.remove()
    with pytest.raises(CacheError, match="reset"):
        logits_of(model, tokens[:, 100:101], cache, [1])
    cache.reset()
    fresh = cache_of(model)
    assert torch.equal(logits_of(model, tokens, cache), logits_of(model, tokens, fresh))


def test_a_failure_while_codes_are_written_is_refused_until_reset(
    tiny_llama, monkeypatch, cache_of, token_ids, logits_of
):
    model = tiny_llama()
    cache = cache_of(model)

    def fail(*_):
        raise RuntimeError("planted: out of memory")

    monkeypatch.setattr("quantsink.cache.bank.encode", fail)
    with pytest.raises(RuntimeError, match="planted"):
        logits_of(model, token_ids(), cache, [230])
    monkeypatch.undo()
    with pytest.raises(CacheError, match="reset"):
        logits_of(model, token_ids(), cache, [230])
    cache.reset()
    assert torch.equal(logits_of(model, token_ids(), cache), logits_of(model, token_ids(), cache_of(model)))


@pytest.mark.parametrize("mask_kind", ["right padding", "a hole", "not causal"])
def test_other_masks_are_refused(tiny_llama, mask_kind, cache_of, token_ids):
    model = tiny_llama()
    mask = torch.ones(2, 230, dtype=torch.long)
    if mask_kind == "right padding":
        mask[1, 200:] = 0
    elif mask_kind == "a hole":
        mask[0, 50] = 0
    else:
        mask = torch.ones(2, 1, 230, 230, dtype=torch.bool)
    inputs = {"attention_mask": mask, cache_argument(model): cache_of(model)}
    with pytest.raises(CacheError, match="padded on the left"), torch.no_grad():
        model(token_ids(), **inputs)


def test_gradients_are_refused(tiny_llama, cache_of, token_ids):
    model = tiny_llama()
    with pytest.raises(quantsink.QuantSinkError, match="no_grad"):
        model(token_ids(), **{cache_argument(model): cache_of(model)})
