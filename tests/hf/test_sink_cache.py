"""SinkCache in transformers: every way to generate, padding, chunks, sliding layers, reload, and what it refuses."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import quantsink
from quantsink.cache.layer import SinkLayer
from quantsink.errors import ArchitectureError, CacheError, CheckpointError, RecipeError
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.architecture import Architecture
from quantsink.models.inputs import cache_argument
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache, Recipe

SIZES = [100, 32, 32, 32, *[1] * 34]


def plan(model, bits=8, sinks=4, residual=64, max_length=None, window=0):
    options = KVCache(sink_size=sinks, residual=residual, rounding="nearest", max_length=max_length)
    layers = [layer for layer in Architecture.of(model).attentions if layer.window is None]
    return CachePlan(
        options,
        {layer.name: (bits,) * layer.kv_heads for layer in layers},
        {layer.name: (window,) * layer.kv_heads for layer in layers},
    )


def cache_of(model, **options):
    return SinkCache(model, plan(model, **options))


def ids(batch=2, length=230, seed=0):
    return torch.randint(2, 258, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, tokens, cache=None, sizes=SIZES, mask=None):
    """Logits `[B, L, V]`, fed in pieces; positions count real tokens."""
    found, at = [], 0
    for size in sizes:
        end = at + size
        given = {}
        if mask is not None:
            positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, at:end]
            given = {"attention_mask": mask[:, :end], "position_ids": positions}
        found.append(model(tokens[:, at:end], **{cache_argument(model): cache}, **given).logits)
        at = end
    assert at == tokens.shape[1]
    return torch.cat(found, 1)


def generate(model, tokens, cache=None, **options):
    given = {} if cache is None else {cache_argument(model): cache}
    return model.generate(tokens, max_new_tokens=70, min_new_tokens=70, do_sample=False, **given, **options)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_logits_are_those_of_an_unquantized_cache_up_to_eight_bits(family, request):
    model = request.getfixturevalue(family)()
    tokens = ids()
    expected = logits(model, tokens, DynamicCache(config=model.config))
    errors = {}
    for bits in (8, 4, 2):
        found = logits(model, tokens, cache_of(model, bits=bits))
        errors[bits] = float((found - expected).std() / expected.std())
        assert (found - expected)[:, :132].abs().max() < 1e-4
    assert 0 < errors[8] < 0.01
    assert errors[8] < errors[4] < errors[2]


@pytest.mark.parametrize("sizes", [[230], [1] * 230, [64] * 3 + [38], [229, 1]])
def test_what_follows_does_not_depend_on_how_the_prompt_was_fed(tiny_llama, sizes):
    """One layer: keys and values do not depend on attention. They still differ in their last bits, as products of one
    row and of many do, and now and then a code does; test_cache_layer.py has the same tensors and the same codes."""
    model = tiny_llama(num_hidden_layers=1)
    tokens, after = ids(), ids(length=5, seed=1)
    reference, cache = cache_of(model, bits=4), cache_of(model, bits=4)
    logits(model, tokens, reference, [230])
    logits(model, tokens, cache, sizes)
    for mine, other in zip(cache.layers[0].banks, reference.layers[0].banks, strict=True):
        assert (mine.data[:, :, :2] == other.data[:, :, :2]).float().mean() > 0.98
    found, expected = logits(model, after, cache, [1] * 5), logits(model, after, reference, [5])
    assert (found - expected).std() < 2e-3 * expected.std()


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"num_beams": 2, "num_return_sequences": 2}, {"prefill_chunk_size": 50}],
    ids=["greedy", "beams", "two of two beams", "prompt in chunks"],
)
def test_generate_says_what_it_says_with_an_unquantized_cache(tiny_llama, options):
    model = tiny_llama()
    tokens = ids(length=150)
    assert torch.equal(generate(model, tokens, cache_of(model), **options), generate(model, tokens, **options))


def test_sampling_and_several_sequences(tiny_llama):
    """With everything exact: codes change probabilities a little, and now and then what is drawn."""
    model = tiny_llama()
    tokens = ids(batch=1, length=150)
    options = {"max_new_tokens": 70, "do_sample": True, "num_return_sequences": 3, "top_k": 5}
    found = []
    for given in ({}, {cache_argument(model): cache_of(model, residual=500)}):
        torch.manual_seed(0)
        found.append(model.generate(tokens, **options, **given))
    assert torch.equal(*found)
    found = model.generate(tokens, **options, **{cache_argument(model): cache_of(model)})
    assert found.shape == (3, 220)


def test_assisted_decoding_crops_and_goes_on(tiny_llama):
    model, assistant = tiny_llama(), tiny_llama(seed=1)
    tokens = ids(batch=1, length=150)
    cache = cache_of(model)
    expected = generate(model, tokens)
    assert torch.equal(generate(model, tokens, cache, assistant_model=assistant), expected)
    assert torch.equal(generate(model, tokens, cache_of(model), assistant_model=model), expected)


def test_a_text_alone_and_padded_beside_others(tiny_llama):
    model = tiny_llama()
    tokens = ids(batch=8)
    starts = [0, 90, 3, 64, 150, 1, 200, 40]
    mask = torch.ones_like(tokens)
    for row, start in enumerate(starts):
        mask[row, :start] = 0
        tokens[row, :start] = 1
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= 50  # an outlier in another row
    tokens[2, 50:60] = 7
    together = logits(model, tokens, cache_of(model, bits=4), mask=mask)
    for row, start in enumerate(starts):
        sizes = [n for n in _rest(SIZES, start) if n]
        alone = logits(model, tokens[row : row + 1, start:], cache_of(model, bits=4), sizes)
        torch.testing.assert_close(together[row, start:], alone[0], atol=2e-4, rtol=0)


def _rest(sizes, start):
    """The same passes, without what lies before `start`."""
    at = 0
    for size in sizes:
        yield max(0, at + size - max(start, at))
        at += size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(tiny_llama, dtype):
    model = tiny_llama().to(dtype)
    tokens = ids()
    expected = logits(model, tokens, DynamicCache(config=model.config)).float()
    found = logits(model, tokens, cache_of(model)).float()
    assert (found - expected).std() < 0.05 * expected.std()


def test_prefix_reuse_copies_the_cache(tiny_llama):
    model = tiny_llama()
    prefix = cache_of(model)
    logits(model, ids(length=150), prefix, [150])
    mine = copy.deepcopy(prefix)
    more = ids(length=80, seed=3)
    torch.testing.assert_close(logits(model, more, mine, [80]), logits(model, more, prefix, [80]))


def test_sliding_layers_have_their_own_policy(tiny_gemma):
    model = tiny_gemma()
    cache = cache_of(model)
    assert [policy.kind for policy in cache.policies] == ["window", "codes"] * 2
    assert cache.is_sliding == [True, False] * 2
    logits(model, ids(), cache)
    assert cache.layers[0].keys.shape[2] == model.config.sliding_window - 1
    assert [row.blocks for row in cache.layers[1].rows] == [2, 2]
    assert cache.get_seq_length() == 230


def test_bytes_are_those_of_its_tensors_and_few(tiny_llama):
    model = tiny_llama(head_dim=64)
    cache, exact = cache_of(model, bits=4), DynamicCache(config=model.config)
    assert cache.nbytes() == 0
    tokens = ids(batch=1, length=4000)
    model.config.max_position_embeddings = 8192
    logits(model, tokens, cache, [4000])
    logits(model, tokens, exact, [4000])
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    found = {id(x): x for x in _tensors(cache)}
    assert cache.nbytes() == sum(x.nbytes for x in found.values())
    # float32: 4.5 of 32 bits, and 131 exact columns of 4,000.
    assert cache.nbytes() < full * (4.5 / 32 + 132 / 4000 + 0.005)
    assert cache.bits_per_number == 4.5


def _tensors(cache):
    """Every tensor that hangs on a cache's layers and banks, found without its help; small index tables apart."""
    for layer in cache.layers:
        for value in [*vars(layer).values(), *vars(layer.sinks).values(), *(bank.data for bank in layer.banks)]:
            if isinstance(value, torch.Tensor) and value is not layer.heads:
                yield value


