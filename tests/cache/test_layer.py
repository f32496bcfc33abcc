"""One layer of a SinkCache: the same codes however tokens arrive, exact where it says so, whole after all it does."""

import pytest
import torch

from quantsink.cache.layer import SinkLayer
from quantsink.cache.layout import LayerPolicy
from quantsink.errors import CacheError
from quantsink.kernels.coded_attention.codes import BLOCK, decode
from quantsink.recipe import KVCache

SPLITS = {
    "32, then one by one": [32, *[1] * 168],
    "one block": [200],
    "chunks": [50, 70, 80],
    "almost all, then one": [199, 1],
    "hardly any, then the rest": [3, 1, 1, 195],
}


def rule(bits=(4, 4), windows=None, sinks=4, residual=64, max_length=None, head_dim=32):
    options = KVCache(sink_size=sinks, residual=residual, max_length=max_length)
    return LayerPolicy("layer", 0, len(bits), head_dim, bits, windows or (0,) * len(bits), options)


def tokens(batch=2, heads=2, length=200, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, length, dim, generator=generator) for _ in range(2))


def feed(layer, key, value, sizes, starts=None):
    at = 0
    for size in sizes:
        layer.update(key[:, :, at : at + size], value[:, :, at : at + size])
        layer.begin(None, starts)
        layer.commit()
        at += size
    assert at == key.shape[2]
    return layer


def rows(layer, row=0):
    """Every key and value that a row holds, in order; codes as what they stand for."""
    view = layer.view()
    sinks, newest, *counts = view.rows[row].tolist()
    keys, values = [], []
    for head, (number, place) in enumerate(view.heads.tolist()):
        bank = layer.banks[number]
        k, v = decode(bank.data[row, place, : counts[number]], bank.record)
        for found, sink, coded, new in (
            (keys, view.sink_key, k, view.key),
            (values, view.sink_value, v, view.value),
        ):
            new = new[row, head, new.shape[2] - newest :]
            found.append(torch.cat([sink[row, head, :sinks], coded.flatten(0, 1), new]))
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 2), (3, 2)])
def test_the_same_codes_bit_for_bit_however_tokens_arrive(bits):
    key, value = tokens()
    layers = {name: feed(SinkLayer(rule(bits)), key, value, sizes) for name, sizes in SPLITS.items()}
    first = layers["one block"]
    assert [row.blocks for row in first.rows] == [2, 2]
    for name, layer in layers.items():
        assert layer.rows == first.rows
        for mine, other in zip(layer.banks, first.banks, strict=True):
            assert torch.equal(mine.data[:, :, :2], other.data[:, :, :2]), name
        for mine, other in zip(rows(layer), rows(first), strict=True):
            assert torch.equal(mine, other), name


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("residual", [0, 64, 100])
def test_sinks_and_the_newest_are_exact_at_every_length_and_little_else_is(sinks, residual):
    key, value = tokens(batch=1, length=330)
    layer = SinkLayer(rule(sinks=sinks, residual=residual))
    for length in range(1, 331):
        layer.update(key[:, :, length - 1 : length], value[:, :, length - 1 : length])
        layer.begin(None, None)
        layer.commit()
        assert layer.get_seq_length() == length
        for found, exact in zip(rows(layer), (key, value), strict=True):
            assert found.shape[1] == length
            assert torch.equal(found[:, :sinks], exact[0, :, : min(sinks, length)])
            newest = min(residual, length)
            assert torch.equal(found[:, length - newest :], exact[0, :, length - newest : length])
        full = length - layer.rows[0].blocks * BLOCK
        assert full < sinks + residual + BLOCK


def test_a_number_is_held_within_its_width():
    key, value = tokens()
    for bits, bound in ((8, 0.02), (4, 0.4), (3, 0.9), (2, 2.0)):
        layer = feed(SinkLayer(rule((bits, bits))), key, value, [200])
        for found, exact in zip(rows(layer), (key, value), strict=True):
            error = (found - exact[0]).abs().max()
            assert 0 < error < bound


def test_rows_padded_on_the_left_hold_what_they_would_alone():
    key, value = tokens(batch=3, length=300)
    starts = [0, 37, 150]
    together = feed(SinkLayer(rule((4, 3))), key, value, [160, *[1] * 140], starts)
    assert len({row.blocks for row in together.rows}) > 1
    for row, start in enumerate(starts):
        alone = feed(
            SinkLayer(rule((4, 3))), key[row : row + 1, :, start:], value[row : row + 1, :, start:], [300 - start]
        )
        for mine, other in zip(rows(together, row), rows(alone), strict=True):
            assert torch.equal(mine, other)


def test_a_row_whose_first_token_comes_late():
    key, value = tokens(length=150)
    layer = SinkLayer(rule())
    for at, end, starts in ((0, 60, [0, 60]), (60, 150, [0, 100])):
        layer.update(key[:, :, at:end], value[:, :, at:end])
        layer.begin(None, starts)
        layer.commit()
    assert torch.equal(rows(layer, 1)[0], key[1, :, 100:])
    assert rows(layer, 0)[0].shape[1] == 150


