"""`quantsink::coded_attention`: its codes, its reference beside plain attention, its C++ kernels in the budget."""

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quantsink.kernels import Route, cpu
from quantsink.kernels.coded_attention import CodedKV, coded_attention
from quantsink.kernels.coded_attention import reference as coded_reference
from quantsink.kernels.coded_attention.call import Call
from quantsink.kernels.coded_attention.codes import (
    BLOCK,
    WIDTHS,
    Record,
    asymmetric,
    decode,
    encode,
    pack,
    packed_bytes,
    spread,
    unpack,
    unpack_record,
)
from quantsink.kernels.cpu import library

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
    monkeypatch.setattr(cpu, "poison", True)
    # The package hides behind the function of the same name.
    monkeypatch.setattr(import_module("quantsink.kernels.coded_attention"), "reference", refuse)
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
    bits: int | tuple[int, ...] = 8,
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


def ragged(codes: CodedKV, counts: list[list[int]]) -> CodedKV:
    """Rows that use so many sinks, newest tokens and blocks of each bank; all else is garbage, NaN among it."""
    banks, key, value, sink_key, sink_value = (
        [bank.clone() for bank in codes.banks],
        *(x.clone() for x in (codes.key, codes.value, codes.sink_key, codes.sink_value)),
    )
    for b, (sinks, newest, *blocks) in enumerate(counts):
        for bank, used in zip(banks, blocks, strict=True):
            bank[b, :, used:] = 255
        for x in (key, value):
            x[b, :, : x.shape[2] - newest] = torch.nan
        for x in (sink_key, sink_value):
            x[b, :, sinks:] = torch.nan
    rows = torch.tensor(counts)
    return CodedKV(sink_key, sink_value, key, value, tuple(banks), codes.bits, codes.heads, rows)


def as_reference(query: Tensor, codes: CodedKV, routes: Tensor, **options: Any) -> Tensor:
    return coded_reference(Call.of(query, codes, routes, **{"scaling": query.shape[-1] ** -0.5, **options}))


def run(numerics: ModuleType, query: Tensor, codes: CodedKV, routes: Tensor, **options: Any) -> Tensor:
    with numerics.poisoned_memory():
        return coded_attention(query, codes, routes=routes, **{"scaling": query.shape[-1] ** -0.5, **options})


def hold_to_budget(
    numerics: ModuleType,
    routes: list[int],
    options: dict[str, Any] | None = None,
    counts: list[list[int]] | None = None,
    seeds: int = SEEDS,
    **sizes: Any,
) -> None:
    """Kernel against reference in float64 and in the tensors' own type, over several seeds."""
    options, picked = options or {}, torch.tensor(routes, dtype=torch.uint8)
    cases = []
    for seed in range(seeds):
        query, codes, *_ = case(seed, heads=len(routes), **sizes)
        if counts:
            codes = ragged(codes, counts)
        truth = numerics.coded_attention_truth(query, codes, picked, **options)
        cases.append(
            (run(numerics, query, codes, picked, **options), as_reference(query, codes, picked, **options), truth)
        )
    numerics.assert_pool_within_budget(cases)


