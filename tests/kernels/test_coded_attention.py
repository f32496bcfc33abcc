"""`quantsink::coded_attention`: its codes, its reference beside plain attention, its C++ kernels in the budget."""

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantsink.kernels import Route
from quantsink.kernels.coded_attention import CodedKV, coded_attention, cpu
from quantsink.kernels.coded_attention import reference as coded_reference
from quantsink.kernels.coded_attention.codes import BLOCK, asymmetric, pack, spread, unpack
from quantsink.kernels.cpu import library
from quantsink.kernels.sink_attention import cpu as sink_cpu
from quantsink.kernels.sink_attention.reference import Rule

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE
SEEDS = 6


def instruction_sets() -> list[str]:
    """Those that this processor has."""
    kernels = library()
    if kernels is None:
        return []
    best = kernels.isa()
    names = [name for name in ("avx512bf16", "avx512", "avx2", "portable") if kernels.select_isa(name)]
    kernels.select_isa(best)
    return names


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One instruction set; workspaces full of NaN and no way back to the reference."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the C++ kernels were not used")

    kernels = library()
    assert kernels is not None
    before, threads = kernels.isa(), torch.get_num_threads()
    assert kernels.select_isa(request.param)
    monkeypatch.setattr(sink_cpu, "poison", True)
    monkeypatch.setattr(cpu, "reference", refuse)
    yield str(request.param)
    kernels.select_isa(before)
    torch.set_num_threads(threads)


def case(
    seed: int = 0,
    batch: int = 1,
    heads: int = 6,
    kv_heads: int = 2,
    queries: int = 1,
    keys: int = 500,
    dim: int = 64,
    value_dim: int | None = None,
    bits: int = 8,
    sinks: int = 1,
    newest: int = 64,
    dtype: torch.dtype = torch.float,
) -> tuple[Tensor, CodedKV, Tensor, Tensor]:
    """Query, codes, and the keys and values they stand for."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, queries, dim, generator=generator).to(dtype)
    key = torch.randn(batch, kv_heads, keys, dim, generator=generator)
    key = (key + 2 * torch.randn(1, kv_heads, 1, dim, generator=generator)).to(dtype)
    value = torch.randn(batch, kv_heads, keys, value_dim or dim, generator=generator).to(dtype)
    return query, CodedKV.encode(key, value, bits=bits, sinks=sinks, newest=newest), key, value


def as_reference(query: Tensor, codes: CodedKV, routes: Tensor, **options: Any) -> Tensor:
    given = {"scaling": query.shape[-1] ** -0.5, "causal": True, "softcap": 0.0, **options}
    bounds = (given.get(name) for name in ("clip_row", "clip_absolute", "s_aux"))
    rule = Rule(given["scaling"], codes.sinks, given["causal"], "block", BLOCK, given["softcap"], *bounds)
    return coded_reference(query, codes, given.get("mask"), routes, rule)


def run(numerics: ModuleType, query: Tensor, codes: CodedKV, routes: Tensor, **options: Any) -> Tensor:
    with numerics.poisoned_memory():
        return coded_attention(query, codes, routes=routes, **{"scaling": query.shape[-1] ** -0.5, **options})


def hold_to_budget(
    numerics: ModuleType, routes: list[int], options: dict[str, Any] | None = None, **sizes: Any
) -> None:
    """Kernel against reference in float64 and in the tensors' own type, over several seeds."""
    options, picked = options or {}, torch.tensor(routes, dtype=torch.uint8)
    cases = []
    for seed in range(SEEDS):
        query, codes, *_ = case(seed, heads=len(routes), **sizes)
        truth = as_reference(query.double(), codes, picked, **options)
        cases.append(
            (run(numerics, query, codes, picked, **options), as_reference(query, codes, picked, **options), truth)
        )
    numerics.assert_pool_within_budget(cases)


# ---- the codes


@pytest.mark.parametrize("bits", [8, 4])
def test_packing_loses_nothing_and_takes_the_stated_bytes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 4, 64, 48), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, 4, 64 * 48 * bits // 8)
    assert torch.equal(unpack(packed, bits, 48), codes)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 192), (64, 32)])
