"""Sizes that are worked out against those of filled layers."""

import dataclasses

import pytest

from quantsink.cache.layer import SinkLayer
from quantsink.cache.size import LayerBytes, layer_bytes, total


@pytest.mark.parametrize("length", [1, 131, 132, 700])
@pytest.mark.parametrize(
    "options",
    [{}, {"bits": (8, 2)}, {"windows": (0, 128)}, {"sinks": 0, "residual": 100}],
    ids=["plain", "widths", "streaming", "no sinks"],
)
def test_sizes_are_those_of_a_filled_layer(policy, tokens, feed, options, length):
    layer = feed(SinkLayer(policy(**options)), *tokens(batch=1, length=length), [length])
    size = layer_bytes(layer.policy, length)
    sinks, newest, *counts = layer.view().rows[0].tolist()
    blocks = zip(layer.banks, counts, strict=True)
    assert size.codes == sum(count * len(bank.heads) * bank.record.nbytes for bank, count in blocks)
    assert size.exact == (sinks + newest) * 2 * 2 * 32 * 4
    assert size.full == length * 2 * 2 * 32 * 4
    assert size.all == size.codes + size.exact


def test_a_rolling_layer_stops_growing(policy):
    rolling = policy(max_length=400)
    assert layer_bytes(rolling, 400).all == layer_bytes(rolling, 4000).all
    assert layer_bytes(rolling, 4000).full == 10 * layer_bytes(rolling, 400).full


def test_a_sliding_layer_keeps_one_token_less_than_its_window(policy):
    sliding = dataclasses.replace(policy(), bits=(), windows=(150,), itemsize=2)
    assert layer_bytes(sliding, 1000) == LayerBytes(0, 149 * 2 * 2 * 32 * 2, 149 * 2 * 2 * 32 * 2)
    assert layer_bytes(sliding, 10).all == 10 * 2 * 2 * 32 * 2


def test_layers_add_up():
    assert total([LayerBytes(1, 2, 3), LayerBytes(10, 20, 30)]) == LayerBytes(11, 22, 33)
