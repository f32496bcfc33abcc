"""One layer of a SinkCache: the same codes however tokens arrive, exact tokens, rows, streaming heads, refusals."""

import pytest
import torch

from quantsink.cache.layer import SinkLayer
from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK

SPLITS = {
    "32, then one by one": [32, *[1] * 168],
    "one block": [200],
    "chunks": [50, 70, 80],
    "almost all, then one": [199, 1],
    "hardly any, then the rest": [3, 1, 1, 195],
}


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 2), (3, 2)])
def test_codes_do_not_depend_on_how_tokens_arrive(bits, policy, tokens, feed, held):
    key, value = tokens()
    layers = {name: feed(SinkLayer(policy(bits)), key, value, sizes) for name, sizes in SPLITS.items()}
    first = layers["one block"]
    assert [row.blocks for row in first.rows] == [2, 2]
    for name, layer in layers.items():
        assert layer.rows == first.rows
        for bank, expected in zip(layer.banks, first.banks, strict=True):
            assert torch.equal(bank.data[:, :, :2], expected.data[:, :, :2]), name
        for tensor, expected in zip(held(layer), held(first), strict=True):
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("residual", [0, 64, 100])
def test_sinks_and_newest_tokens_are_exact_at_every_length(sinks, residual, policy, tokens, held):
    key, value = tokens(batch=1, length=330)
    layer = SinkLayer(policy(sinks=sinks, residual=residual))
    for length in range(1, 331):
        layer.update(key[:, :, length - 1 : length], value[:, :, length - 1 : length])
        layer.begin(None, None)
        layer.commit()
        assert layer.get_seq_length() == length
        for tensor, exact in zip(held(layer), (key, value), strict=True):
            assert tensor.shape[1] == length
            assert torch.equal(tensor[:, :sinks], exact[0, :, : min(sinks, length)])
            newest = min(residual, length)
            assert torch.equal(tensor[:, length - newest :], exact[0, :, length - newest : length])
        full = length - layer.rows[0].blocks * BLOCK
        assert full < sinks + residual + BLOCK


def test_the_error_of_a_number_is_bounded_by_its_width(policy, tokens, feed, held):
    key, value = tokens()
    for bits, bound in ((8, 0.02), (4, 0.4), (3, 0.9), (2, 2.0)):
        layer = feed(SinkLayer(policy((bits, bits))), key, value, [200])
        for tensor, exact in zip(held(layer), (key, value), strict=True):
            error = (tensor - exact[0]).abs().max()
            assert 0 < error < bound


def test_padded_rows_hold_what_they_hold_alone(policy, tokens, feed, held):
    key, value = tokens(batch=3, length=300)
    starts = [0, 37, 150]
    together = feed(SinkLayer(policy((4, 3))), key, value, [160, *[1] * 140], starts)
    assert len({row.blocks for row in together.rows}) > 1
    for row, start in enumerate(starts):
        alone = feed(
            SinkLayer(policy((4, 3))), key[row : row + 1, :, start:], value[row : row + 1, :, start:], [300 - start]
        )
        for tensor, expected in zip(held(together, row), held(alone), strict=True):
            assert torch.equal(tensor, expected)


def test_a_row_can_start_in_a_later_pass(policy, tokens, held):
    key, value = tokens(length=150)
    layer = SinkLayer(policy())
    for at, end, starts in ((0, 60, [0, 60]), (60, 150, [0, 100])):
        layer.update(key[:, :, at:end], value[:, :, at:end])
        layer.begin(None, starts)
        layer.commit()
    assert torch.equal(held(layer, 1)[0], key[1, :, 100:])
    assert held(layer, 0)[0].shape[1] == 150


def test_selecting_rows_selects_every_part(policy, tokens, feed, held):
    key, value = tokens(batch=3, length=260)
    layer = feed(SinkLayer(policy((4, 2))), key, value, [260], [0, 50, 130])
    expected = [held(layer, row) for row in (2, 0, 0, 1)]
    layer.reorder_cache(torch.tensor([2, 0, 0, 1]))
    for row, (k, v) in enumerate(expected):
        assert torch.equal(held(layer, row)[0], k)
        assert torch.equal(held(layer, row)[1], v)
    layer.batch_select_indices(torch.tensor([True, False, False, True]))
    assert torch.equal(held(layer, 1)[0], expected[3][0])
    layer.batch_repeat_interleave(2)
    assert torch.equal(held(layer, 3)[0], expected[3][0])
    assert torch.equal(held(layer, 1)[0], expected[0][0])


