import pytest
import torch

from quantsink.errors import QuantSinkError
from quantsink.layers.token_context import TokenContext

CPU = torch.device("cpu")


def test_without_a_mask_the_first_tokens_are_the_sink():
    context = TokenContext(2)
    context.set((2, 5), 0, None, CPU)
    assert context.rows.tolist() == [0, 1, 5, 6]
    assert context.sink_start(5) is None


def test_left_padding_moves_the_sink_to_the_first_real_token():
    context = TokenContext(1)
    context.set((2, 4), 0, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), CPU)
    assert context.rows.tolist() == [2, 4]
    assert context.sink_start(4).tolist() == [2, 0]


def test_decoding_has_no_sink_row_but_still_a_sink_key():
    context = TokenContext(1)
    context.set((2, 1), 7, torch.tensor([[0] * 3 + [1] * 5, [1] * 8]), CPU)
    assert context.rows is None
    assert context.sink_start(8).tolist() == [3, 0]


def test_a_chunk_that_begins_inside_the_padding():
    context = TokenContext(2)
    context.set((1, 3), 2, torch.tensor([[0, 0, 0, 1, 1]]), CPU)
    assert context.rows.tolist() == [1, 2]


def test_sinks_that_left_a_sliding_cache():
    context = TokenContext(1)
    context.set((1, 1), 40, None, CPU)
    assert context.sink_start(32).tolist() == [-9]


def test_a_static_cache_is_longer_than_the_text():
    context = TokenContext(1)
    context.set((1, 1), 4, None, CPU)
    assert context.sink_start(64) is None


def test_reading_it_before_any_forward_pass():
    with pytest.raises(QuantSinkError, match="call the model"):
        TokenContext(1).sink_start(4)