def test_a_rolling_cache_runs_on_in_constant_memory(tiny_llama):
    model = tiny_llama(max_position_embeddings=300)
    cache = cache_of(model, max_length=260)
    tokens = ids(batch=1, length=3000)
    sizes, at = [], 0
    with torch.no_grad():
        for _ in range(60):
            out = model(tokens[:, at : at + 50], **{cache_argument(model): cache})
            assert bool(out.logits.isfinite().all())
            at += 50
            sizes.append(cache.nbytes())
    assert cache.get_seq_length() == 3000
    assert len(set(sizes[10:])) == 1


def test_a_rolled_cache_is_one_that_never_saw_the_rest(tiny_llama, monkeypatch):
    """One layer, so keys depend on nothing but token and position: what a rolled cache computes for the next token is
    what a fresh model computes over sinks and newest tokens at the positions they have in the cache."""
    model = tiny_llama(num_hidden_layers=1)
    tokens = ids(batch=1, length=900)
    cache = cache_of(model, max_length=260)
    logits(model, tokens[:, :899], cache, [99, *[50] * 16])
    layer, seen = cache.layers[0], []
    commit = layer.commit
    monkeypatch.setattr(layer, "commit", lambda: (seen.append((layer.view(), layer.rows[0].dropped)), commit()))
    with torch.no_grad():
        found = model(tokens[:, 899:], **{cache_argument(model): cache}).logits[0, -1]
    (view, dropped), *_ = seen
    sinks, newest, blocks = view.rows[0].tolist()
    newest += blocks * 64
    kept = torch.cat([tokens[:, :4], tokens[:, 900 - newest :]], 1)
    with torch.no_grad():
        expected = model(kept, use_cache=False).logits[0, -1]
    assert (sinks, dropped) == (4, 900 - 4 - newest)
    assert (found - expected).std() < 0.01 * expected.std()


