"""Placeholders for cached keys on their way through the model."""

import pytest
import torch

from quantsink.cache.layer import SinkLayer
from quantsink.errors import CacheError


def test_a_placeholder_has_a_shape_and_no_data(policy, tokens):
    layer = SinkLayer(policy())
    key, value = tokens()
    placeholder, _ = layer.update(key, value)
    assert placeholder.shape == key.shape
    assert placeholder.dtype == key.dtype
    for use in (
        lambda: placeholder + 1,
        lambda: torch.cat([placeholder, key]),
        lambda: placeholder @ key.mT,
        lambda: placeholder.sum(),
    ):
        with pytest.raises(CacheError, match="attn_implementation"):
            use()


def test_a_placeholder_knows_its_layer_and_the_length_of_the_cache(policy, tokens, feed):
    layer = feed(SinkLayer(policy()), *tokens(), [200])
    key, value = tokens(length=3)
    for placeholder in layer.update(key, value):
        assert placeholder.layer is layer
        assert tuple(placeholder.shape) == (2, 2, 203, 32)
