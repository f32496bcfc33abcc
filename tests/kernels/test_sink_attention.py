"""`quantsink::sink_attention` follows the formula, on hard inputs too."""

from importlib import import_module
from typing import Any

import pytest
import torch
from formula import assert_as_naive, case, causal_mask, left_padded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from quantsink.kernels import Route, sink_attention
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE


# The formula.


@pytest.mark.parametrize("length", [1, 63, 65, 300])
@pytest.mark.parametrize("route", list(Route))
def test_one_route_follows_the_formula(route: Route, length: int) -> None:
    assert_as_naive(case(heads=2, kv_heads=1, queries=length, routes=[route] * 2))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 2, 80), (3, 3, 16)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_routes_follow_the_formula(heads: int, kv_heads: int, dim: int, batch: int, seed: int) -> None:
    assert_as_naive(case(heads, kv_heads, 67, dim=dim, batch=batch, seed=seed))


@pytest.mark.parametrize("length", [65, 300])
@pytest.mark.parametrize("weight_scale", ["block", "row", "fixed"])
@pytest.mark.parametrize("sink_size", [0, 1, 4])
def test_every_weight_scale_follows_the_formula(weight_scale: str, sink_size: int, length: int) -> None:
    assert_as_naive(case(3, 1, length, routes=[0, 1, 2]), weight_scale=weight_scale, sink_size=sink_size)


@pytest.mark.parametrize("block", [1, 16, 50, 1000])
def test_blocks_of_any_length_follow_the_formula(block: int) -> None:
    assert_as_naive(case(queries=65), block=block)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 130), (5, 66), (70, 70), (9, 3)])
def test_without_a_mask_the_last_query_sees_every_key(queries: int, keys: int, causal: bool) -> None:
    """Decoding: fewer queries than keys. More queries than keys leave the first ones with nothing to see."""
    arguments = case(queries=queries, keys=keys, batch=2)
    out = assert_as_naive(arguments, causal=causal)
    if causal:
        with_mask = sink_attention(**arguments, mask=causal_mask(queries, keys))
        torch.testing.assert_close(out, with_mask, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask_batch", [1, 3])
def test_any_mask_follows_the_formula(mask_batch: int) -> None:
    """Random visibility, with rows that see nothing."""
    mask = torch.rand(mask_batch, 1, 70, 90, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, 0, :3] = False
    out = assert_as_naive(case(queries=70, keys=90, batch=3), mask=mask)
    assert out[0, :, :3].abs().max() == 0


def test_sliding_window_follows_the_formula() -> None:
    window = causal_mask(200, 200) & ~causal_mask(200, 200).tril(-20)
    assert_as_naive(case(queries=200), mask=window, sink_size=4)


@pytest.mark.parametrize("gone", [1, 3, 4, 100])
def test_sinks_that_left_a_sliding_cache_are_no_longer_split_off(gone: int) -> None:
    arguments = case(3, 3, 5, 80, batch=2, routes=[0, 1, 2])
    out = assert_as_naive(arguments, sink_size=4, sink_start=torch.tensor([-gone, 0]))
    if gone >= 4:
        as_int8 = sink_attention(**{**arguments, "routes": torch.tensor([0, 0, 2])}, sink_size=4)
        torch.testing.assert_close(out[0], as_int8[0])


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"clip_row": torch.tensor([0.5, 2.0, 8.0, torch.inf])},
        {"clip_absolute": torch.tensor([0.5, 2.0, 8.0, torch.inf])},
        {"s_aux": torch.tensor([-3.0, 0.0, 1.0, 30.0])},
        {"softcap": 5.0, "clip_row": torch.full((4,), 3.0), "s_aux": torch.ones(4), "sink_size": 4},
        {"clip_row": torch.full((4,), 3.0), "clip_absolute": torch.full((4,), 2.0), "weight_scale": "row"},
    ],
    ids=lambda options: "+".join(options),
)
def test_limits_on_scores_follow_the_formula(options: dict[str, Any]) -> None:
    for seed in range(3):
        assert_as_naive(case(queries=70, batch=2, seed=seed), **options)