def test_rolling_rows_padded_on_the_left_roll_as_they_would_alone(tiny_llama):
    model = tiny_llama(num_hidden_layers=1)
    tokens = ids(length=700)
    mask = torch.ones_like(tokens)
    mask[1, :200], tokens[1, :200] = 0, 1
    sizes = [250, *[50] * 9]
    together = logits(model, tokens, cache_of(model, max_length=400), sizes, mask)[1, 200:]
    alone = logits(model, tokens[1:, 200:], cache_of(model, max_length=400), [50, *[50] * 9])[0]
    torch.testing.assert_close(together, alone, atol=2e-4, rtol=0)


NOPE = {"no_rope_layers": [0, 1], "no_rope_layer_interval": 2}


def test_layers_without_positions_roll_without_turning():
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=1, use_sliding_window=False, **NOPE,
    )  # fmt: skip
    cache = cache_of(SmolLM3ForCausalLM(config).eval(), max_length=260)
    key = torch.randn(1, 2, 1, 16)
    assert torch.equal(cache.layers[0].rotate(key, 9), key)
    assert not torch.equal(cache.layers[1].rotate(key, 9), key)


def test_a_norm_after_the_rotation_cannot_roll(tiny_llama):
    model = tiny_llama()
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward

    class Normed(type(attention)):
        def forward(self, *args, **given):
            cache = given.get("cache", given.get("past_key_values"))
            if cache is None:
                return forward(self, *args, **given)
            keep = cache.update
            weight = torch.linspace(0.5, 2, 16)
            cache.update = lambda key, value, *rest, **named: keep(key * weight, value, *rest, **named)
            try:
                return forward(self, *args, **given)
            finally:
                cache.update = keep

    attention.__class__ = Normed
    with pytest.raises(ArchitectureError, match="layer 1"):
        cache_of(model, max_length=260)


def test_padding_that_has_left_a_rolling_cache_is_remembered(tiny_llama):
    model = tiny_llama(num_hidden_layers=1)
    tokens = ids(length=60)
    mask = torch.ones_like(tokens)
    mask[1, :30], tokens[1, :30] = 0, 1
    given = {cache_argument(model): cache_of(model, max_length=260), "attention_mask": mask}
    out = model.generate(tokens, max_new_tokens=300, min_new_tokens=300, do_sample=False, **given)
    assert out.shape == (2, 360)
    alone = {cache_argument(model): cache_of(model, max_length=260)}
    other = model.generate(tokens[1:, 30:], max_new_tokens=300, min_new_tokens=300, do_sample=False, **alone)
    assert (out[1, 60:100] == other[0, 30:70]).all()