def test_a_number_is_off_by_half_a_step_at_most(bits: int, dims: tuple[int, int]) -> None:
    _, codes, key, value = case(bits=bits, dim=dims[0], value_dim=dims[1])
    assert len(codes) == key.shape[2]
    blocks = codes.key_codes.shape[2]
    middle = slice(1, 1 + blocks * BLOCK)

    step, zero = codes.key_scale.float()[..., None], codes.key_zero.float()[..., None]
    decoded = (unpack(codes.key_codes, bits, BLOCK) * step + zero).transpose(3, 4).flatten(2, 3)
    # float16 rounds scale and zero point: a little more than half a step.
    bound = (
        (0.5 * step + 2e-3 * (step * 2**bits + zero.abs())).transpose(3, 4).expand(-1, -1, -1, BLOCK, -1).flatten(2, 3)
    )
    assert bool(((decoded - key[:, :, middle]).abs() <= bound).all())

    step, zero = (spread(x.float(), dims[1]) for x in (codes.value_scale, codes.value_zero))
    decoded = (unpack(codes.value_codes, bits, dims[1]) * step + zero).flatten(2, 3)
    bound = (0.5 * step + 2e-3 * (step * 2**bits + zero.abs())).flatten(2, 3)
    assert bool(((decoded - value[:, :, middle]).abs() <= bound).all())


def test_exact_keys_are_kept_to_the_bit_and_every_key_is_somewhere() -> None:
    for keys in (1, 5, 64, 65, 128, 129, 193, 700):
        _, codes, key, value = case(keys=keys, sinks=4, newest=64)
        blocks = codes.key_codes.shape[2]
        assert len(codes) == keys
        assert blocks == max(keys - 4 - 64, 0) // 64
        rest = min(4, keys) + blocks * BLOCK
        assert torch.equal(codes.exact_key, torch.cat([key[:, :, :4], key[:, :, rest:]], 2))
        assert torch.equal(codes.exact_value, torch.cat([value[:, :, :4], value[:, :, rest:]], 2))


def test_a_constant_row_is_exact_and_has_no_scale() -> None:
    codes, scale, zero = asymmetric(torch.full((1, 1, 1, 64, 8), 3.5), 4, 3)
    assert not codes.any()
    assert not scale.any()
    assert bool((zero == 3.5).all())


def test_four_bits_take_a_seventh_more_than_half_of_eight() -> None:
    sizes = {
        bits: sum(
            getattr(codes, f.name).nbytes for f in dataclasses.fields(codes) if f.name.startswith(("key", "value"))
        )
        for bits in (8, 4)
        for codes in [case(bits=bits, keys=4096 + 65)[1]]
    }
    assert sizes[8] == 2 * 2 * 4096 * 64 * (1 + 4 / 64)
    assert sizes[4] == 2 * 2 * 4096 * 64 * (0.5 + 4 / 64)


# ---- the reference


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.2)])
@pytest.mark.parametrize("route", [INT8, NATIVE])
def test_the_reference_is_attention_over_what_the_codes_stand_for(bits: int, most: float, route: Route) -> None:
    query, codes, key, value = case(bits=bits, queries=3, keys=400)
    # Sharp attention: of a flat one little is left but the weights' rounding.
    out = as_reference(3 * query.double(), codes, torch.full((6,), int(route), dtype=torch.uint8))
    mask = torch.ones(3, 400, dtype=torch.bool).tril(397)
    k, v = (x.double().repeat_interleave(3, 1) for x in (key, value))
    plain = scaled_dot_product_attention(3 * query.double(), k, v, attn_mask=mask)
    assert float((out - plain).norm() / plain.norm()) < most


def test_native_heads_compute_with_the_decoded_numbers_exactly() -> None:
    query, codes, *_ = case(bits=4, keys=300, queries=2)
    step, zero = codes.key_scale.double()[..., None], codes.key_zero.double()[..., None]
    key = (unpack(codes.key_codes, 4, BLOCK) * step + zero).transpose(3, 4).flatten(2, 3)
    step, zero = (spread(x.double(), 64) for x in (codes.value_scale, codes.value_zero))
    value = (unpack(codes.value_codes, 4, 64) * step + zero).flatten(2, 3)
    exact = codes.exact_key.double(), codes.exact_value.double()
    key, value = (torch.cat([e[:, :, :1], m, e[:, :, 1:]], 2) for e, m in zip(exact, (key, value), strict=True))
    mask = torch.ones(2, 300, dtype=torch.bool).tril(298)
    plain = scaled_dot_product_attention(
        query.double(), key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=mask
    )
    out = as_reference(query.double(), codes, torch.full((6,), 2, dtype=torch.uint8))
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)


