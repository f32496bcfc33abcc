"""How a block's codes are chosen: scales that lose nothing, keys rounded for the queries that read them."""

import pytest
import torch
from torch import Tensor

from quantsink.kernels.coded_attention.codes import (
    WIDTHS,
    Metric,
    Record,
    coded_keys,
    coded_values,
    decode,
    encode,
    half_above,
)


def block(heads: int = 3, blocks: int = 5, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(2, heads, blocks, 64, dim, generator=generator) for _ in range(2))
    return key, value


def queries(heads: int = 3, dim: int = 64, rank: int = 8) -> Tensor:
    """Queries that use some directions much more than others, as real ones do."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(heads, rank, dim, generator=generator)
    return torch.randn(heads, 500, rank, generator=generator) @ basis + 0.3 * torch.randn(
        heads, 500, dim, generator=generator
    )


def score_error(records: Tensor, key: Tensor, query: Tensor, record: Record) -> float:
    back, _ = decode(records, record)
    return float(torch.einsum("hqd,bhnkd->bhnkq", query, back - key).pow(2).mean())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [48, 64, 144])
def test_what_codes_stand_for_is_what_records_give_back(bits: int, dim: int) -> None:
    key, value = block(dim=dim)
    back = decode(encode(key, value, bits), Record(bits, dim, dim))
    assert torch.equal(coded_keys(key, bits), back[0])
    assert torch.equal(coded_values(value, bits), back[1])


@pytest.mark.parametrize("bits", WIDTHS)
def test_rounding_for_queries_changes_their_scores_least(bits: int) -> None:
    (key, value), query = block(), queries()
    metric, record = Metric.of(query.mT @ query), Record(bits, 64, 64)
    plain, chosen = encode(key, value, bits), encode(key, value, bits, metric)
    assert score_error(chosen, key, query, record) < 0.5 * score_error(plain, key, query, record)
    nearest, chosen_values = decode(plain, record), decode(chosen, record)
    assert torch.equal(nearest[1], chosen_values[1]), "the metric concerns keys only"


def test_queries_without_a_preference_round_each_number_by_itself() -> None:
    key, value = block()
    for gram in (torch.zeros(3, 64, 64), torch.eye(64).expand(3, 64, 64)):
        metric = Metric.of(gram)
        assert torch.equal(encode(key, value, 4, metric), encode(key, value, 4))


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_blocks_codes_depend_on_nothing_but_the_block(bits: int) -> None:
    (key, value), query = block(), queries()
    metric = Metric.of(query.mT @ query)
    together = encode(key, value, bits, metric)
    assert torch.equal(encode(key[1:, :, 2:3], value[1:, :, 2:3], bits, metric)[0, :, 0], together[1, :, 2])
    one = encode(key[:, [2]], value[:, [2]], bits, metric.heads([2]))
    assert torch.equal(one[:, 0], together[:, 2])


def test_a_metric_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Metric.of(torch.full((1, 4, 4), torch.nan))


def test_half_above_is_the_least_float16_not_below() -> None:
    x = torch.cat(
        [torch.randn(1000), torch.randn(1000) * 1e-6, torch.tensor([0.0, -0.0, 65504.0, -65504.0, 1e-9, -1e-9])]
    )
    up = half_above(x)
    assert bool((up.float() >= x).all())
    below = torch.nextafter(up, torch.full_like(up, -torch.inf)).float()
    assert bool(((below < x) | (up.float() == x)).all())
    assert bool(half_above(torch.tensor([torch.inf, torch.nan])).isfinite().logical_not().all())