@pytest.mark.parametrize("remove", [0, 1, 60, 64, 100, 190, 296, 299, 300, 1000])
def test_crop_leaves_the_rest_and_tokens_go_on_behind_it(remove):
    key, value = tokens(length=300)
    layer = feed(SinkLayer(rule((8, 8))), key, value, [300])
    before = rows(layer)
    layer.crop(-remove)
    left = max(300 - remove, 0)
    assert layer.get_seq_length() == left
    for now, then in zip(rows(layer), before, strict=True):
        assert torch.equal(now, then[:, :left])
    more = tokens(length=150, seed=1)
    feed(layer, *more, [150])
    for found, exact, new in zip(rows(layer), (key, value), more, strict=True):
        assert found.shape[1] == left + 150
        assert (found - torch.cat([exact[:, :, :left], new], 2)[0]).abs().max() < 0.03


def test_crop_of_padded_rows():
    key, value = tokens(length=300)
    layer = feed(SinkLayer(rule((8, 8))), key, value, [300], [0, 120])
    layer.crop(-150)
    assert rows(layer, 0)[0].shape[1] == 150
    assert rows(layer, 1)[0].shape[1] == 30
    assert (rows(layer, 1)[0] - key[1, :, 120:150]).abs().max() < 0.03


def test_crop_takes_a_negative_number_as_transformers_does():
    layer = feed(SinkLayer(rule()), *tokens(length=90), [90])
    with pytest.raises(ValueError, match="negative"):
        layer.crop(5)


def test_while_the_past_is_recorded_a_crop_loses_nothing():
    key, value = tokens(length=300)
    layer = feed(SinkLayer(rule()), key[:, :, :200], value[:, :, :200], [200])
    layer.activate_past_recording()
    feed(layer, key[:, :, 200:], value[:, :, 200:], [100])
    layer.crop(-90)
    assert torch.equal(rows(layer)[0][:, -78:], key[0, :, 210 - 78 : 210])
    assert layer.used <= layer.policy.max_exact


def test_selecting_rows_moves_every_part():
    key, value = tokens(batch=3, length=260)
    layer = feed(SinkLayer(rule((4, 2))), key, value, [260], [0, 50, 130])
    expected = [rows(layer, row) for row in (2, 0, 0, 1)]
    layer.reorder_cache(torch.tensor([2, 0, 0, 1]))
    for row, (k, v) in enumerate(expected):
        assert torch.equal(rows(layer, row)[0], k)
        assert torch.equal(rows(layer, row)[1], v)
    layer.batch_select_indices(torch.tensor([True, False, False, True]))
    assert torch.equal(rows(layer, 1)[0], expected[3][0])
    layer.batch_repeat_interleave(2)
    assert torch.equal(rows(layer, 3)[0], expected[3][0])
    assert torch.equal(rows(layer, 1)[0], expected[0][0])


def test_beams_over_several_flushes_drift_nowhere():
    """Each code is written once: what a beam holds is what an unquantized cache with the same reorders holds, coded."""
    generator = torch.Generator().manual_seed(0)
    layer = SinkLayer(rule())
    exact = [torch.empty(4, 2, 0, 32) for _ in range(2)]
    for step in range(400):
        new = tuple(torch.randn(4, 2, 1, 32, generator=generator) for _ in range(2))
        feed(layer, *new, [1])
        exact = [torch.cat(pair, 2) for pair in zip(exact, new, strict=True)]
        if step % 3 == 0:
            order = torch.randint(0, 4, (4,), generator=generator)
            layer.reorder_cache(order)
            exact = [x[order] for x in exact]
    once = feed(SinkLayer(rule()), *exact, [400])
    for row in range(4):
        for mine, other in zip(rows(layer, row), rows(once, row), strict=True):
            assert torch.equal(mine, other)