def stands_for(codes: CodedKV, b: int, head: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one row's KV head, in their order and in float64."""
    (bank, place), (sinks, newest, *blocks) = codes.heads[head].tolist(), codes.rows[b].tolist()
    layout = Record(codes.bits[bank], codes.key.shape[3], codes.value.shape[3])
    parts = unpack_record(codes.banks[bank][b, place, : blocks[bank]], layout)
    key, key_scale, key_zero, value, value_scale, value_zero = (x.double() for x in parts)
    middle_key = (key * key_scale[..., None] + key_zero[..., None]).transpose(1, 2).flatten(0, 1)
    wide = [spread(x, layout.value_dim) for x in (value_scale, value_zero)]
    middle_value = (value * wide[0] + wide[1]).flatten(0, 1)
    columns = codes.key.shape[2] - newest
    return (
        torch.cat([codes.sink_key[b, head, :sinks].double(), middle_key, codes.key[b, head, columns:].double()]),
        torch.cat([codes.sink_value[b, head, :sinks].double(), middle_value, codes.value[b, head, columns:].double()]),
    )


def plain(query: Tensor, codes: CodedKV, row: int, head: int) -> Tensor:
    """Attention `[Lq, Dv]` of one head over what the codes stand for."""
    key, value = stands_for(codes, row, head // (query.shape[1] // codes.key.shape[1]))
    mask = torch.ones(query.shape[2], len(key), dtype=torch.bool).tril(len(key) - query.shape[2])
    mask[:, : len(key) - int(codes.rows[row, 1])] = True
    out = scaled_dot_product_attention(query[row, head][None].double(), key[None], value[None], attn_mask=mask[None])
    return torch.where(mask.any(-1, keepdim=True), out[0], 0)


# ---- the codes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("rows", [64, 48, 80, 8])
def test_packing_loses_nothing_and_takes_the_stated_bytes(rows: int, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, rows, 48), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, packed_bytes(rows // 4, 48, bits))
    assert torch.equal(unpack(packed, bits, rows, 48), codes)
    if rows == 64:
        assert packed.shape[2] == rows * 48 * bits // 8


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 192), (64, 32)])
def test_a_number_is_off_by_half_a_step_at_most(bits: int, dims: tuple[int, int]) -> None:
    key, value = torch.randn(2, 3, BLOCK, dims[0]), torch.randn(2, 3, BLOCK, dims[1])
    layout = Record(bits, *dims)
    records = encode(key, value, bits)
    assert records.shape == (2, 3, layout.nbytes)
    _, key_scale, key_zero, _, value_scale, value_zero = unpack_record(records, layout)
    found_key, found_value = decode(records, layout)

    def bound(step: Tensor, zero: Tensor) -> Tensor:
        # float16 rounds scale and zero point: a little more than half a step. Two bits cut the tails off.
        return (0.5 if bits > 2 else 4) * step + 2e-3 * (step * 2**bits + zero.abs())

    assert bool(((found_key - key).abs() <= bound(key_scale.float(), key_zero.float())[..., None, :]).all())
    wide = [spread(x.float(), dims[1]) for x in (value_scale, value_zero)]
    assert bool(((found_value - value).abs() <= bound(*wide)).all())


def test_exact_keys_are_kept_to_the_bit_and_every_key_is_somewhere() -> None:
    for keys in (1, 5, 64, 65, 128, 129, 193, 700):
        _, codes, key, value = case(keys=keys, sinks=4, newest=64, bits=(8, 3))
        blocks = max(keys - 4 - 64, 0) // 64
        sinks = 4 if blocks else 0
        assert codes.rows.tolist() == [[sinks, keys - sinks - 64 * blocks, blocks, blocks]]
        assert torch.equal(codes.sink_key, key[:, :, :sinks])
        assert torch.equal(codes.sink_value, value[:, :, :sinks])
        assert torch.equal(codes.key, key[:, :, sinks + 64 * blocks :])
        assert torch.equal(codes.value, value[:, :, sinks + 64 * blocks :])
        assert [bank.shape[:3] for bank in codes.banks] == [(1, 1, blocks)] * 2
        assert torch.equal(codes.banks[1], encode(*(_blocks(x[:, 1:], sinks, blocks) for x in (key, value)), 3))


def _blocks(x: Tensor, first: int, blocks: int) -> Tensor:
    return x[:, :, first : first + blocks * BLOCK].unflatten(2, (blocks, BLOCK))


def test_heads_of_one_width_stand_together() -> None:
    _, codes, *_ = case(heads=10, kv_heads=5, bits=(4, 2, 4, 8, 2))
    assert codes.bits == (4, 2, 8)
    assert codes.heads.tolist() == [[0, 0], [1, 0], [0, 1], [2, 0], [1, 1]]
    assert [bank.shape[1] for bank in codes.banks] == [2, 2, 1]


