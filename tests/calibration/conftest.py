"""Fixtures shared by the calibration tests."""

import pytest
import torch


@pytest.fixture
def same_tensors():
    """Whether two calibrations hold the same statistics, bit for bit."""

    def same(first, second):
        a, b = first.tensors(), second.tensors()
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

    return same