# ---- the kernels


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "routes", [[0] * 6, [1] * 6, [2] * 6, [0, 1, 2, 2, 0, 1]], ids=["int8", "sink", "native", "mixed"]
)
def test_routes(numerics: ModuleType, isa: str, routes: list[int], bits: int, dtype: torch.dtype) -> None:
    hold_to_budget(numerics, routes, bits=bits, dtype=dtype, queries=3, keys=400)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (128, 128), (256, 256), (64, 32), (128, 192)])
def test_head_sizes(numerics: ModuleType, isa: str, dims: tuple[int, int], bits: int) -> None:
    hold_to_budget(numerics, [0, 0, 2, 0], bits=bits, dim=dims[0], value_dim=dims[1], kv_heads=2, queries=2, keys=300)


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("keys", [33, 64, 65, 129, 1000])
def test_lengths(numerics: ModuleType, isa: str, queries: int, keys: int) -> None:
    hold_to_budget(numerics, [0, 0, 0, 2, 2, 0], queries=queries, keys=keys, batch=2, bits=4)


@pytest.mark.parametrize("kv_heads", [1, 3, 9])
def test_grouped_queries(numerics: ModuleType, isa: str, kv_heads: int) -> None:
    hold_to_budget(numerics, [0, 0, 2, 0, 0, 2, 0, 0, 0], kv_heads=kv_heads, queries=8, keys=300)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "clip_row": {"clip_row": torch.tensor([4.0, torch.inf, 3.0, 4.0, torch.inf, 3.0])},
    "clip_absolute": {"clip_absolute": torch.tensor([1.0, torch.inf, 2.0, 1.0, torch.inf, 2.0])},
    "s_aux": {"s_aux": torch.linspace(-2, 3, 6)},
    "not causal": {"causal": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(numerics: ModuleType, isa: str, name: str) -> None:
    hold_to_budget(numerics, [0, 0, 0, 2, 0, 2], OPTIONS[name], queries=3, keys=300, sinks=4)


@pytest.mark.parametrize("broadcast", [False, True])
def test_masks_and_rows_that_see_nothing(numerics: ModuleType, isa: str, broadcast: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(1 if broadcast else 3, 1, 4, 300, generator=generator) < 0.4
    mask[0, 0, 1] = False
    hold_to_budget(numerics, [0, 0, 2, 0, 0, 2], {"mask": mask}, queries=4, keys=300, batch=3)
    query, codes, *_ = case(queries=4, keys=300, batch=3)
    out = run(numerics, query, codes, torch.tensor([0, 0, 2, 0, 0, 2], dtype=torch.uint8), mask=mask)
    assert not out[0, :, 1].any()


def test_threads_agree(numerics: ModuleType, isa: str) -> None:
    query, codes, *_ = case(keys=5000, queries=2)
    routes = torch.tensor([0, 2, 0, 0, 2, 0], dtype=torch.uint8)
    truth, yardstick = as_reference(query.double(), codes, routes), as_reference(query, codes, routes)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        numerics.assert_pool_within_budget([(run(numerics, query, codes, routes), yardstick, truth)])


def test_zeros_and_large_scores(numerics: ModuleType, isa: str) -> None:
    query, codes, key, value = case(keys=300)
    routes = torch.tensor([0, 2, 0, 0, 2, 0], dtype=torch.uint8)
    flat = run(numerics, torch.zeros_like(query), codes, routes)
    assert bool(flat.isfinite().all())
    torch.testing.assert_close(
        flat[0, 1, 0], as_reference(torch.zeros_like(query), codes, routes)[0, 1, 0], rtol=1e-5, atol=1e-5
    )
    nothing = run(numerics, query, CodedKV.encode(torch.zeros_like(key), torch.zeros_like(value), bits=8), routes)
    assert not nothing.any()
    large = query * (90 / (query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.125).abs().max())
    truth, yardstick = as_reference(large.double(), codes, routes), as_reference(large, codes, routes)
    numerics.assert_pool_within_budget([(run(numerics, large, codes, routes), yardstick, truth)])


def test_a_number_that_is_not_finite_is_seen(numerics: ModuleType, isa: str) -> None:
    query, codes, *_ = case(keys=300)
    routes = torch.zeros(6, dtype=torch.uint8)
    query[0, 2, 0, 7] = torch.nan
    codes.exact_value[0, 1, 3, 5] = torch.inf
    out = run(numerics, query, codes, routes)
    assert not out[0, 2].isfinite().any()
    assert not out[0, 3:].isfinite().all(-1).any()
    assert bool(out[0, :2].isfinite().all())


# ---- the operator


def test_opcheck_and_compile() -> None:
    query, codes, *_ = case(keys=200)
    routes = torch.zeros(6, dtype=torch.uint8)
    tensors = [getattr(codes, f.name) for f in dataclasses.fields(codes) if f.name not in ("bits", "sinks")]
    torch.library.opcheck(
        torch.ops.quantsink.coded_attention.default,
        (query, *tensors, None, routes, None, None, None),
        {"bits": 8, "sinks": 1, "scaling": 0.125, "causal": True, "softcap": 0.0},
    )

    def call(query: Tensor) -> Tensor:
        return coded_attention(query, codes, routes=routes, scaling=0.125) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), call(query))


