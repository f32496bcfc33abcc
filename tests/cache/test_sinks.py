"""Sink tokens, and how a rolling layer rotates them."""

import torch

from quantsink.cache.layer import SinkLayer
from quantsink.cache.sinks import SinkTokens
from quantsink.kernels.coded_attention.codes import BLOCK


def test_rows_of_different_lengths_each_rotate_their_own_sinks(policy, tokens):
    key, value = tokens(batch=2, length=600)
    starts = [0, 200]
    rolling = policy(max_length=300)
    together, alone = (SinkLayer(rolling, rotate=lambda keys, shift: keys + shift) for _ in range(2))
    at = 0
    for size in [250, *[1] * 350]:
        together.update(key[:, :, at : at + size], value[:, :, at : at + size])
        together.begin(None, starts)
        columns = slice(max(at, 200), max(at + size, 200))
        if columns.stop > columns.start:
            alone.update(key[1:, :, columns], value[1:, :, columns])
            alone.begin(None, None)
            if together.view().rows[1, 0]:
                assert torch.equal(together.view().sink_key[1], alone.view().sink_key[0])
            alone.commit()
        together.commit()
        at += size
    assert together.rows[1].dropped == alone.rows[0].dropped > 0


def test_a_rolling_layer_has_constant_size_and_rotates_its_sinks(policy, tokens):
    key, value = tokens(batch=1, length=3000)
    layer = SinkLayer(policy(max_length=300), rotate=lambda keys, shift: keys + shift)
    sizes = []
    for at in range(0, 3000, 20):
        layer.update(key[:, :, at : at + 20], value[:, :, at : at + 20])
        layer.begin(None, None)
        view = layer.view()
        assert int(view.rows[0, 0] + view.rows[0, 1] + view.rows[0, 2] * BLOCK) <= 300
        layer.commit()
        sizes.append(sum(x.numel() for x in layer.tensors()))
    assert layer.get_seq_length() == 3000
    assert max(sizes[20:]) == min(sizes[20:])
    count = layer.policy.sink_size + layer.view().rows[0, 2] * BLOCK + layer.view().rows[0, 1]
    assert layer.rows[0].dropped == 3000 - int(count)
    assert torch.equal(layer.view().sink_key, key[:, :, :4] + layer.rows[0].dropped)
    assert torch.equal(layer.sinks.key, key[:, :, :4])


def test_only_the_given_rows_are_stored(tokens):
    key, value = tokens(batch=3, length=4)
    sinks = SinkTokens()
    sinks.store(key, value, [0, 2])
    assert torch.equal(sinks.key[[0, 2]], key[[0, 2]])
    assert torch.equal(sinks.value[[0, 2]], value[[0, 2]])
    assert not sinks.key[1].any()


def test_keys_are_always_rotated_from_the_originals(tokens):
    key, value = tokens(length=4)
    sinks = SinkTokens()
    sinks.turn([3, 3], [0, 0], None)  # nothing is stored yet
    sinks.store(key, value, [0, 1])
    assert sinks.visible_key is sinks.key
    rotated = []

    def rotate(keys, shift):
        rotated.append(keys)
        return keys + shift

    sinks.turn([64, 0], [0, 0], rotate)
    sinks.turn([128, 0], [64, 0], rotate)
    assert all(torch.equal(keys, key[:1]) for keys in rotated)
    assert len(rotated) == 2
    assert torch.equal(sinks.visible_key, torch.stack([key[0] + 128, key[1]]))
    assert torch.equal(sinks.key, key)
