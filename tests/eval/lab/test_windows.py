"""Windows and biases of distance against their published formulas."""

import pytest
import torch
from lab_attention import DIM, HEADS, given, made
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from quantsink.errors import UsageError
from quantsink.eval.lab.windows import (
    RelativeBias,
    SegmentWindow,
    alibi_slopes,
)


def test_a_segment_window_must_be_told_the_segments() -> None:
    with pytest.raises(UsageError, match=r"give Inputs\(marked=\.\.\.\)"):
        made(SegmentWindow(3))(given(4)[0])


@pytest.mark.parametrize("heads", range(1, 17))
def test_slopes_are_those_of_alibi(heads: int) -> None:
    of_bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads), dtype=torch.float64), of_bloom, rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 12), (4, 100)])
@torch.no_grad()
def test_buckets_are_those_of_t5(buckets: int, most: int, causal: bool) -> None:
    attention = made(RelativeBias(buckets, most), causal=causal)
    parts = attention.parts(torch.zeros(1, 200, DIM, dtype=torch.float64))
    column = torch.arange(200)
    place = T5Attention._relative_position_bucket(column - column[:, None], not causal, buckets, most)
    assert parts.bias is not None
    table = attention.get_parameter("mechanisms.0.table")
    assert torch.equal(parts.bias.expand(1, HEADS, 200, 200)[0], table[place].permute(2, 0, 1))
