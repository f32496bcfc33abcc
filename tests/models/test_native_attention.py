"""Native attention is the formula, with and without what SDPA does not know."""

import pytest
import torch
from torch import nn

from quantsink.models.native_attention import exact_attention, native_attention, native_routes


def formula(q, k, v, mask, scaling, softcap=None, s_aux=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_native_attention_is_the_formula(options, queries, masked):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None, 9 - queries :]
    mask = causal.expand(2, 1, -1, -1).clone()
    if masked:
        mask[1, 0, 1:, 0] = False  # a key that only the first query sees
    out = native_attention(module, q, k, v, mask if masked else None, scaling=0.3, **options)
    assert out.shape == (2, queries, 4, 16)
    torch.testing.assert_close(out, formula(q, k, v, mask, 0.3, **options), rtol=1e-5, atol=1e-5)


def test_an_encoder_sees_all_keys():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 16)
    everything = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    out = exact_attention(q, q, q, None, causal=False)
    torch.testing.assert_close(out.transpose(1, 2), formula(q, q, q, everything, 0.25), rtol=1e-5, atol=1e-5)


def test_routes_are_made_once_per_shape():
    assert native_routes(3, torch.device("cpu")).tolist() == [2, 2, 2]
    assert native_routes(3, torch.device("cpu")) is native_routes(3, torch.device("cpu"))