def test_half_precision_and_double() -> None:
    query, codes, *_ = case(keys=200)
    routes = torch.zeros(6, dtype=torch.uint8)
    for dtype in (torch.float16, torch.float64):
        out = coded_attention(query.to(dtype), codes, routes=routes, scaling=0.125)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), as_reference(query, codes, routes), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "8 or 4 bits, not 5"),
        ({"sinks": 500}, "500 sinks among"),
        ({"key_scale": torch.ones(1, 2, 3, 64)}, "key_scale must be"),
        ({"value_codes": torch.ones(1, 2, 6, 4096)}, "value_codes must be uint8"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    query, codes, *_ = case(keys=500)
    with pytest.raises(ValueError, match=message):
        coded_attention(
            query, dataclasses.replace(codes, **change), routes=torch.zeros(6, dtype=torch.uint8), scaling=1.0
        )


def test_head_sizes_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        CodedKV.encode(torch.zeros(1, 1, 200, 20), torch.zeros(1, 1, 200, 20), bits=8)


@pytest.mark.parametrize("route", [INT8, NATIVE])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_is_seen_through_its_codes(
    numerics: ModuleType, isa: str, bad: float, route: Route
) -> None:
    query, _, key, value = case(keys=400)
    key[0, 1, 100, 3] = bad
    out = run(numerics, query, CodedKV.encode(key, value, bits=8), torch.full((6,), int(route), dtype=torch.uint8))
    assert bool(out[0, :3].isfinite().all())
    assert not out[0, 3:].isfinite().any()


def test_numbers_beyond_float16_saturate() -> None:
    codes, scale, zero = asymmetric(torch.full((1, 1, 1, 64, 8), -1e5), 8, 3)
    assert bool(scale.isfinite().all())
    assert bool((zero == -65504).all())
    assert not codes.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_absolute": torch.ones(1)}, r"clip_absolute must be \[6\]"),
        ({"s_aux": torch.tensor(1.0)}, r"s_aux must be \[6\]"),
        ({"softcap": -5.0}, "softcap -5.0 must not be negative"),
        ({"routes": torch.tensor([0, 1, 2, 3, 0, 0], dtype=torch.uint8)}, "routes must be 0"),
        ({"routes": torch.tensor([0, 1, 2, 258, 0, 0])}, "routes must be 0"),
    ],
)
@pytest.mark.skipif(library() is None, reason="the C++ kernels were not built")
def test_limits_and_routes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    query, codes, *_ = case(keys=300)
    with pytest.raises(ValueError, match=message):
        coded_attention(query, codes, **{"routes": torch.zeros(6, dtype=torch.uint8), "scaling": 1.0, **change})


def test_a_gradient_is_refused() -> None:
    query, codes, *_ = case(keys=300)
    with pytest.raises(ValueError, match="no gradient"):
        coded_attention(query.requires_grad_(), codes, routes=torch.zeros(6, dtype=torch.uint8), scaling=1.0)
