"""Weights of experts in 8 bits: the nearest codes, read like the parameter that they replace."""

import pytest
import torch
from torch import nn

from quantsink.layers.experts import ExpertWeights
from quantsink.layers.replacement import Site
from quantsink.layers.token_context import TokenContext


def weights(transposed, dtype=torch.float32):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 8, 5, dtype=dtype))
    return parameter, ExpertWeights.of(Site("experts.up", parameter, parameter.device, TokenContext(1)), transposed)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_within_half_a_step(transposed, dtype):
    parameter, experts = weights(transposed, dtype)
    for expert in range(3):
        weight = parameter[expert].float()
        outputs = weight.T if transposed else weight
        step = outputs.abs().amax(1, keepdim=True) / 127
        read = experts[expert]
        assert read.dtype == dtype
        assert read.shape == weight.shape
        error = (read.float() - weight).abs()
        error = error.T if transposed else error
        assert bool((error <= step * (0.5 if dtype == torch.float32 else 1) + 2e-2 * (dtype != torch.float32)).all())
    assert experts.weight.shape == ((3, 5, 8) if transposed else (3, 8, 5))


def test_scales_keep_their_type_and_the_weights_follow():
    _, experts = weights(False)
    experts.to(torch.bfloat16)
    assert experts.weight_scale.dtype == torch.float32
    assert experts[0].dtype == torch.bfloat16


def test_scales_that_cannot_be_right_are_seen():
    _, experts = weights(False)
    assert all(experts.check(name, tensor) for name, tensor in experts.named_buffers())
    for wrong in (0.0, -1.0, torch.nan, torch.inf):
        scale = experts.weight_scale.clone()
        scale[1, 2] = wrong
        assert not experts.check("weight_scale", scale)
