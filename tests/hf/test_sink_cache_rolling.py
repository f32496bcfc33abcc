"""Rolling SinkCaches: what stays, what is rotated, and which models can have one."""

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from quantsink.errors import ArchitectureError, CacheError
from quantsink.models.inputs import cache_argument


def test_a_rolling_cache_has_constant_size(tiny_llama, cache_of, token_ids):
    model = tiny_llama(max_position_embeddings=300)
    cache = cache_of(model, max_length=260)
    tokens = token_ids(batch=1, length=3000)
    sizes, at = [], 0
    with torch.no_grad():
        for _ in range(60):
            out = model(tokens[:, at : at + 50], **{cache_argument(model): cache})
            assert bool(out.logits.isfinite().all())
            at += 50
            sizes.append(cache.nbytes())
    assert cache.get_seq_length() == 3000
    assert len(set(sizes[10:])) == 1


def test_a_rolling_cache_computes_what_a_fresh_model_computes_over_the_kept_tokens(
    tiny_llama, monkeypatch, cache_of, token_ids, logits_of
):
    """With one layer keys depend only on token and position. So the logits of the next token are those of a fresh model
    over the sinks and the newest tokens, at the positions that they have in the cache."""
    model = tiny_llama(num_hidden_layers=1)
    tokens = token_ids(batch=1, length=900)
    cache = cache_of(model, max_length=260)
    logits_of(model, tokens[:, :899], cache, [99, *[50] * 16])
    layer, views = cache.layers[0], []
    commit = layer.commit
    monkeypatch.setattr(layer, "commit", lambda: (views.append((layer.view(), layer.rows[0].dropped)), commit()))
    with torch.no_grad():
        logits = model(tokens[:, 899:], **{cache_argument(model): cache}).logits[0, -1]
    (view, dropped), *_ = views
    sinks, newest, blocks = view.rows[0].tolist()
    newest += blocks * 64
    kept = torch.cat([tokens[:, :4], tokens[:, 900 - newest :]], 1)
    with torch.no_grad():
        expected = model(kept, use_cache=False).logits[0, -1]
    assert (sinks, dropped) == (4, 900 - 4 - newest)
    assert (logits - expected).std() < 0.01 * expected.std()


def test_a_padded_row_of_a_rolling_cache_has_the_logits_it_has_alone(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama(num_hidden_layers=1)
    tokens = token_ids(length=700)
    mask = torch.ones_like(tokens)
    mask[1, :200], tokens[1, :200] = 0, 1
    sizes = [250, *[50] * 9]
    together = logits_of(model, tokens, cache_of(model, max_length=400), sizes, mask)[1, 200:]
    alone = logits_of(model, tokens[1:, 200:], cache_of(model, max_length=400), [50, *[50] * 9])[0]
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


def test_padding_that_was_dropped_still_counts(tiny_llama, cache_of, token_ids):
    model = tiny_llama(num_hidden_layers=1)
    tokens = token_ids(length=60)
    mask = torch.ones_like(tokens)
    mask[1, :30], tokens[1, :30] = 0, 1
    inputs = {cache_argument(model): cache_of(model, max_length=260), "attention_mask": mask}
    out = model.generate(tokens, max_new_tokens=300, min_new_tokens=300, do_sample=False, **inputs)
    assert out.shape == (2, 360)
    alone = {cache_argument(model): cache_of(model, max_length=260)}
    other = model.generate(tokens[1:, 30:], max_new_tokens=300, min_new_tokens=300, do_sample=False, **alone)
    assert (out[1, 60:100] == other[0, 30:70]).all()


def test_keys_of_layers_without_positions_are_not_rotated(cache_of):
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=1, use_sliding_window=False,
        no_rope_layers=[0, 1], no_rope_layer_interval=2,
    )  # fmt: skip
    cache = cache_of(SmolLM3ForCausalLM(config).eval(), max_length=260)
    key = torch.randn(1, 2, 1, 16)
    assert torch.equal(cache.layers[0].rotate(key, 9), key)
    assert not torch.equal(cache.layers[1].rotate(key, 9), key)


def test_the_rotation_is_recognized_with_a_zero_padding_embedding(tiny_llama, cache_of):
    """The padding token's keys are zero, which every rotation leaves alone."""
    model = tiny_llama(pad_token_id=0)
    cache = cache_of(model, max_length=260)
    key = torch.randn(1, 2, 3, 16)
    assert not torch.equal(cache.layers[1].rotate(key, 64), key)


def test_fixed_rotary_positions_are_accepted(tiny_llama, tiny_gemma, cache_of):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    for model in (tiny_llama(), tiny_gemma(), tiny_llama(rope_parameters=yarn)):
        assert cache_of(model, max_length=260).get_max_length() == 260 or model.config.model_type.startswith("gemma")


def test_dynamic_rotary_positions_are_refused(tiny_llama, cache_of):
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ArchitectureError, match="dynamic"):
        cache_of(model, max_length=260)


def test_a_norm_after_the_rotation_is_refused(tiny_llama, cache_of):
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    class Normed(type(attention)):
        def forward(self, *args, **kwargs):
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is None:
                return forward(self, *args, **kwargs)
            update = cache.update
            weight = torch.linspace(0.5, 2, 16)
            cache.update = lambda key, value, *rest, **named: update(key * weight, value, *rest, **named)
            try:
                return forward(self, *args, **kwargs)
            finally:
                cache.update = update

    attention.__class__ = Normed
    with pytest.raises(ArchitectureError, match="layer 1"):
        cache_of(model, max_length=260)


def test_a_failed_constructor_restores_the_attention(tiny_llama, cache_of):
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ArchitectureError):
        cache_of(model, max_length=260)
    assert model.config._attn_implementation == "sdpa"


def test_a_prompt_longer_than_a_rolling_cache_is_refused(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model, max_length=260)
    with pytest.raises(CacheError, match="prefill_chunk_size"):
        logits_of(model, token_ids(length=400), cache, [400])
    assert torch.isfinite(logits_of(model, token_ids(length=20), cache_of(model), [20])).all()
