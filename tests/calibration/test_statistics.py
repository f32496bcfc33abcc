"""Statistics of known attention weights, and their merging."""

import math

import pytest
import torch

from quantsink.calibration.statistics import (
    BIN_WIDTH,
    add,
    measure_keys,
    measure_queries,
    measure_rows,
    measure_window,
    merge,
)


def test_uniform_weights_have_entropy_1():
    rows = torch.tensor([99])
    fields = measure_rows(torch.zeros(2, 1, 100), torch.ones(1, 100, dtype=torch.bool), rows, (0, 4))
    assert fields["entropy"].tolist() == pytest.approx([1, 1])
    assert fields["bos_mass"].tolist() == pytest.approx([0.01] * 2)
    assert fields["sink_mass"].tolist() == pytest.approx([0.04] * 2)
    assert fields["far_mass"][0].tolist() == pytest.approx([0.32, 0, 0, 0, 0]), "columns 4 to 35 of 64 or more before"
    assert fields["gap_count"][0, 0] == 100


def test_a_single_peak_has_entropy_0_and_falls_into_its_bin():
    scores = torch.zeros(1, 1, 50)
    scores[..., 0] = 1000.0
    fields = measure_rows(scores, torch.ones(1, 50, dtype=torch.bool), torch.tensor([49]), (0, 1))
    assert float(fields["entropy"]) == pytest.approx(0, abs=1e-6)
    assert float(fields["bos_mass"]) == pytest.approx(1)
    assert float(fields["rest_peak"]) == 0
    assert float(fields["logit_max"]) == 1000
    assert fields["gap_count"][0].nonzero()[:, 0].tolist() == [0, 80], "40 and more below the maximum is one bin"


def test_keys_that_a_query_does_not_see_are_not_counted():
    visible = torch.arange(50) <= 20
    fields = measure_rows(torch.zeros(1, 1, 50), visible[None], torch.tensor([20]), (0, 1))
    assert float(fields["bos_mass"]) == pytest.approx(1 / 21)
    assert int(fields["gap_count"].sum()) == 21


def test_weight_lies_in_the_bin_of_its_distance_from_the_maximum():
    scores = torch.tensor([[[0.0, -3 * BIN_WIDTH - 0.1]]])
    fields = measure_rows(scores, torch.ones(1, 2, dtype=torch.bool), torch.tensor([1]), (0, 1))
    weight = math.exp(float(scores[0, 0, 1])) / (1 + math.exp(float(scores[0, 0, 1])))
    assert float(fields["gap_mass"][0, 3]) == pytest.approx(weight)


def test_ranges_of_keys_leave_the_sink_tokens_out():
    key = torch.tensor([[[9.0], [1.0], [-2.0]]])
    fields = measure_keys(key, 2 * key, torch.tensor([True, False, False]))
    assert (float(fields["key_max"]), float(fields["key_min_negated"]), float(fields["key_sink_max"])) == (1, 2, 9)
    assert (float(fields["value_amax"]), float(fields["value_sink_amax"])) == (4, 18)
    assert (float(fields["key_sum"]), float(fields["key_count"])) == (-1, 2)


def test_products_of_queries_are_summed_over_a_group():
    query = torch.randn(4, 5, 3)
    fields = measure_queries(query, kv_heads=2)
    expected = torch.einsum("hqd,hqe->de", query[2:], query[2:])
    assert torch.allclose(fields["query_gram"][1].float(), expected, atol=1e-5)
    assert fields["query_rows"].tolist() == [10, 10]


def test_sums_add_and_extremes_take_the_largest():
    first = {"rows": torch.tensor([2.0]), "logit_max": torch.tensor([5.0])}
    second = {"rows": torch.tensor([3.0]), "logit_max": torch.tensor([4.0])}
    total = merge([first, second])
    assert (float(total["rows"]), float(total["logit_max"])) == (5, 5)
    assert float(first["rows"]) == 2, "the parts are left as they were"
    add(total, second)
    assert float(total["rows"]) == 8


def test_a_window_counts_once_whatever_its_length():
    window = measure_window(
        {"rows": torch.tensor([4.0]), "bos_mass": torch.tensor([2.0]), "entropy": torch.tensor([1.0])}
    )
    assert (float(window["windows"]), float(window["bos_mass_window"]), float(window["bos_mass_window_sq"])) == (
        1,
        0.5,
        0.25,
    )