def test_a_constant_row_is_exact_and_has_no_scale() -> None:
    codes, scale, zero = asymmetric(torch.full((1, 1, 1, 64, 8), 3.5), 4, 3)
    assert not codes.any()
    assert not scale.any()
    assert bool((zero == 3.5).all())


def test_a_number_takes_its_bits_and_half_a_bit_of_scales() -> None:
    for bits in WIDTHS:
        assert Record(bits, 64, 64).bits_per_number == bits + 0.5
        (bank,) = case(bits=bits, keys=4096 + 65)[1].banks
        assert bank.nbytes * 8 == 2 * 2 * 4096 * 64 * (bits + 0.5)


# ---- the reference


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.2), (3, 0.4)])
@pytest.mark.parametrize("route", [INT8, NATIVE])
def test_the_reference_is_attention_over_what_was_encoded(bits: int, most: float, route: Route) -> None:
    query, codes, key, value = case(bits=bits, queries=3, keys=400)
    # Sharp attention: of a flat one little is left but the weights' rounding.
    out = as_reference(3 * query.double(), codes, torch.full((6,), int(route), dtype=torch.uint8))
    mask = torch.ones(3, 400, dtype=torch.bool).tril(397)
    k, v = (x.double().repeat_interleave(3, 1) for x in (key, value))
    truth = scaled_dot_product_attention(3 * query.double(), k, v, attn_mask=mask)
    assert float((out - truth).norm() / truth.norm()) < most


@pytest.mark.parametrize("bits", [(8, 8), (4, 3), (2, 4), (3, 2)])
@pytest.mark.parametrize("keys", [300, 2500])
def test_native_heads_compute_with_the_decoded_numbers_exactly(keys: int, bits: tuple[int, int]) -> None:
    query, codes, *_ = case(batch=3, bits=bits, keys=keys, queries=70, sinks=3, newest=80)
    blocks = codes.rows[0, 2].item()
    banks = len(codes.banks)
    codes = ragged(codes, [[3, 80, *[blocks] * banks], [0, 25, *[0, 1][:banks]], [2, 81, *[1, 0][:banks]]])
    out = as_reference(query.double(), codes, torch.full((6,), 2, dtype=torch.uint8))
    for b in range(3):
        for head in range(6):
            torch.testing.assert_close(out[b, head], plain(query, codes, b, head), rtol=1e-11, atol=1e-11)


# ---- the kernels


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [*WIDTHS, (4, 2), (3, 8)])
@pytest.mark.parametrize(
    "routes", [[0] * 6, [1] * 6, [2] * 6, [0, 1, 2, 2, 0, 1]], ids=["int8", "sink", "native", "mixed"]
)
def test_routes(numerics: ModuleType, isa: str, routes: list[int], bits: Any, dtype: torch.dtype) -> None:
    hold_to_budget(numerics, routes, bits=bits, dtype=dtype, queries=3, keys=400)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    "dims",
    [
        (40, 48),
        (256, 256),
        (128, 192),
        *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((16, 16), (80, 80), (96, 96), (128, 128), (64, 32))),
    ],
)
@pytest.mark.parametrize("routes", [[0, 0, 2, 0], [2] * 4], ids=["mixed", "native"])
def test_head_sizes(numerics: ModuleType, isa: str, routes: list[int], dims: tuple[int, int], bits: int) -> None:
    hold_to_budget(numerics, routes, bits=bits, dim=dims[0], value_dim=dims[1], kv_heads=2, queries=2, keys=300)


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 33, 130])
@pytest.mark.parametrize("keys", [33, 64, 65, 129, 1000])
def test_lengths(numerics: ModuleType, isa: str, queries: int, keys: int) -> None:
    hold_to_budget(
        numerics, [0, 0, 0, 2, 2, 0], queries=queries, keys=keys, newest=max(64, queries), batch=2, bits=4, seeds=3
    )


