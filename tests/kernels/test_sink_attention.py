"""`quantsink::sink_attention` against a float64 implementation that is written here, straight from the formula."""

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from quantsink.kernels import Route, sink_attention
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE


def rounded(x: np.ndarray, axis: int) -> np.ndarray:
    """The nearest multiples of max|x| / 127 along `axis`."""
    top = np.abs(x).max(axis, keepdims=True)
    scale = np.where(top == 0, 1, top / 127)
    return np.asarray(np.round(x / scale) * scale)


def naive_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    sinks: int,
    mean: np.ndarray,
    scaling: float,
    weight_scale: str,
    block: int,
    softcap: float | None,
    clip_row: float,
    clip_absolute: float,
    aux: float,
) -> np.ndarray:
    """One head, its first `sinks` keys exact: q `[Lq, D]`, k, v `[Lk, D]`, visible `[Lq, Lk]` -> `[Lq, D]`."""
    keys = len(k)
    k_8 = rounded(k - mean, axis=1)
    rest = v.copy()
    rest[:sinks] = 0
    width = block if weight_scale == "block" else keys
    blocks = [slice(first, min(first + width, keys)) for first in range(0, keys, width)]
    v_8 = np.concatenate([rounded(rest[b], axis=0) for b in blocks])

    out = np.zeros((len(q), v.shape[1]))
    for i, row in enumerate(q):
        s = (k_8 @ rounded(row, axis=0) + row @ mean) * scaling
        s[:sinks] = k[:sinks] @ row * scaling
        if softcap:
            s = np.tanh(s / softcap) * softcap
        s = np.clip(s, -clip_absolute, clip_absolute)
        s[~visible[i]] = -np.inf
        if not visible[i].any():
            continue
        s[s < s.max() - clip_row] = -np.inf
        top = s.max()
        weight = np.exp(s - top)
        total = weight.sum() + np.exp(aux - top)
        grid = np.zeros(keys)
        rest_total = weight[sinks:].sum()
        for b in blocks:
            inside = np.arange(keys)[b]
            inside = inside[inside >= sinks]
            if not len(inside) or weight[inside].max() == 0:
                continue
            step = rest_total / 127 if weight_scale == "fixed" else weight[inside].max() / 127
            grid[inside] = np.round(weight[inside] / step) * step
        out[i] = (weight[:sinks] @ v[:sinks] + grid @ v_8) / total
    return out


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    routes: Tensor,
    key_mean: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = True,
    sink_size: int = 1,
    sink_start: Tensor | None = None,
    weight_scale: str = "block",
    block: int = 64,
    softcap: float | None = None,
    clip_row: Tensor | None = None,
    clip_absolute: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    out = torch.empty(batch, heads, queries, value.shape[3], dtype=torch.double)
    for b in range(batch):
        start = 0 if sink_start is None else int(sink_start[b])
        visible = np.ones((queries, keys), dtype=bool)
        if mask is not None:
            visible = mask[b if mask.shape[0] > 1 else 0, 0].numpy()
        elif causal:
            visible = np.tril(visible, keys - queries)
        visible = visible[:, max(start, 0) :]
        for h in range(heads):
            group = h // (heads // kv_heads)
            k, v = (x[b, group, max(start, 0) :].double().numpy().copy() for x in (key, value))
            k[~visible.any(0)] = v[~visible.any(0)] = 0
            sinks = {INT8: 0, SINK: max(sink_size + min(start, 0), 0), NATIVE: len(k)}[Route(int(routes[h]))]
            out[b, h] = torch.from_numpy(
                naive_head(
                    query[b, h].double().numpy(),
                    k,
                    v,
                    visible,
                    min(sinks, len(k)),
                    key_mean[group].double().numpy(),
                    scaling,
                    weight_scale,
                    block,
                    softcap,
                    float("inf") if clip_row is None else float(clip_row[h]),
                    float("inf") if clip_absolute is None else float(clip_absolute[h]),
                    -float("inf") if s_aux is None else float(s_aux[h]),
                )
            )
    return out


