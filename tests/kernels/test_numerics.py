"""The error budget itself: ties pass whichever way they fall, and faults of the size of one code or less do not."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantsink.kernels import CodedKV, Route, coded_attention, quantize_per_token, sink_attention
from quantsink.kernels.coded_attention.call import Call as CodedCall
from quantsink.kernels.coded_attention.reference import reference as coded_reference
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import quantize_value_blocks, reference

Arguments = dict[str, Any]
BLOCK = 64


def case(seed: int = 0, length: int = 320, heads: int = 6, route: Route = Route.INT8) -> Arguments:
    """Arguments with keys off centre, one channel large; whole blocks only."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    key = draw(1, 2, length, 64) + 2 * draw(1, 2, 1, 64)
    key[..., 0] *= 5
    return {
        "query": draw(1, heads, length, 64),
        "key": key,
        "value": draw(1, 2, length, 64),
        "routes": torch.full((heads,), route, dtype=torch.uint8),
        "key_mean": key[:, :, 1:].mean((0, 2)),
        "scaling": 0.125,
    }


def yardstick(arguments: Arguments, scaling: float = 1.0) -> Tensor:
    """The reference in float32, its scores `scaling` times as large."""
    return reference(Call.of(**{**arguments, "scaling": arguments["scaling"] * scaling}))


def implementation(
    arguments: Arguments,
    exp: Callable[[Tensor], Tensor] = torch.exp,
    encode: Callable[[Tensor], Tensor] = torch.round,
    order: Tensor | None = None,
) -> Tensor:
    """INT8 attention in float32: its exponential, the rounding of its weights and the order of channels vary."""
    order = torch.arange(64) if order is None else order
    q, k, mean = (arguments[name][..., order] for name in ("query", "key", "key_mean"))
    groups = torch.arange(q.shape[1]) * k.shape[1] // q.shape[1]
    q_codes, q_scale = quantize_per_token(q)
    k_codes, k_scale = quantize_per_token(k - mean[:, None])
    s = q_codes.float() @ k_codes.float()[:, groups].mT * (q_scale * arguments["scaling"]) * k_scale[:, groups].mT
    s = s + (q @ mean[groups, :, None]) * arguments["scaling"]
    s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf).unflatten(-1, (-1, BLOCK))
    top = s.amax(-1, keepdim=True)
    most = top.amax(-2, keepdim=True)
    p, share = exp(s - top.clamp(min=-1e30)), torch.exp(top - most)
    v_codes, v_scale = (x[:, groups] for x in quantize_value_blocks(arguments["value"], BLOCK))
    products = torch.einsum("bhqnk,bhnkd->bhqnd", encode(127 * p), v_codes) * v_scale.transpose(2, 3)
    return (products * share / 127).sum(3) / (p * share).sum((3, 4))[..., None]


def judge(numerics: ModuleType, actual: Tensor, arguments: Arguments) -> None:
    numerics.assert_within_budget(actual, yardstick(arguments), numerics.sink_attention_truth(arguments))


# Honest rounding.


@pytest.mark.parametrize("seed", range(4))
def test_sums_in_another_order_pass(numerics: ModuleType, seed: int) -> None:
    arguments = case(seed)
    for n in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(n))
        judge(numerics, implementation(arguments, order=order), arguments)