def test_a_padding_token_does_not_hide_the_rotation(tiny_llama):
    """Its embedding is zero, and so are its keys."""
    model = tiny_llama(pad_token_id=0)
    cache = cache_of(model, max_length=260)
    key = torch.randn(1, 2, 3, 16)
    assert not torch.equal(cache.layers[1].rotate(key, 64), key)


@pytest.mark.parametrize("options", [{"max_length": 260}, {"window": 128}, {}])
def test_cropped_to_nothing_it_starts_again(tiny_llama, options):
    model = tiny_llama()
    cache = cache_of(model, **options)
    tokens = ids(length=700)
    logits(model, tokens, cache, [100, *[60] * 10])
    cache.crop(-700)
    assert cache.get_seq_length() == 0
    again = logits(model, tokens[:, :200], cache, [100, 50, 50])
    assert torch.equal(again, logits(model, tokens[:, :200], cache_of(model, **options), [100, 50, 50]))


@pytest.mark.parametrize("options", [{"max_length": 260}, {"window": 128}, {}])
def test_inference_mode_in_the_middle(tiny_llama, options):
    model = tiny_llama()
    tokens, found = ids(length=700), []
    for inside in (False, True):
        cache = cache_of(model, **options)
        logits(model, tokens[:, :100], cache, [100])
        with torch.inference_mode(inside), torch.no_grad():
            for at in range(100, 500):
                model(tokens[:, at : at + 1], **{cache_argument(model): cache})
        found.append(logits(model, tokens[:, 500:], cache, [1] * 200))
    assert torch.equal(*found)


def test_a_copy_and_a_finished_pass_hold_no_mask(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model)
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[1, :20], tokens[1, :20] = 0, 1
    logits(model, tokens, cache, [230], mask)
    assert cache.layers[0].pass_mask.mask is None
    mine = copy.deepcopy(cache)
    assert mine.layers[0].pass_mask is mine.layers[1].pass_mask is not cache.layers[0].pass_mask


def test_a_failed_constructor_leaves_the_model_as_it_was(tiny_llama):
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ArchitectureError):
        cache_of(model, max_length=260)
    assert model.config._attn_implementation == "sdpa"


def test_a_crop_that_one_layer_refuses_crops_none(tiny_llama, tiny_gemma):
    model = tiny_llama()
    bits = {"model.layers.0.self_attn": (4, 4), "model.layers.1.self_attn": (4, 4)}
    options = KVCache(sink_size=4, rounding="nearest")
    cache = SinkCache(model, CachePlan(options, bits, {"model.layers.1.self_attn": (128, 0)}))
    logits(model, ids(length=400), cache, [400])
    with pytest.raises(CacheError, match=r"layers\.1"):
        cache.crop(-200)
    assert [layer.get_seq_length() for layer in cache.layers] == [400, 400]
    cache.crop(-20)
    assert cache.get_seq_length() == 380
    model = tiny_gemma()
    cache = cache_of(model)
    logits(model, ids(length=100), cache, [100])
    with pytest.raises(CacheError, match="window has moved on"):
        cache.crop(-10)
    assert {layer.get_seq_length() for layer in cache.layers} == {100}


def test_pickle_keeps_what_is_cached(tiny_llama):
    import pickle

    model = tiny_llama()
    cache = cache_of(model)
    logits(model, ids(), cache)
    again = pickle.loads(pickle.dumps(cache))
    more = ids(length=3, seed=5)
    assert torch.equal(logits(model, more, again, [3]), logits(model, more, cache, [3]))
    with pytest.raises(CacheError, match="pickled"):
        pickle.dumps(cache_of(model, max_length=260))