def case(
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 40,
    keys: int | None = None,
    dim: int = 16,
    batch: int = 1,
    routes: list[int] | None = None,
    dtype: torch.dtype = torch.double,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments with keys off centre, one channel large, as models have them; routes mixed at random."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.double)  # noqa: E731
    key = draw(batch, kv_heads, keys, dim) + 2 * draw(1, kv_heads, 1, dim)
    key[..., 0] *= 5
    mixed = torch.randint(0, 3, (heads,), generator=generator) if routes is None else torch.tensor(routes)
    return {
        "query": draw(batch, heads, queries, dim).to(dtype),
        "key": key.to(dtype),
        "value": draw(batch, kv_heads, keys, dim).to(dtype),
        "routes": mixed.to(torch.uint8),
        "key_mean": key[:, :, min(1, keys - 1) :].mean((0, 2)),
        "scaling": dim**-0.5,
    }


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


def left_padded(start: Tensor, length: int) -> Tensor:
    return causal_mask(length, length) & (torch.arange(length) >= start[:, None])[:, None, None]


def assert_as_naive(arguments: dict[str, Any], **options: Any) -> Tensor:
    out = sink_attention(**arguments, **options)
    torch.testing.assert_close(out, naive(**arguments, **options), rtol=1e-9, atol=1e-11)
    return out


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


# Behaviour.


def test_a_constant_added_to_keys_and_key_mean_changes_nothing() -> None:
    arguments = case(queries=130, batch=2)
    shift = 20 * torch.randn(2, 16, dtype=torch.double)
    moved = {**arguments, "key": arguments["key"] + shift[:, None], "key_mean": arguments["key_mean"] + shift}
    torch.testing.assert_close(sink_attention(**arguments), sink_attention(**moved), rtol=1e-9, atol=1e-10)


def planted_sink(length: int = 128, height: float = 8.0) -> dict[str, Any]:
    """Every query scores `height` on the first key, which has almost no value: the head has nothing to say."""
    arguments = case(2, 1, length, dim=32)
    arguments["key"] = torch.randn(1, 1, length, 32, dtype=torch.double)
    arguments["key"][..., 0] = 0
    arguments["query"][..., 0] = 32**0.5
    arguments["key"][:, :, 0] = 0
    arguments["key"][:, :, 0, 0] = height
    arguments["value"][:, :, 0] *= 0.01
    arguments["key_mean"] = arguments["key"][:, :, 1:].mean((0, 2))
    return arguments


@pytest.mark.parametrize(("weight_scale", "gain"), [("block", 10), ("row", 10), ("fixed", 5)])
def test_splitting_a_planted_sink_off_lowers_the_error(numerics: ModuleType, weight_scale: str, gain: float) -> None:
    arguments = planted_sink()
    exact, int8, sink = (
        sink_attention(**{**arguments, "routes": torch.full((2,), route)}, weight_scale=weight_scale)
        for route in (NATIVE, INT8, SINK)
    )
    assert numerics.rms_error(sink, exact) * gain < numerics.rms_error(int8, exact)


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [65, 300])
def test_operator_is_within_the_error_budget(numerics: ModuleType, dtype: torch.dtype, length: int) -> None:
    arguments = case(9, 3, length, dim=64, routes=[0, 1, 2] * 3, dtype=dtype)
    yardstick = reference(Call.of(**arguments))
    with numerics.poisoned_memory():
        out = sink_attention(**arguments)
    assert out.dtype == dtype
    truth = numerics.sink_attention_truth(arguments)
    numerics.assert_within_budget(out, yardstick, truth)
    unit = {torch.float: 1e-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert numerics.rms_error(out, truth.out) < unit


def test_float64_stays_float64() -> None:
    assert sink_attention(**case()).dtype == torch.double


def test_inputs_are_left_alone() -> None:
    arguments = case(dtype=torch.float)
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    sink_attention(**arguments, softcap=5.0, clip_row=torch.ones(4), clip_absolute=torch.ones(4))
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


def test_strided_inputs_give_the_same() -> None:
    arguments = case(batch=2)
    strided = {
        n: x.transpose(1, 2).contiguous().transpose(1, 2) if n in ("query", "key", "value") else x
        for n, x in arguments.items()
    }
    torch.testing.assert_close(sink_attention(**strided), sink_attention(**arguments), rtol=1e-12, atol=1e-12)


def test_autocast_does_not_reach_integer_sums() -> None:
    arguments = case(dtype=torch.float)
    with torch.autocast("cpu", torch.bfloat16):
        inside = sink_attention(**arguments)
    assert torch.equal(inside, sink_attention(**arguments))


# Causality. Value scales are per (64-key block, channel), so a later token of the same block can change the rounding of
# an earlier row's values. It cannot change more than that, and nothing beyond its block.


def changed_after(token: int, times: float, weight_scale: str = "block") -> tuple[Tensor, Tensor]:
    """Outputs `[1, 4, 192, 16]` before and after every token beyond `token` was replaced, values `times` larger."""
    before = case(4, 4, 192, routes=[0, 1, 0, 1])
    other = case(4, 4, 192, seed=1)
    after = {**before, "key": before["key"].clone(), "value": before["value"].clone()}
    after["key"][:, :, token + 1 :] = other["key"][:, :, token + 1 :]
    after["value"][:, :, token + 1 :] = other["value"][:, :, token + 1 :] * times
    return tuple(sink_attention(**x, weight_scale=weight_scale) for x in (before, after))  # type: ignore[return-value]


@pytest.mark.parametrize("token", [63, 127])
def test_later_blocks_never_reach_earlier_rows(token: int) -> None:
    before, after = changed_after(token, times=100)
    assert torch.equal(before[:, :, : token + 1], after[:, :, : token + 1])


def test_native_heads_are_causal_to_the_bit() -> None:
    before = case(4, 4, 192, routes=[NATIVE] * 4)
    after = {**before, "value": before["value"].clone()}
    after["value"][:, :, 101:] *= 100
    assert torch.equal(sink_attention(**before)[:, :, :101], sink_attention(**after)[:, :, :101])


@pytest.mark.parametrize(("times", "bound"), [(1, 0.01), (10, 0.1), (100, 1.0)])
def test_later_tokens_of_a_block_only_change_the_rounding_of_values(
    numerics: ModuleType, times: float, bound: float
) -> None:
    """RMS over rows 64..100: below 1 % where later values are of the same size, and at most in proportion to them."""
    before, after = changed_after(100, times)
    assert torch.equal(before[:, :, :64], after[:, :, :64])
    assert 0 < numerics.rms_error(after[:, :, 64:101], before[:, :, 64:101]) < bound


@pytest.mark.parametrize("weight_scale", ["row", "fixed"])
def test_without_blocks_rounding_depends_on_the_whole_sequence(numerics: ModuleType, weight_scale: str) -> None:
    before, after = changed_after(100, times=1, weight_scale=weight_scale)
    assert 0 < numerics.rms_error(after[:, :, :64], before[:, :, :64]) < 0.02


# The contract.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"routes": torch.zeros(3)}, "routes"),
        ({"routes": torch.tensor([0, 1, 2, 3])}, "routes"),
        ({"routes": torch.tensor([0, 1, 2, -1])}, "routes"),
        ({"key_mean": torch.zeros(2, 8)}, "key_mean"),
        ({"key": torch.zeros(1, 3, 40, 16)}, "KV heads"),
        ({"key": torch.zeros(1, 2, 39, 16)}, "value"),
        ({"key": torch.zeros(1, 2, 40, 8)}, "key"),
        ({"key": torch.zeros(1, 2, 0, 16), "value": torch.zeros(1, 2, 0, 16)}, "no keys"),
        ({"query": torch.zeros(4, 40, 16)}, "query"),
        ({"mask": torch.zeros(1, 1, 40, 40)}, "boolean"),
        ({"mask": torch.ones(1, 1, 40, 41, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(1, 4, 40, 40, dtype=torch.bool)}, "mask"),
        ({"weight_scale": "tensor"}, "block, row, fixed"),
        ({"block": 0}, "block"),
        ({"sink_size": -1}, "sink_size"),
        ({"sink_start": torch.zeros(2)}, "sink_start"),
        ({"clip_row": torch.ones(3)}, "clip_row"),
        ({"clip_absolute": torch.ones(1)}, "clip_absolute"),
        ({"s_aux": torch.ones(3)}, "s_aux"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sink_attention(**{**case(), **wrong})


def operator_call(arguments: dict[str, Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(Call.of(**arguments, **options)), {}


@pytest.mark.parametrize("full", [True, False])
def test_operator_is_registered_as_torch_expects(full: bool) -> None:
    options: dict[str, Any] = {}
    if full:
        options = {
            "mask": left_padded(torch.tensor([0, 3]), 20),
            "sink_start": torch.tensor([0, 3]),
            "clip_row": torch.ones(4),
            "clip_absolute": torch.ones(4),
            "s_aux": torch.ones(4),
        }
    args, kwargs = operator_call(case(queries=20, batch=2, dtype=torch.float), **options)
    torch.library.opcheck(torch.ops.quantsink.sink_attention.default, args, kwargs)


def test_fake_tensors_pass_through() -> None:
    arguments = case(queries=20, batch=2, dtype=torch.bfloat16)
    real = sink_attention(**arguments)
    with FakeTensorMode() as mode:
        fake = sink_attention(**{n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()})
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_compiled_code_holds_the_operator_in_one_graph() -> None:
    arguments = case(queries=20, dtype=torch.float)
    query = arguments.pop("query")
    compiled = torch.compile(lambda q: sink_attention(q, **arguments) * 2, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), sink_attention(query, **arguments) * 2)