def test_weights_off_by_their_last_bits_pass_though_codes_flip(numerics: ModuleType) -> None:
    """What other exponentials and sums do on another machine, at random."""
    flipped = 0
    for seed in range(6):
        arguments, generator = case(seed), torch.Generator().manual_seed(seed)
        truth = numerics.sink_attention_truth(arguments)

        def exp(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            bits = torch.randint(-2, 3, x.shape, generator=generator)
            return torch.exp(x) * (1 + bits * numerics.UNIT)

        actual = implementation(arguments, exp)
        numerics.assert_within_budget(actual, yardstick(arguments), truth)
        flipped += numerics.rms_error(actual, truth.out) > 1e-5
    assert flipped > 1, "no case has a tie that fell otherwise"


@pytest.mark.parametrize("last_bits", [-2, -1, 1, 2])
@pytest.mark.parametrize("route", [Route.INT8, Route.SINK, Route.NATIVE])
def test_the_operator_passes_whatever_the_yardstick_s_last_bits(
    numerics: ModuleType, route: Route, last_bits: int
) -> None:
    for seed in range(3):
        arguments = case(seed, route=route)
        truth = numerics.sink_attention_truth(arguments)
        other = yardstick(arguments, 1 + last_bits * numerics.UNIT)
        numerics.assert_within_budget(sink_attention(**arguments), other, truth)


@pytest.mark.parametrize("last_bits", [-2, -1, 1, 2])
@pytest.mark.parametrize("bits", [8, 3])
def test_the_coded_operator_passes_whatever_the_yardstick_s_last_bits(
    numerics: ModuleType, bits: int, last_bits: int
) -> None:
    routes, scaling = torch.tensor([0, 1, 2, 0, 0, 2], dtype=torch.uint8), 0.125 * (1 + last_bits * numerics.UNIT)
    for seed in range(3):
        arguments = case(seed, length=600)
        query, codes = arguments["query"][:, :, -3:], CodedKV.encode(arguments["key"], arguments["value"], bits)
        truth = numerics.coded_attention_truth(query, codes, routes)
        other = coded_reference(CodedCall.of(query, codes, routes, scaling))
        numerics.assert_within_budget(coded_attention(query, codes, routes=routes, scaling=0.125), other, truth)


# Ties.


def test_a_tie_passes_on_either_side_and_no_further(numerics: ModuleType) -> None:
    arguments = case()
    truth, expected = numerics.sink_attention_truth(arguments), yardstick(arguments)
    assert len(truth.row), "the case has no tie"

    def judge_tie(tie: int, codes: int) -> None:
        actual = truth.out.clone()
        actual.view(-1, 64)[truth.row[tie]] += codes * truth.change[tie]
        numerics.assert_within_budget(actual.float(), expected, truth)

    for tie in range(len(truth.row)):
        for codes in (0, 1):
            judge_tie(tie, codes)
        for codes in (-1, 2):
            with pytest.raises(AssertionError, match="exceeds the budget"):
                judge_tie(tie, codes)


def test_all_ties_of_a_row_are_decided_together(numerics: ModuleType) -> None:
    truth = numerics.Truth(
        torch.zeros(2, 3, 16, dtype=torch.double), torch.tensor([4, 1, 4, 4]), torch.randn(4, 16, dtype=torch.double)
    )
    for choice in range(16):
        actual = truth.out.clone()
        for tie in range(4):
            actual.view(-1, 16)[truth.row[tie]] += (choice >> tie & 1) * truth.change[tie]
        torch.testing.assert_close(truth.nearest(actual), actual)


def test_ties_are_few(numerics: ModuleType) -> None:
    """Were every code a tie, any fault of one code would pass."""
    truth = numerics.sink_attention_truth(case())
    assert len(truth.row) < 1e-4 * 6 * 320 * 320 / 2


@pytest.mark.parametrize("distance", [1e-3, 0.1, 0.4])
def test_one_code_that_flips_away_from_a_tie_fails(numerics: ModuleType, distance: float) -> None:
    """`distance`: how far from the middle between two codes the weight lies."""

    def encode(y: Tensor) -> Tensor:
        codes, first = y.round(), y[0, 0, BLOCK:, 0]
        offset = ((first - first.floor() - 0.5).abs() - distance).abs()
        row, key = divmod(int(torch.where(first > 1, offset, 1).argmin()), BLOCK)
        at = (0, 0, BLOCK + row, 0, key)
        codes[at] += torch.where(codes[at] > y[at], -1, 1)
        return codes

    arguments = case()
    with pytest.raises(AssertionError, match="exceeds the budget"):
        judge(numerics, implementation(arguments, encode=encode), arguments)


def test_a_score_at_the_row_clip_is_dropped_or_kept(numerics: ModuleType) -> None:
    native = case(length=64, heads=2, route=Route.NATIVE)
    native["query"] = native["query"][:, :, -1:]
    scores = native["key"][0, 0].double() @ native["query"][0, 0, -1].double() * native["scaling"]
    scores = scores.sort(descending=True).values

    def clipped(width: Tensor) -> Any:
        clip_row = torch.stack([width, torch.tensor(math.inf)])
        return numerics.sink_attention_truth({**native, "clip_row": clip_row})

    truth, yardstick = clipped(scores[0] - scores[5]), clipped(scores[0] - scores[5] + 1e-4).out.float()
    dropped, wrong = (clipped(scores[0] - scores[5] + away).out.float() for away in (-1e-4, scores[5] - scores[7]))
    assert numerics.rms_error(dropped, yardstick) > 1e-3
    numerics.assert_within_budget(dropped, yardstick, truth)
    numerics.assert_within_budget(yardstick, dropped, truth)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        numerics.assert_within_budget(wrong, yardstick, truth)


# Planted faults.


def table_fault(x: Tensor) -> Tensor:
    """One of 32 entries of a table of powers of two is off by 3e-5."""
    entry = (x * 32 / math.log(2)).nan_to_num(neginf=0).round().long() % 32
    return torch.exp(x) * torch.where(entry == 11, 1 + 3e-5, 1)


FAULTS: dict[str, dict[str, Any]] = {
    "an entry of the exponential's table": {"exp": table_fault},
    "an exponential off by 1e-5": {"exp": lambda x: torch.exp(x * (1 + 1e-5))},
    "codes one too large": {"encode": lambda y: torch.where(y > 1, y.round() + 1, y.round()).clamp(max=127)},
    "codes rounded down": {"encode": torch.floor},
    "ties far from the middle": {"encode": lambda y: (y + 0.002).round()},
    "weights that are not rounded": {"encode": lambda y: y},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(numerics: ModuleType, fault: str) -> None:
    arguments = case()
    judge(numerics, implementation(arguments), arguments)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        judge(numerics, implementation(arguments, **FAULTS[fault]), arguments)


@pytest.mark.parametrize("fault", ["column", "step", "token"])
def test_a_wrong_number_in_the_values_fails(numerics: ModuleType, fault: str) -> None:
    arguments = case()
    wrong = {**arguments, "value": arguments["value"].clone()}
    value = wrong["value"]
    if fault == "column":
        value[0, 0, :, 3] = value[0, 0, :, 4]
    elif fault == "step":
        value[0, 0, 100, 3] += value[0, 0, 64:128, 3].abs().max() / 127
    else:
        value[0, 0, 100] = value[0, 0, 101]
    with pytest.raises(AssertionError, match="exceeds the budget"):
        judge(numerics, implementation(wrong), arguments)
