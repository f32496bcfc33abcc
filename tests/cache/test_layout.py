"""What a plan says of each layer of a model."""

import pytest

from quantsink.cache.layout import LayerPolicy
from quantsink.errors import CacheError
from quantsink.models.head_layout import AttentionLayer, HeadSlices
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

PLAN = CachePlan(KVCache(sink_size=4), {"a": (8, 4)}, {"a": (0, 128)})


def attention(name="a", kv_heads=2, window=None):
    slices = HeadSlices.even("x", kv_heads, 32)
    return AttentionLayer(name, 3, 4, kv_heads, 32, 32, slices, slices, slices, slices, window)


def test_a_full_attention_layer_keeps_codes():
    policy = LayerPolicy.of(attention(), PLAN, 2)
    assert (policy.kind, policy.name, policy.index, policy.kv_heads, policy.head_dim) == ("codes", "a", 3, 2, 32)
    assert (policy.bits, policy.windows) == ((8, 4), (0, 128))
    assert policy.max_exact == 4 + 64 + 63
    assert policy.bits_per_number == 6 + 32 * (1 / 64 + 1 / 32) / 2


def test_a_sliding_layer_keeps_its_window_exact():
    policy = LayerPolicy.of(attention("b", window=150), PLAN, 2)
    assert (policy.kind, policy.bits, policy.windows, policy.bits_per_number) == ("window", (), (150,), 16)


def test_without_windows_every_head_keeps_all_tokens():
    policy = LayerPolicy.of(attention(), CachePlan(KVCache(sink_size=4), {"a": (8, 4)}), 2)
    assert policy.windows == (0, 0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(attention("b"), "b: no plan where the model has 2"), (attention(kv_heads=4), "a: a plan for 2 KV heads")],
)
def test_a_plan_for_another_model_is_refused(layer, message):
    with pytest.raises(CacheError, match=message):
        LayerPolicy.of(layer, PLAN, 2)
