"""The tensors of codes: how heads are grouped, and how blocks are written, kept and dropped."""

import pytest
import torch

from quantsink.cache.bank import SLICE, Bank, banks_of, places_of
from quantsink.kernels.coded_attention.codes import BLOCK, Metric, Record, encode


def bank(heads=(0, 1), bits=4, window=0, metric=None, batch=2):
    new = Bank(heads, Record(bits, 32, 32), window, metric)
    new.clear(batch, torch.device("cpu"))
    return new


def coded(key, value, bits=4):
    """Codes `[B, heads, blocks, bytes]` of whole blocks."""
    return encode(*(x.unflatten(2, (-1, BLOCK)) for x in (key, value)), bits)


def test_heads_of_one_width_and_window_share_a_bank(policy):
    banks = banks_of(policy((4, 8, 4, 4, 2), (0, 0, 0, 128, 0)))
    assert [(b.record.bits, b.window, b.heads) for b in banks] == [
        (8, 0, (1,)),
        (4, 0, (0, 2)),
        (4, 128, (3,)),
        (2, 0, (4,)),
    ]
    assert places_of(banks).tolist() == [[1, 0], [0, 0], [1, 1], [2, 0], [3, 0]]


def test_each_bank_has_the_metric_of_its_heads(policy):
    gram = torch.stack([torch.eye(32) * (head + 1) for head in range(3)])
    gram[1, 0, 1] = gram[1, 1, 0] = 0.5
    metric = Metric.of(gram)
    banks = banks_of(policy((4, 8, 4)), metric)
    for b in banks:
        assert torch.equal(b.metric.factor, metric.heads(list(b.heads)).factor)


@pytest.mark.parametrize("heads", [(0, 1), (1,)])
@pytest.mark.parametrize("rows", [None, [1]])
def test_written_blocks_are_the_codes_of_their_tokens(tokens, heads, rows):
    blocks = SLICE + 3
    key, value = tokens(length=blocks * BLOCK)
    new = bank(heads)
    new.write(key, value, rows, 0)
    written = slice(None) if rows is None else rows
    assert torch.equal(new.data[written, :, :blocks], coded(key[:, heads], value[:, heads])[written])


def test_blocks_are_written_after_those_in_use(tokens):
    key, value = tokens(length=5 * BLOCK)
    new = bank()
    new.write(key[:, :, : 2 * BLOCK], value[:, :, : 2 * BLOCK], None, 0)
    new.write(key[:, :, 2 * BLOCK :], value[:, :, 2 * BLOCK :], None, 2)
    assert torch.equal(new.data[:, :, :5], coded(key, value))


def test_dropping_keeps_the_newest_blocks_of_the_given_rows(tokens):
    key, value = tokens(length=5 * BLOCK)
    new = bank()
    new.write(key, value, None, 0)
    codes = new.data.clone()
    new.drop([1], 5, 2)
    assert torch.equal(new.data[1, :, :3], codes[1, :, 2:5])
    assert torch.equal(new.data[0], codes[0])


def test_capacity_grows_by_little_more_than_is_needed():
    new = bank()
    new.reserve(100)
    assert new.data.shape[2] == 100
    new.reserve(50)
    assert new.data.shape[2] == 100
    new.reserve(101)
    assert new.data.shape[2] == 104


@pytest.mark.parametrize(
    ("window", "newest", "kept"), [(0, 100, 10), (128, 100, 2), (128, 128, 1), (256, 64, 4), (2000, 64, 10)]
)
def test_a_window_keeps_the_blocks_that_it_reaches_and_one_more(window, newest, kept):
    assert bank(window=window).keep(10, newest) == kept