@pytest.mark.parametrize("bits", [(8, 8), (4, 3), (2, 2), (2, 8)])
@pytest.mark.parametrize("queries", [1, 5, 33, 130])
@pytest.mark.parametrize("routes", [[0] * 6, [2] * 6, [0, 2, 0, 2, 1, 0]], ids=["int8", "native", "mixed"])
def test_rows_of_different_lengths(
    numerics: ModuleType, isa: str, routes: list[int], queries: int, bits: tuple[int, int]
) -> None:
    both = len(set(bits))
    counts = [[4, 130, *[5] * both], [0, 70, *[0] * both], [2, 9, *[3, 0][:both]]]
    hold_to_budget(
        numerics, routes, counts=counts, batch=3, queries=queries, keys=454, newest=130, sinks=4, bits=bits, seeds=2
    )


@pytest.mark.parametrize("routes", [[0] * 6, [2] * 6], ids=["int8", "native"])
def test_a_row_that_sees_nothing_is_zero(numerics: ModuleType, isa: str, routes: list[int]) -> None:
    query, codes, *_ = case(batch=2, queries=5, keys=300)
    codes = ragged(codes, [[0, 3, 0], [1, 64, 3]])
    out = run(numerics, query, codes, torch.tensor(routes, dtype=torch.uint8))
    assert not out[0, :, :2].any()
    assert bool(out[0, :, 2:].any(-1).all())
    assert bool(out[1].any(-1).all())


def test_banks_are_read_where_they_lie(numerics: ModuleType, isa: str) -> None:
    """Views with gaps between batch rows, heads and records."""
    query, codes, *_ = case(batch=2, bits=(4, 4), keys=400)
    routes = torch.tensor([0, 0, 2, 0, 2, 0], dtype=torch.uint8)
    wide = torch.full((2, 3, 9, codes.banks[0].shape[3] + 64), 255, dtype=torch.uint8)
    wide[:, 1:, :5, :-64] = codes.banks[0]
    spread_out = dataclasses.replace(codes, banks=(wide[:, 1:, :, :-64],))
    assert torch.equal(run(numerics, query, spread_out, routes), run(numerics, query, codes, routes))


