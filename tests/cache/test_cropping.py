"""Removing the newest tokens of a layer, exact ones and codes."""

import pytest
import torch

from quantsink.cache.layer import SinkLayer
from quantsink.errors import CacheError


@pytest.mark.parametrize("remove", [0, 1, 60, 64, 100, 190, 296, 299, 300, 1000])
def test_a_crop_keeps_the_rest_and_more_tokens_can_follow(remove, policy, tokens, feed, held):
    key, value = tokens(length=300)
    layer = feed(SinkLayer(policy((8, 8))), key, value, [300])
    before = held(layer)
    layer.crop(-remove)
    left = max(300 - remove, 0)
    assert layer.get_seq_length() == left
    for now, then in zip(held(layer), before, strict=True):
        assert torch.equal(now, then[:, :left])
    more = tokens(length=150, seed=1)
    feed(layer, *more, [150])
    for tensor, exact, new in zip(held(layer), (key, value), more, strict=True):
        assert tensor.shape[1] == left + 150
        assert (tensor - torch.cat([exact[:, :, :left], new], 2)[0]).abs().max() < 0.03


def test_padded_rows_are_cropped_to_their_own_length(policy, tokens, feed, held):
    key, value = tokens(length=300)
    layer = feed(SinkLayer(policy((8, 8))), key, value, [300], [0, 120])
    layer.crop(-150)
    assert held(layer, 0)[0].shape[1] == 150
    assert held(layer, 1)[0].shape[1] == 30
    assert (held(layer, 1)[0] - key[1, :, 120:150]).abs().max() < 0.03


def test_a_positive_number_is_refused(policy, tokens, feed):
    layer = feed(SinkLayer(policy()), *tokens(length=90), [90])
    with pytest.raises(ValueError, match="negative"):
        layer.crop(5)


def test_a_crop_is_exact_while_the_past_is_recorded(policy, tokens, feed, held):
    key, value = tokens(length=300)
    layer = feed(SinkLayer(policy()), key[:, :, :200], value[:, :, :200], [200])
    layer.activate_past_recording()
    feed(layer, key[:, :, 200:], value[:, :, 200:], [100])
    layer.crop(-90)
    assert torch.equal(held(layer)[0][:, -78:], key[0, :, 210 - 78 : 210])
    assert layer.used <= layer.policy.max_exact


def test_streaming_heads_allow_a_short_crop_and_refuse_a_long_one(policy, tokens, feed):
    key, value = tokens(length=600)
    layer = feed(SinkLayer(policy((4, 4), (0, 128))), key, value, [600])
    layer.crop(-60)
    view = layer.view()
    with pytest.raises(CacheError, match="dropped"):
        layer.crop(-100)
    assert torch.equal(layer.view().rows, view.rows)
    assert torch.equal(layer.view().key, view.key)
    assert layer.get_seq_length() == 540