def test_autocast_gives_keys_and_values_two_types(tiny_llama):
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, ids(), cache_of(model)).float()
        expected = logits(model, ids(), DynamicCache(config=model.config)).float()
    assert (found - expected).std() < 0.05 * expected.std()


def test_another_attention_that_was_asked_for_is_mentioned(tiny_llama, caplog):
    model = tiny_llama()
    model.set_attn_implementation("eager")
    cache_of(model)
    assert "'eager' becomes 'quantsink'" in caplog.text


def test_a_prompt_longer_than_a_rolling_cache_is_refused_before_work(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model, max_length=260)
    with pytest.raises(CacheError, match="prefill_chunk_size"):
        logits(model, ids(length=400), cache, [400])
    assert torch.isfinite(logits(model, ids(length=20), cache_of(model), [20])).all()


def test_positions_that_do_not_add_up_cannot_roll(tiny_llama):
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ArchitectureError, match="dynamic"):
        cache_of(model, max_length=260)


def test_rotations_of_every_rotary_kind_add_up(tiny_llama, tiny_gemma):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    for model in (tiny_llama(), tiny_gemma(), tiny_llama(rope_parameters=yarn)):
        assert cache_of(model, max_length=260).get_max_length() == 260 or model.config.model_type.startswith("gemma")


# ---- what it refuses


def test_another_attention_says_what_to_do(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model)
    model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="attn_implementation"):
        logits(model, ids(length=20), cache, [20])
    model.set_attn_implementation("quantsink")
    with pytest.raises(CacheError, match="reset"):
        logits(model, ids(length=20), cache, [20])
    cache.reset()
    assert torch.isfinite(logits(model, ids(length=20), cache, [20])).all()


def test_a_cache_of_another_model(tiny_llama):
    mine, twin = tiny_llama(), tiny_llama()
    cache = cache_of(mine)
    twin.set_attn_implementation("quantsink")
    with pytest.raises(CacheError, match="another model"):
        logits(twin, ids(length=20), cache, [20])
    for other in (tiny_llama(num_hidden_layers=3), tiny_llama(num_key_value_heads=4), tiny_llama(head_dim=32)):
        other.set_attn_implementation("quantsink")
        with pytest.raises(CacheError):
            logits(other, ids(length=20), cache_of(mine), [20])
    with pytest.raises(CacheError, match="another model"):
        SinkCache(tiny_llama(num_hidden_layers=3), plan(mine))
    assert torch.isfinite(logits(mine, ids(length=20), cache_of(mine), [20])).all()


def test_two_models_that_share_a_config(tiny_llama):
    first = tiny_llama()
    second = type(first)(first.config).eval()
    plain = logits(second, ids(), None, [230])
    logits(first, ids(), cache_of(first))
    assert torch.equal(logits(second, ids(), None, [230]), plain)
    exact = logits(second, ids(), DynamicCache(config=second.config))
    found = logits(second, ids(), cache_of(second))
    assert (found - exact).std() < 0.01 * exact.std()


def test_a_layer_that_was_never_updated_is_named(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model)
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    cache.layers[0].pending = None
    with pytest.raises(CacheError, match=r"layers\.1\.self_attn.*not updated"):
        logits(model, ids(batch=1, length=5), cache, [5])
    with pytest.raises(CacheError, match="2 layers"):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 2)


def test_an_error_in_the_middle_of_a_pass_is_noticed_and_the_model_goes_on(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model)
    tokens = ids()
    logits(model, tokens[:, :100], cache, [100])

    def fail(*_):
        raise MemoryError("planted")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    other = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        logits(model, tokens[:, 100:101], cache, [1])
    other.remove()
    handle.remove()
    with pytest.raises(CacheError, match="reset"):
        logits(model, tokens[:, 100:101], cache, [1])
    cache.reset()
    fresh = cache_of(model)
    assert torch.equal(logits(model, tokens, cache), logits(model, tokens, fresh))