@pytest.mark.parametrize("kv_heads", [1, 3, 9])
def test_grouped_queries(numerics: ModuleType, isa: str, kv_heads: int) -> None:
    hold_to_budget(numerics, [0, 0, 2, 0, 0, 2, 0, 0, 0], kv_heads=kv_heads, queries=8, keys=300)


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "clip_row": {"clip_row": torch.tensor([4.0, torch.inf, 3.0, 4.0, torch.inf, 3.0])},
    "clip_absolute": {"clip_absolute": torch.tensor([1.0, torch.inf, 2.0, 1.0, torch.inf, 2.0])},
    "s_aux": {"s_aux": torch.linspace(-2, 3, 6)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("queries", [3, 33])
def test_options(numerics: ModuleType, isa: str, name: str, queries: int) -> None:
    hold_to_budget(numerics, [0, 0, 0, 2, 0, 2], OPTIONS[name], queries=queries, keys=300, sinks=4, bits=(8, 3))


def test_threads_agree(numerics: ModuleType, isa: str) -> None:
    query, codes, *_ = case(keys=5000, queries=2, bits=(8, 3))
    routes = torch.tensor([0, 2, 0, 0, 2, 0], dtype=torch.uint8)
    truth, yardstick = numerics.coded_attention_truth(query, codes, routes), as_reference(query, codes, routes)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        numerics.assert_within_budget(run(numerics, query, codes, routes), yardstick, truth)


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
    truth, yardstick = numerics.coded_attention_truth(large, codes, routes), as_reference(large, codes, routes)
    numerics.assert_within_budget(run(numerics, large, codes, routes), yardstick, truth)


def test_a_number_that_is_not_finite_is_seen(numerics: ModuleType, isa: str) -> None:
    query, codes, *_ = case(keys=300)
    routes = torch.zeros(6, dtype=torch.uint8)
    query[0, 2, 0, 7] = torch.nan
    codes.value[0, 1, 3, 5] = torch.inf
    out = run(numerics, query, codes, routes)
    assert not out[0, 2].isfinite().any()
    assert not out[0, 3:].isfinite().all(-1).any()
    assert bool(out[0, :2].isfinite().all())


# ---- the operator


def test_opcheck_and_compile() -> None:
    query, codes, *_ = case(keys=200, bits=(4, 2))
    routes = torch.zeros(6, dtype=torch.uint8)
    exact = (codes.sink_key, codes.sink_value, codes.key, codes.value)
    torch.library.opcheck(
        torch.ops.quantsink.coded_attention.default,
        (query, *exact, list(codes.banks), codes.heads, codes.rows, routes, None, None, None),
        {"bits": list(codes.bits), "scaling": 0.125, "softcap": 0.0},
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
        ({"bits": (5,)}, "8, 4, 3 or 2 bits, not 5"),
        ({"bits": (2**40,)}, "8, 4, 3 or 2 bits, not 1099511627776"),
        ({"key": torch.ones(1, 2, 64)}, r"key must be \['B', 'KV heads', 'tokens', 'D'\], not \[1, 2, 64\]"),
        ({"value": torch.tensor(1.0)}, r"value must be \['B', 'KV heads', 'tokens', 'D'\], not \[\]"),
        ({"bits": (8, 4)}, "1 banks with 2 widths"),
        ({"bits": (4,)}, r"banks\[0\] must be"),
        ({"sink_value": torch.ones(1, 2, 3, 64)}, "sink_value must be"),
        ({"key": torch.ones(1, 2, 3, 64)}, "value must be"),
        ({"banks": (torch.ones(1, 2, 6, 8704),)}, r"banks\[0\] must be uint8"),
        ({"heads": torch.zeros(3, 2, dtype=torch.int64)}, "heads must be"),
        ({"heads": torch.tensor([[0, 0], [0, 2]])}, r"heads\[1\] is \[0, 2\]"),
        ({"rows": torch.tensor([[1, 115, 6]], dtype=torch.int32)}, "rows must be int64"),
        ({"rows": torch.tensor([[2, 115, 6]])}, r"rows\[0\] is \[2, 115, 6\]"),
        ({"rows": torch.tensor([[1, 115, 7]])}, r"rows\[0\] is \[1, 115, 7\]"),
        ({"rows": torch.tensor([[1, -1, 6]])}, r"rows\[0\] is \[1, -1, 6\]; .* are at most \[1, 115, 6\]"),
        ({"heads": torch.tensor([[-1, 0], [0, 1]])}, r"heads\[0\] is \[-1, 0\]"),
        ({"heads": torch.tensor([[1, 0], [0, 1]])}, r"heads\[0\] is \[1, 0\]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, dtype: torch.dtype) -> None:
    query, codes, *_ = case(keys=500)
    with pytest.raises(ValueError, match=message):
        coded_attention(
            query.to(dtype), dataclasses.replace(codes, **change), routes=torch.zeros(6, dtype=torch.uint8), scaling=1.0
        )


@pytest.mark.parametrize("change", [{"rows": torch.tensor([[1, 115]])}, {"heads": torch.tensor([[0, 0]])}])
@pytest.mark.usefixtures("isa")
def test_tables_of_another_shape_are_not_read_beyond(change: dict[str, Tensor]) -> None:
    """By the operator itself, whose caller checked nothing."""
    query, codes, *_ = case(keys=500)
    codes = dataclasses.replace(codes, **change)
    given = (codes.sink_key, codes.sink_value, codes.key, codes.value, codes.banks, codes.heads, codes.rows)
    with pytest.raises(ValueError, match=r"heads must be \[2, 2\]|rows must be \[1, 3\]"):
        torch.ops.quantsink.coded_attention(
            query,
            *given,
            torch.zeros(6, dtype=torch.uint8),
            None,
            None,
            None,
            bits=codes.bits,
            scaling=1.0,
            softcap=0.0,
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


def test_numbers_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="65,504"):
        asymmetric(torch.full((1, 1, 1, 64, 8), -1e5), 8, 3)


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
