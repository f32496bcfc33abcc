"""Channels of heads, for each way in which projections are laid out. H = 4 query heads, KVH = 2, D = 3."""

import pytest

from quantsink.models.head_layout import HeadSlices, fused, latent, separate


def test_channels_of_chosen_heads_in_order():
    heads = HeadSlices("q", (0, 8, 4), 2)
    assert heads.channels([2, 0]) == (4, 5, 0, 1)
    assert HeadSlices.even("k", 3, 2, first=10, step=5).starts == (10, 15, 20)


def test_separate_projections():
    ((q, k, v),) = separate(["q", "k", "v"], [12, 6, 6], 4, 3)
    assert (q.starts, k.starts, v.starts) == ((0, 3, 6, 9), (0, 3), (0, 3))
    assert (q.module, k.module, v.module) == ("q", "k", "v")


@pytest.mark.parametrize("rows", [[12, 6, 9], [11, 6, 6], [12, 9, 9], [12, 0, 0]])
def test_separate_projections_that_do_not_divide(rows):
    assert separate(["q", "k", "v"], rows, 4, 3) == []


def test_a_fused_projection_can_be_stacked_or_grouped():
    stacked, grouped = fused("qkv", 24, 4, 3)
    assert [part.starts for part in stacked] == [(0, 3, 6, 9), (12, 15), (18, 21)]
    # A group: two queries, their key, their value.
    assert [part.starts for part in grouped] == [(0, 3, 12, 15), (6, 18), (9, 21)]
    for cut in (stacked, grouped):
        channels = sorted(c for part in cut for c in part.channels(range(len(part.starts))))
        assert channels == list(range(24))


def test_with_one_kv_head_there_is_one_way():
    assert len(fused("qkv", 18, 4, 3)) == 1
    assert fused("qkv", 17, 4, 3) == []


def test_latent_attention_interleaves_keys_and_values():
    ((q, k, v),) = latent(["q", "kv"], [4 * 5, 4 * 5], 4, 5, 2, 3)
    assert q.starts == (0, 5, 10, 15)
    assert (k.starts, k.size) == ((0, 5, 10, 15), 3)
    assert (v.starts, v.size) == ((3, 8, 13, 18), 2)
    assert latent(["q", "kv"], [20, 19], 4, 5, 2, 3) == []