def test_reordered_beams_hold_the_codes_of_reordered_tokens(policy, feed, held):
    """A code is written once. So a beam holds the codes of what an unquantized cache with the same reorders holds."""
    generator = torch.Generator().manual_seed(0)
    layer = SinkLayer(policy())
    exact = [torch.empty(4, 2, 0, 32) for _ in range(2)]
    for step in range(400):
        new = tuple(torch.randn(4, 2, 1, 32, generator=generator) for _ in range(2))
        feed(layer, *new, [1])
        exact = [torch.cat(pair, 2) for pair in zip(exact, new, strict=True)]
        if step % 3 == 0:
            order = torch.randint(0, 4, (4,), generator=generator)
            layer.reorder_cache(order)
            exact = [x[order] for x in exact]
    once = feed(SinkLayer(policy()), *exact, [400])
    for row in range(4):
        for tensor, expected in zip(held(layer, row), held(once, row), strict=True):
            assert torch.equal(tensor, expected)


def test_streaming_heads_forget_the_middle_and_others_keep_it(policy, tokens, feed):
    key, value = tokens(length=600)
    for sizes in ([600], [100, *[1] * 500]):
        layer = feed(SinkLayer(policy((4, 4), (0, 128))), key, value, sizes)
        view = layer.view()
        counts = dict(zip([bank.window for bank in layer.banks], view.rows[0, 2:].tolist(), strict=True))
        newest = int(view.rows[0, 1])
        assert counts[0] == (600 - 4 - 64) // BLOCK
        assert counts[128] == -(-(128 - newest) // BLOCK) + 1
        assert torch.equal(view.sink_key, key[:, :, :4])


def test_recording_the_past_is_bounded_and_ends_with_reset(policy, tokens, feed):
    key, value = tokens(batch=1, length=2000)
    layer = SinkLayer(policy())
    layer.activate_past_recording()
    feed(layer, key, value, [300, *[1] * 1700])
    assert layer.used < 4 + 64 + 64 + 512
    layer.reset()
    feed(layer, key[:, :, :300], value[:, :, :300], [300])
    assert layer.rows[0].blocks == 3


@pytest.mark.parametrize("factor", [1e-6, 1e-5, 1e-3, 1e3, 1e4])
def test_the_relative_error_does_not_depend_on_the_size_of_numbers(factor, policy, tokens, feed, held):
    key, value = tokens(batch=1)
    layer = feed(SinkLayer(policy((8, 4))), key * factor, value * factor, [200])
    for tensor, exact in zip(held(layer), (key, value), strict=True):
        error = (tensor / factor - exact[0]).pow(2).mean((1, 2)).sqrt()
        assert error[1] < 0.15
        assert error[0] < (0.02 if factor >= 1e-5 else 0.2)


def test_numbers_too_large_for_a_code_are_refused(policy, tokens, feed):
    key, value = tokens(batch=1)
    with pytest.raises(CacheError, match="65,504"):
        feed(SinkLayer(policy()), key, value * 1e5, [200])


def test_inference_mode_can_begin_and_end_between_passes(policy, tokens, feed, held):
    key, value = tokens()
    layer = SinkLayer(policy())
    with torch.inference_mode():
        feed(layer, key[:, :, :150].clone(), value[:, :, :150].clone(), [150])
    feed(layer, key[:, :, 150:], value[:, :, 150:], [50])
    with torch.inference_mode():
        layer.crop(-10)
        feed(layer, key[:, :, 190:], value[:, :, 190:], [10])
    once = feed(SinkLayer(policy()), key, value, [200])
    assert torch.equal(held(layer)[0], held(once)[0])


def test_other_shapes_and_types_are_refused_and_change_nothing(policy, tokens, feed, held):
    key, value = tokens()
    layer = feed(SinkLayer(policy()), key, value, [200])
    before = held(layer)
    wrong = [
        (key[:, :1], value[:, :1], "another model"),
        (key[..., :16], value[..., :16], "another model"),
        (key[:1], value[:1], "batch of 1"),
        (key.bfloat16(), value.bfloat16(), "bfloat16"),
        (key.to("meta"), value.to("meta"), "meta"),
    ]
    for k, v, message in wrong:
        with pytest.raises(CacheError, match=message):
            layer.update(k, v)
    assert all(torch.equal(a, b) for a, b in zip(before, held(layer), strict=True))
    feed(layer, key, value, [200])


def test_an_interrupted_pass_is_refused_until_reset(policy, tokens, feed):
    key, value = tokens()
    layer = SinkLayer(policy())
    layer.update(key, value)
    order = torch.tensor([1, 0])
    for call in (lambda: layer.update(key, value), lambda: layer.crop(-1), lambda: layer.reorder_cache(order)):
        with pytest.raises(CacheError, match="interrupted"):
            call()
    layer.reset()
    assert layer.get_seq_length() == 0
    feed(layer, key, value, [200])


def test_a_row_cannot_begin_elsewhere_in_a_later_pass(policy, tokens, feed):
    key, value = tokens()
    layer = feed(SinkLayer(policy()), key, value, [200], [0, 20])
    layer.update(key[:, :, :1], value[:, :, :1])
    with pytest.raises(CacheError, match="began at column 20"):
        layer.begin(None, None)