def test_value_heads_may_have_their_own_width() -> None:
    arguments = case(queries=30)
    arguments["value"] = torch.randn(1, 2, 30, 24, dtype=torch.double)
    assert assert_as_naive(arguments).shape == (1, 4, 30, 24)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_native_heads_are_plain_attention(scale: float) -> None:
    arguments = case(9, 3, 100, dim=64, batch=2, routes=[NATIVE] * 9)
    arguments["query"] *= scale
    expected = scaled_dot_product_attention(
        arguments["query"], arguments["key"], arguments["value"], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(sink_attention(**arguments), expected, rtol=1e-10, atol=1e-12)


def test_every_key_a_sink_is_native() -> None:
    arguments = case(queries=50, routes=[SINK] * 4)
    native = {**arguments, "routes": torch.full((4,), NATIVE)}
    torch.testing.assert_close(sink_attention(**arguments, sink_size=50), sink_attention(**native))


def test_a_head_does_not_depend_on_the_routes_of_others() -> None:
    mixed = case(6, 2, 70, routes=[0, 1, 2, 2, 1, 0])
    out = sink_attention(**mixed)
    for route in Route:
        alone = sink_attention(**{**mixed, "routes": torch.full((6,), route)})
        same = mixed["routes"] == route
        torch.testing.assert_close(out[:, same], alone[:, same], rtol=1e-12, atol=1e-12)


def test_long_inputs_pass_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = case(queries=100, batch=2)
    whole = sink_attention(**arguments)
    monkeypatch.setattr(import_module("quantsink.kernels.sink_attention.reference"), "TILE", 1)
    torch.testing.assert_close(sink_attention(**arguments), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sink_attention(**arguments, mask=causal_mask(100, 100)), whole, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation under it returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("masked", [True, False])
def test_scores_of_all_queries_never_exist_at_once(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the inputs take (and a mask of one head), memory is bounded by the tile."""
    length, heads = 1024, 6
    monkeypatch.setattr(import_module("quantsink.kernels.sink_attention.reference"), "TILE", 2**18)
    arguments = case(heads, 2, length, dim=32, routes=[0, 1, 2] * 2, dtype=torch.float)
    call = Call.of(**arguments, mask=causal_mask(length, length) if masked else None)
    with Largest() as largest:
        reference(call)
    assert largest.elements <= max(2**18, heads * length * 32, masked * length * length)
    assert largest.elements < heads * length * length // 4


# Hard inputs.


def test_scores_of_ninety_stay_finite() -> None:
    arguments = case(queries=70, dtype=torch.float)
    extreme = arguments["query"] @ arguments["key"].repeat_interleave(2, 1).transpose(-1, -2) * arguments["scaling"]
    arguments["query"] *= 90 / extreme.abs().max()
    out = sink_attention(**arguments)
    assert out.isfinite().all()
    assert_as_naive({n: x.double() if isinstance(x, Tensor) and n != "routes" else x for n, x in arguments.items()})


@pytest.mark.parametrize("place", [0, 30, 69])
def test_one_key_a_thousand_times_larger_costs_only_itself(place: int) -> None:
    """Keys are scaled per token: the others keep their precision."""
    arguments = case(queries=70)
    arguments["key"][:, :, place] *= 1000
    assert_as_naive(arguments)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_scores_far_below_zero_beside_a_hidden_block_stay_finite(dtype: torch.dtype) -> None:
    """Row 0 sees one key, whose score is -2000; nothing of the second block."""
    arguments = case(2, 1, 70, routes=[INT8, SINK], dtype=dtype)
    arguments["key_mean"][:] = 0
    arguments["key"][:, :, 0] = -2000 * 16**0.5
    arguments["query"][:, :, 0] = 1 / 16
    out = sink_attention(**arguments, block=32)
    torch.testing.assert_close(out[0, :, 0], arguments["value"][0, 0, :1].expand(2, -1), rtol=0.01, atol=0.02)


@pytest.mark.parametrize("what", ["query", "key", "value", "key_mean"])
def test_zero_tensors_give_no_nan(what: str) -> None:
    arguments = case(queries=70)
    arguments[what][:] = 0
    assert assert_as_naive(arguments).isfinite().all()


def test_zero_rows_give_no_nan() -> None:
    arguments = case(queries=70)
    for name in ("query", "key", "value"):
        arguments[name][:, :, 10:20] = 0
    assert assert_as_naive(arguments).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"s_aux": torch.ones(4)}, {"clip_row": torch.ones(4)}, {"softcap": 5.0}])
def test_rows_that_see_nothing_are_zero(options: dict[str, Any]) -> None:
    out = sink_attention(**case(queries=20), mask=torch.zeros(1, 1, 20, 20, dtype=torch.bool), **options)
    assert (out == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_pads_hold_never_reaches_a_real_token(side: str, poison: float) -> None:
    start, length = torch.tensor([0, 13, 30]), 70
    if side == "left":
        real, mask = torch.arange(length) >= start[:, None], left_padded(start, length)
    else:
        real = torch.arange(length) < length - start[:, None]
        mask = causal_mask(length, length) & real[:, None, None]
    options = {"mask": mask, "sink_start": start if side == "left" else None, "sink_size": 4}
    arguments = case(queries=length, batch=3, dtype=torch.float)
    clean = sink_attention(**arguments, **options)
    pad = ~real[:, None, :, None]
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].masked_fill(pad, poison)
    out = sink_attention(**arguments, **options).masked_fill(pad, 0)
    assert torch.equal(out, clean.masked_fill(pad, 0))


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("weight_scale", ["block", "row", "fixed"])
def test_left_padding_is_as_no_padding(weight_scale: str, with_mask: bool) -> None:
    start, length = torch.tensor([0, 13, 68]), 90
    padded = case(queries=length, batch=3)
    mask = left_padded(start, length) if with_mask else None
    out = assert_as_naive(padded, mask=mask, sink_start=start, sink_size=4, weight_scale=weight_scale)
    for b, first in enumerate(start.tolist()):
        short = {n: x[b : b + 1, :, first:] if n in ("query", "key", "value") else x for n, x in padded.items()}
        alone = sink_attention(**short, sink_size=4, weight_scale=weight_scale)
        torch.testing.assert_close(out[b : b + 1, :, first:], alone, rtol=1e-12, atol=1e-12)


def test_left_padding_in_decoding_is_as_no_padding() -> None:
    start = torch.tensor([20, 0])
    step = case(queries=1, keys=90, batch=2)
    mask = (torch.arange(90) >= start[:, None])[:, None, None]
    out = assert_as_naive(step, mask=mask, sink_start=start)
    short = {**step, "query": step["query"][:1], "key": step["key"][:1, :, 20:], "value": step["value"][:1, :, 20:]}
    torch.testing.assert_close(out[:1], sink_attention(**short), rtol=1e-12, atol=1e-12)


def test_a_nan_in_a_real_token_stays_visible() -> None:
    for name in ("query", "key", "value"):
        arguments = case(queries=70, routes=[0, 1, 2, 2])
        arguments[name][:, :, 20, 3] = torch.nan
        out = sink_attention(**arguments)
        assert out[:, :, 20].isnan().any(-1).all(), name