def test_a_failure_while_codes_are_written_is_noticed(tiny_llama, monkeypatch):
    model = tiny_llama()
    cache = cache_of(model)

    def fail(*_):
        raise RuntimeError("planted: out of memory")

    monkeypatch.setattr("quantsink.cache.bank.encode", fail)
    with pytest.raises(RuntimeError, match="planted"):
        logits(model, ids(), cache, [230])
    monkeypatch.undo()
    with pytest.raises(CacheError, match="reset"):
        logits(model, ids(), cache, [230])
    cache.reset()
    assert torch.equal(logits(model, ids(), cache), logits(model, ids(), cache_of(model)))


@pytest.mark.parametrize("kind", ["right padding", "a hole", "not causal"])
def test_masks_that_it_cannot_keep(tiny_llama, kind):
    model = tiny_llama()
    mask = torch.ones(2, 230, dtype=torch.long)
    if kind == "right padding":
        mask[1, 200:] = 0
    elif kind == "a hole":
        mask[0, 50] = 0
    else:
        mask = torch.ones(2, 1, 230, 230, dtype=torch.bool)
    given = {"attention_mask": mask, cache_argument(model): cache_of(model)}
    with pytest.raises(CacheError, match="padded on the left"), torch.no_grad():
        model(ids(), **given)


def test_gradients_are_refused(tiny_llama):
    model = tiny_llama()
    with pytest.raises(quantsink.QuantSinkError, match="no_grad"):
        model(ids(), **{cache_argument(model): cache_of(model)})


def test_a_cache_keeps_no_model_alive(tiny_llama):
    model = tiny_llama()
    cache = cache_of(model)
    logits(model, ids(), cache)
    ghost = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert ghost() is None
    assert cache.nbytes() > 0


# ---- from a calibration, in a recipe, in a checkpoint


@pytest.fixture(scope="module")
def calibrated(tokenizer):
    torch.manual_seed(0)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.1, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return model, quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=300, max_tokens=2400)


def test_widths_average_to_what_was_asked(calibrated):
    model, calibration = calibrated
    for bits in (2, 2.5, 3, 4, 5, 6, 8):
        cache = quantsink.SinkCache.from_calibration(model, calibration, bits=bits)
        uniform = bits + 32 * (1 / 64 + 1 / 32) / 2
        assert cache.bits_per_number == pytest.approx(uniform, rel=0.05 if bits > 2 else 0.02)
        assert cache.bits_per_number <= uniform * 1.02
    control = quantsink.SinkCache.from_calibration(model, calibration, bits=4, widths="random", seed=1)
    measured = quantsink.SinkCache.from_calibration(model, calibration, bits=4)
    assert control.bits_per_number == pytest.approx(measured.bits_per_number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "from 2 to 8"),
        ({"bits": "4"}, "from 2 to 8"),
        ({"bits": 4.5, "widths": "uniform"}, "uniform"),
        ({"widths": "best"}, "measured, uniform, random"),
        ({"sink_size": -1}, "0 or more"),
        ({"stream": "on"}, "auto, off"),
        ({"stream": 0}, "auto, off"),
        ({"max_length": 100}, "at least"),
    ],
)
def test_options_that_cannot_be_meant(calibrated, options, message):
    model, calibration = calibrated
    with pytest.raises(RecipeError, match=message):
        quantsink.SinkCache.from_calibration(model, calibration, **options)


def test_a_folder_is_not_a_calibration(calibrated):
    with pytest.raises(RecipeError, match=r"Calibration\.load"):
        quantsink.SinkCache.from_calibration(calibrated[0], "calibration")


def test_a_loaded_model_makes_its_own_cache(calibrated, tmp_path):
    model, calibration = calibrated
    recipe = Recipe(kv_cache=KVCache(bits=4))
    made = quantsink.quantize(copy.deepcopy(model), calibration, recipe)
    made.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = ids(batch=1, length=200)
    for one in (made, loaded):
        with torch.no_grad():
            out = one(tokens)
        cache = getattr(out, cache_argument(one))
        assert isinstance(cache, SinkCache)
        assert cache.plan == made.kv_cache_plan
        assert all(isinstance(layer, SinkLayer) for layer in cache.layers)
        answer = one.generate(tokens, max_new_tokens=5, return_dict_in_generate=True, do_sample=False)
        assert isinstance(getattr(answer, cache_argument(one)), SinkCache)
        given = DynamicCache(config=one.config)
        one.generate(tokens, max_new_tokens=5, do_sample=False, **{cache_argument(one): given})
        assert given.get_seq_length() == 204
        with torch.no_grad():
            assert getattr(one(tokens, use_cache=False), cache_argument(one)) is None
    words = [one.generate(tokens, max_new_tokens=20, do_sample=False) for one in (made, loaded, copy.deepcopy(loaded))]
    assert torch.equal(words[0], words[1])
    assert torch.equal(words[0], words[2])
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()


