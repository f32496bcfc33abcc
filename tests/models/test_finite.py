"""One finiteness test for all tensors."""

import math

import pytest
import torch

from quantsink.models import finite
from quantsink.models.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 6])
def test_one_bad_number_anywhere_is_noticed(monkeypatch, dtype, value, place):
    monkeypatch.setattr(finite, "PART", 3)
    tensor = torch.ones(7, dtype=dtype)
    assert all_finite(tensor)
    tensor[place] = value
    assert not all_finite(tensor)
    assert not all_finite(tensor.reshape(1, 7).T)


def test_an_empty_tensor_is_finite():
    assert all_finite(torch.empty(0, 4))
