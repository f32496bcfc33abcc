"""SinkCache in transformers: its logits, padding, types, sliding layers, size, crops and copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache

from quantsink.errors import CacheError
from quantsink.hf.sink_cache import SinkCache
from quantsink.models.inputs import cache_argument
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_fewer_bits_give_logits_further_from_those_of_an_unquantized_cache(
    family, request, cache_of, token_ids, logits_of
):
    model = request.getfixturevalue(family)()
    tokens = token_ids()
    expected = logits_of(model, tokens, DynamicCache(config=model.config))
    errors = {}
    for bits in (8, 4, 2):
        logits = logits_of(model, tokens, cache_of(model, bits=bits))
        errors[bits] = float((logits - expected).std() / expected.std())
        assert (logits - expected)[:, :132].abs().max() < 1e-4
    assert 0 < errors[8] < 0.01
    assert errors[8] < errors[4] < errors[2]


@pytest.mark.parametrize("sizes", [[230], [1] * 230, [64] * 3 + [38], [229, 1]])
def test_chunking_the_prompt_does_not_change_later_logits(tiny_llama, sizes, cache_of, token_ids, logits_of):
    """With one layer keys and values do not depend on attention. They differ in their last bits all the same, because
    products of one row and of many rows do, and so do a few codes. tests/cache/test_layer.py compares exact codes."""
    model = tiny_llama(num_hidden_layers=1)
    tokens, after = token_ids(), token_ids(length=5, seed=1)
    reference, cache = cache_of(model, bits=4), cache_of(model, bits=4)
    logits_of(model, tokens, reference, [230])
    logits_of(model, tokens, cache, sizes)
    for bank, expected in zip(cache.layers[0].banks, reference.layers[0].banks, strict=True):
        assert (bank.data[:, :, :2] == expected.data[:, :, :2]).float().mean() > 0.98
    logits, expected = logits_of(model, after, cache, [1] * 5), logits_of(model, after, reference, [5])
    assert (logits - expected).std() < 2e-3 * expected.std()


SIZES = [100, 32, 32, 32, *[1] * 34]


def test_a_padded_row_has_the_logits_it_has_alone(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    tokens = token_ids(batch=8)
    starts = [0, 90, 3, 64, 150, 1, 200, 40]
    mask = torch.ones_like(tokens)
    for row, start in enumerate(starts):
        mask[row, :start] = 0
        tokens[row, :start] = 1
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= 50  # an outlier in another row
    tokens[2, 50:60] = 7
    together = logits_of(model, tokens, cache_of(model, bits=4), mask=mask)
    for row, start in enumerate(starts):
        sizes = [n for n in _passes_from(SIZES, start) if n]
        alone = logits_of(model, tokens[row : row + 1, start:], cache_of(model, bits=4), sizes)
        torch.testing.assert_close(together[row, start:], alone[0], atol=2e-4, rtol=0)


def _passes_from(sizes, start):
    """The same passes without the tokens before `start`."""
    at = 0
    for size in sizes:
        yield max(0, at + size - max(start, at))
        at += size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(tiny_llama, dtype, cache_of, token_ids, logits_of):
    model = tiny_llama().to(dtype)
    tokens = token_ids()
    expected = logits_of(model, tokens, DynamicCache(config=model.config)).float()
    logits = logits_of(model, tokens, cache_of(model)).float()
    assert (logits - expected).std() < 0.05 * expected.std()


def test_autocast(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(model, token_ids(), cache_of(model)).float()
        expected = logits_of(model, token_ids(), DynamicCache(config=model.config)).float()
    assert (logits - expected).std() < 0.05 * expected.std()


def test_sliding_layers_keep_their_window_exact(tiny_gemma, cache_of, token_ids, logits_of):
    model = tiny_gemma()
    cache = cache_of(model)
    assert [policy.kind for policy in cache.policies] == ["window", "codes"] * 2
    assert cache.is_sliding == [True, False] * 2
    logits_of(model, token_ids(), cache)
    assert cache.layers[0].keys.shape[2] == model.config.sliding_window - 1
    assert [row.blocks for row in cache.layers[1].rows] == [2, 2]
    assert cache.get_seq_length() == 230


def test_nbytes_counts_every_tensor(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama(head_dim=64)
    cache, exact = cache_of(model, bits=4), DynamicCache(config=model.config)
    assert cache.nbytes() == 0
    tokens = token_ids(batch=1, length=4000)
    model.config.max_position_embeddings = 8192
    logits_of(model, tokens, cache, [4000])
    logits_of(model, tokens, exact, [4000])
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in exact.layers)
    tensors = {id(x): x for x in _tensors(cache)}
    assert cache.nbytes() == sum(x.nbytes for x in tensors.values())
    # float32: 4.5 of 32 bits, and 131 exact columns of 4,000.
    assert cache.nbytes() < full * (4.5 / 32 + 132 / 4000 + 0.005)
    assert cache.bits_per_number == 4.5


def _tensors(cache):
    """Every tensor of a cache's layers, sinks and banks, except the small index tables."""
    for layer in cache.layers:
        for value in [*vars(layer).values(), *vars(layer.sinks).values(), *(bank.data for bank in layer.banks)]:
            if isinstance(value, torch.Tensor) and value is not layer.heads:
                yield value