def test_a_loaded_model_with_another_attention_makes_an_ordinary_cache(calibrated, tmp_path):
    model, calibration = calibrated
    made = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    made.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded.set_attn_implementation("sdpa")
    out = loaded.generate(ids(batch=1), max_new_tokens=3, return_dict_in_generate=True, do_sample=False)
    assert type(getattr(out, cache_argument(loaded))) is DynamicCache
    assert loaded.config._attn_implementation == "sdpa"


def test_a_model_with_a_cache_of_its_own_scores_text_padded_on_the_right(calibrated):
    model, calibration = calibrated
    made = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    tokens, mask = ids(length=100), torch.ones(2, 100, dtype=torch.long)
    mask[1, 80:] = 0
    with torch.no_grad():
        found = made(tokens, attention_mask=mask).logits
        assert torch.equal(found, made(tokens, attention_mask=mask, use_cache=False).logits)


def test_what_is_left_of_the_bits_is_spent():
    from quantsink.calibration.cache_plan import choose_widths
    from quantsink.calibration.records import KVHead

    def real(count, bits):
        heads = [
            KVHead(0, n, False, tuple(0.9**n * 2.0**-width for width in (8, 4, 3, 2)), None, {}) for n in range(count)
        ]
        widths = choose_widths(heads, bits, "measured", 0, 64)
        return (sum(widths.values()) / count + 0.5) / (bits + 0.5)

    for bits in (2.5, 3, 4, 4.5, 5, 6, 7):
        assert 0.98 <= real(30, bits) <= 1.02
        assert 0.98 <= real(90, bits) <= 1.02


def test_a_recipe_can_be_a_cache_and_nothing_else(calibrated, tmp_path):
    model, calibration = calibrated
    recipe = Recipe.from_dict(
        {"weights": "native", "activations": {"kind": "native", "native_columns": 0.0, "sink_rows": "plain"},
         "attention": {"kind": "native", "sinks": "none"}, "kv_cache": {"bits": 8}}
    )  # fmt: skip
    assert Recipe.from_json(recipe.to_json()) == recipe
    made = quantsink.quantize(copy.deepcopy(model), calibration, recipe)
    quantsink.save(made, tmp_path / "model")
    loaded = quantsink.load(tmp_path / "model")
    tokens = ids(batch=1, length=200)
    with torch.no_grad():
        assert torch.equal(loaded(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
        assert isinstance(getattr(loaded(tokens), cache_argument(loaded)), SinkCache)


@pytest.mark.parametrize(
    "damage",
    [
        {"sinks": -1},
        {"layers": {}},
        {"layers": {"model.layers.0.self_attn": {"bits": [5, 4], "windows": [0, 0]}}},
        {"more": 1},
    ],
)
def test_a_damaged_cache_plan_is_refused(calibrated, tmp_path, damage):
    import json

    model, calibration = calibrated
    made = quantsink.quantize(copy.deepcopy(model), calibration, Recipe(kv_cache=KVCache(bits=4)))
    made.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache"].update(damage)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"kv_cache|quantsink_cache"):
        quantsink.load(tmp_path / "model")


def test_an_int8_model_reads_codes_with_its_own_routes(calibrated):
    model, calibration = calibrated
    made = quantsink.quantize(copy.deepcopy(model), calibration, "w8a8")
    tokens = ids(batch=1, length=230)
    exact = logits(made, tokens, DynamicCache(config=made.config))
    cache = quantsink.SinkCache.from_calibration(made, calibration, bits=8)
    found = logits(made, tokens, cache)
    assert (found - exact).std() < 0.05 * exact.std()
