"""SinkCache in `generate`: greedy search, beams, sampling and assisted decoding."""

import pytest
import torch

from quantsink.models.inputs import cache_argument


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"num_beams": 2, "num_return_sequences": 2}, {"prefill_chunk_size": 50}],
    ids=["greedy", "beams", "two of two beams", "prompt in chunks"],
)
def test_generate_gives_the_tokens_of_an_unquantized_cache(tiny_llama, options, cache_of, token_ids, generate):
    model = tiny_llama()
    tokens = token_ids(length=150)
    assert torch.equal(generate(model, tokens, cache_of(model), **options), generate(model, tokens, **options))


def test_sampling_several_sequences(tiny_llama, cache_of, token_ids):
    """Everything is exact at first: codes change probabilities a little, and with them some of the samples."""
    model = tiny_llama()
    tokens = token_ids(batch=1, length=150)
    options = {"max_new_tokens": 70, "do_sample": True, "num_return_sequences": 3, "top_k": 5}
    samples = []
    for inputs in ({}, {cache_argument(model): cache_of(model, residual=500)}):
        torch.manual_seed(0)
        samples.append(model.generate(tokens, **options, **inputs))
    assert torch.equal(*samples)
    sample = model.generate(tokens, **options, **{cache_argument(model): cache_of(model)})
    assert sample.shape == (3, 220)


def test_assisted_decoding_gives_the_tokens_of_plain_decoding(tiny_llama, cache_of, token_ids, generate):
    model, assistant = tiny_llama(), tiny_llama(seed=1)
    tokens = token_ids(batch=1, length=150)
    cache = cache_of(model)
    expected = generate(model, tokens)
    assert torch.equal(generate(model, tokens, cache, assistant_model=assistant), expected)
    assert torch.equal(generate(model, tokens, cache_of(model), assistant_model=model), expected)