@pytest.mark.parametrize("options", [{"max_length": 260}, {"window": 128}, {}])
def test_inference_mode_can_begin_and_end_between_passes(tiny_llama, options, cache_of, token_ids, logits_of):
    model = tiny_llama()
    tokens, logits = token_ids(length=700), []
    for inside in (False, True):
        cache = cache_of(model, **options)
        logits_of(model, tokens[:, :100], cache, [100])
        with torch.inference_mode(inside), torch.no_grad():
            for at in range(100, 500, 20):
                model(tokens[:, at : at + 20], **{cache_argument(model): cache})
        logits.append(logits_of(model, tokens[:, 500:], cache, [1] * 10 + [19] * 10))
    assert torch.equal(*logits)


@pytest.mark.parametrize("options", [{"max_length": 260}, {"window": 128}, {}])
def test_a_cache_cropped_to_nothing_starts_again(tiny_llama, options, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model, **options)
    tokens = token_ids(length=700)
    logits_of(model, tokens, cache, [100, *[60] * 10])
    cache.crop(-700)
    assert cache.get_seq_length() == 0
    again = logits_of(model, tokens[:, :200], cache, [100, 50, 50])
    assert torch.equal(again, logits_of(model, tokens[:, :200], cache_of(model, **options), [100, 50, 50]))


def test_a_crop_that_one_layer_refuses_changes_no_layer(tiny_llama, tiny_gemma, cache_of, token_ids, logits_of):
    model = tiny_llama()
    bits = {"model.layers.0.self_attn": (4, 4), "model.layers.1.self_attn": (4, 4)}
    options = KVCache(sink_size=4, rounding="nearest")
    cache = SinkCache(model, CachePlan(options, bits, {"model.layers.1.self_attn": (128, 0)}))
    logits_of(model, token_ids(length=400), cache, [400])
    with pytest.raises(CacheError, match=r"layers\.1"):
        cache.crop(-200)
    assert [layer.get_seq_length() for layer in cache.layers] == [400, 400]
    cache.crop(-20)
    assert cache.get_seq_length() == 380
    model = tiny_gemma()
    cache = cache_of(model)
    logits_of(model, token_ids(length=100), cache, [100])
    with pytest.raises(CacheError, match="window has moved on"):
        cache.crop(-10)
    assert {layer.get_seq_length() for layer in cache.layers} == {100}


def test_a_copied_prefix_cache_gives_the_same_logits(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    prefix = cache_of(model)
    logits_of(model, token_ids(length=150), prefix, [150])
    copied = copy.deepcopy(prefix)
    more = token_ids(length=80, seed=3)
    torch.testing.assert_close(logits_of(model, more, copied, [80]), logits_of(model, more, prefix, [80]))


def test_a_finished_pass_and_a_copy_hold_no_mask(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    tokens = token_ids()
    mask = torch.ones_like(tokens)
    mask[1, :20], tokens[1, :20] = 0, 1
    logits_of(model, tokens, cache, [230], mask)
    assert cache.layers[0].pass_mask.mask is None
    copied = copy.deepcopy(cache)
    assert copied.layers[0].pass_mask is copied.layers[1].pass_mask is not cache.layers[0].pass_mask


def test_a_pickled_cache_gives_the_same_logits(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    logits_of(model, token_ids(), cache)
    again = pickle.loads(pickle.dumps(cache))
    more = token_ids(length=3, seed=5)
    assert torch.equal(logits_of(model, more, again, [3]), logits_of(model, more, cache, [3]))
    with pytest.raises(CacheError, match="pickled"):
        pickle.dumps(cache_of(model, max_length=260))


def test_a_cache_does_not_keep_its_model_alive(tiny_llama, cache_of, token_ids, logits_of):
    model = tiny_llama()
    cache = cache_of(model)
    logits_of(model, token_ids(), cache)
    attention = weakref.ref(model.model.layers[0].self_attn)
    del model
    gc.collect()
    assert attention() is None
    assert cache.nbytes() > 0