def test_streaming_heads_forget_the_middle_and_others_do_not():
    key, value = tokens(length=600)
    for sizes in ([600], [100, *[1] * 500]):
        layer = feed(SinkLayer(rule((4, 4), (0, 128))), key, value, sizes)
        view = layer.view()
        counts = dict(zip([bank.window for bank in layer.banks], view.rows[0, 2:].tolist(), strict=True))
        newest = int(view.rows[0, 1])
        assert counts[0] == (600 - 4 - 64) // BLOCK
        assert counts[128] == -(-(128 - newest) // BLOCK) + 1
        assert torch.equal(view.sink_key, key[:, :, :4])


def test_streaming_heads_can_take_a_few_tokens_back_and_refuse_more():
    key, value = tokens(length=600)
    layer = feed(SinkLayer(rule((4, 4), (0, 128))), key, value, [600])
    layer.crop(-60)
    view = layer.view()
    with pytest.raises(CacheError, match="dropped"):
        layer.crop(-100)
    assert torch.equal(layer.view().rows, view.rows)
    assert torch.equal(layer.view().key, view.key)
    assert layer.get_seq_length() == 540


def test_rolling_rows_of_different_lengths_each_have_their_own_sinks():
    key, value = tokens(batch=2, length=600)
    starts = [0, 200]
    rolling = rule(max_length=300)
    turn = {"rotate": lambda keys, shift: keys + shift}
    together = SinkLayer(rolling, **turn)
    alone = SinkLayer(rolling, **turn)
    at = 0
    for size in [250, *[1] * 350]:
        together.update(key[:, :, at : at + size], value[:, :, at : at + size])
        together.begin(None, starts)
        mine = max(at - 200, 0), max(at + size - 200, 0)
        if mine[1] > mine[0]:
            alone.update(key[1:, :, 200:][:, :, slice(*mine)], value[1:, :, 200:][:, :, slice(*mine)])
            alone.begin(None, None)
            if together.view().rows[1, 0]:
                assert torch.equal(together.view().sink_key[1], alone.view().sink_key[0])
            alone.commit()
        together.commit()
        at += size
    assert together.rows[1].dropped == alone.rows[0].dropped > 0


def test_recording_the_past_is_bounded_and_ends_with_reset():
    key, value = tokens(batch=1, length=2000)
    layer = SinkLayer(rule())
    layer.activate_past_recording()
    feed(layer, key, value, [300, *[1] * 1700])
    assert layer.used < 4 + 64 + 64 + 512
    layer.reset()
    feed(layer, key[:, :, :300], value[:, :, :300], [300])
    assert layer.rows[0].blocks == 3


@pytest.mark.parametrize("factor", [1e-6, 1e-5, 1e-3, 1e3, 1e4])
def test_numbers_of_every_size_keep_their_bits(factor):
    key, value = tokens(batch=1)
    layer = feed(SinkLayer(rule((8, 4))), key * factor, value * factor, [200])
    for found, exact in zip(rows(layer), (key, value), strict=True):
        error = (found / factor - exact[0]).pow(2).mean((1, 2)).sqrt()
        assert error[1] < 0.15
        assert error[0] < (0.02 if factor >= 1e-5 else 0.2)


def test_numbers_too_large_for_a_code_are_refused():
    key, value = tokens(batch=1)
    with pytest.raises(CacheError, match="65,504"):
        feed(SinkLayer(rule()), key, value * 1e5, [200])


def test_a_cache_can_be_used_in_and_out_of_inference_mode():
    key, value = tokens()
    layer = SinkLayer(rule())
    with torch.inference_mode():
        feed(layer, key[:, :, :150].clone(), value[:, :, :150].clone(), [150])
    feed(layer, key[:, :, 150:], value[:, :, 150:], [50])
    with torch.inference_mode():
        layer.crop(-10)
        feed(layer, key[:, :, 190:], value[:, :, 190:], [10])
    once = feed(SinkLayer(rule()), key, value, [200])
    assert torch.equal(rows(layer)[0], rows(once)[0])


def test_a_rolling_layer_stays_in_its_memory_and_turns_its_sinks():
    key, value = tokens(batch=1, length=3000)
    layer = SinkLayer(rule(max_length=300), rotate=lambda keys, shift: keys + shift)
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
    held = layer.policy.sink_size + layer.view().rows[0, 2] * BLOCK + layer.view().rows[0, 1]
    assert layer.rows[0].dropped == 3000 - int(held)
    assert torch.equal(layer.view().sink_key, key[:, :, :4] + layer.rows[0].dropped)
    assert torch.equal(layer.sinks.key, key[:, :, :4])


def test_what_does_not_fit_is_refused_and_nothing_changes():
    key, value = tokens()
    layer = feed(SinkLayer(rule()), key, value, [200])
    held = rows(layer)
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
    assert all(torch.equal(a, b) for a, b in zip(held, rows(layer), strict=True))
    feed(layer, key, value, [200])


def test_a_pass_that_was_interrupted_is_noticed():
    key, value = tokens()
    layer = SinkLayer(rule())
    layer.update(key, value)
    order = torch.tensor([1, 0])
    for call in (lambda: layer.update(key, value), lambda: layer.crop(-1), lambda: layer.reorder_cache(order)):
        with pytest.raises(CacheError, match="interrupted"):
            call()
    layer.reset()
    assert layer.get_seq_length() == 0
    feed(layer, key, value, [200])


def test_a_row_cannot_begin_elsewhere_later():
    key, value = tokens()
    layer = feed(SinkLayer(rule()), key, value, [200], [0, 20])
    layer.update(key[:, :, :1], value[:, :, :1])
    with pytest.raises(CacheError, match="began at column 20"):
        layer.begin(None, None)


def test_the_standin_for_cached_keys_has_a_shape_and_no_data():
    layer = SinkLayer(rule())
    key, value = tokens()
    standin, _ = layer.update(key, value)
    assert standin.shape == key.shape
    assert standin.dtype == key.dtype
    for use in (
        lambda: standin + 1,
        lambda: torch.cat([standin, key]),
        lambda: standin @ key.mT,
        lambda: standin.sum(),
    ):
        with pytest.raises(CacheError, match="attn_implementation"):
            use()
