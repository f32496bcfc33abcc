"""The C++ kernels of `quantsink::sink_attention`, each instruction set of this processor, held to the error budget."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantsink.kernels import Route, cpu, sink_attention
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

_cpu = pytest.importorskip("quantsink.kernels._cpu", reason="the C++ kernels were not built")
INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE
Arguments = dict[str, Any]


def instruction_sets() -> list[str]:
    """Those that this processor has."""
    best = _cpu.isa()
    names = [name for name in ("avx512bf16", "avx512", "avx2", "portable") if _cpu.select_isa(name)]
    _cpu.select_isa(best)
    return names


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workspaces full of NaN; instruction set and threads as before when the test is over."""
    monkeypatch.setattr(cpu, "poison", True)
    isa, threads = _cpu.isa(), torch.get_num_threads()
    yield
    _cpu.select_isa(isa)
    torch.set_num_threads(threads)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator may not fall back to the reference."""

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the C++ kernels were not used")

    # The package hides behind the function of the same name.
    monkeypatch.setattr(import_module("quantsink.kernels.sink_attention"), "reference", refuse)


@pytest.fixture(params=[torch.float, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


def case(
    seed: int = 0,
    heads: int = 6,
    kv_heads: int = 2,
    queries: int = 70,
    keys: int | None = None,
    dim: int = 64,
    value_dim: int | None = None,
    batch: int = 1,
    routes: list[int] | None = None,
    dtype: torch.dtype = torch.float,
) -> Arguments:
    """Arguments with keys off centre, one channel large, as models have them; routes mixed at random."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    key = draw(batch, kv_heads, keys, dim) + 2 * draw(1, kv_heads, 1, dim)
    key[..., 0] *= 5
    mixed = torch.randint(0, 3, (heads,), generator=generator) if routes is None else torch.tensor(routes)
    return {
        "query": draw(batch, heads, queries, dim).to(dtype),
        "key": key.to(dtype),
        "value": draw(batch, kv_heads, keys, value_dim or dim).to(dtype),
        "routes": mixed.to(torch.uint8),
        "key_mean": key[:, :, min(1, keys - 1) :].mean((0, 2)),
        "scaling": dim**-0.5,
    }


def as_reference(arguments: Arguments, dtype: torch.dtype) -> Tensor:
    """The reference on the same tensors in `dtype`."""
    inputs = {name: arguments[name].to(dtype) for name in ("query", "key", "value")}
    return reference(Call.of(**{**arguments, **inputs}))


def run(numerics: ModuleType, isa: str, arguments: Arguments) -> Tensor:
    assert _cpu.select_isa(isa)
    with numerics.poisoned_memory():
        out = sink_attention(**arguments)
    assert out.dtype == arguments["query"].dtype
    return out


SEEDS = 8


def check(numerics: ModuleType, make: Callable[[int], Arguments], seeds: int = SEEDS) -> None:
    """Every instruction set within the budget, pooled over the cases that `make` returns for each seed."""
    cases = [make(seed) for seed in range(seeds)]
    dtype = cases[0]["query"].dtype
    known = [(as_reference(arguments, dtype), numerics.sink_attention_truth(arguments)) for arguments in cases]
    for isa in instruction_sets():
        results = [run(numerics, isa, arguments) for arguments in cases]
        try:
            numerics.assert_pool_within_budget((out, *expected) for out, expected in zip(results, known, strict=True))
        except AssertionError as error:
            raise AssertionError(f"{isa}: {error}") from None


def seeds_of(dtype: torch.dtype) -> int:
    """16-bit outputs hide the ties of single codes: a few cases say as much as many."""
    return SEEDS if dtype == torch.float else 2


# Shapes.

ROUTES = {"mixed": None, "int8": INT8, "sink": SINK, "native": NATIVE}


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("length", "seeds"), [(1, 30), (63, 8), (65, 8), (300, 8), (1000, 2)])
def test_square_lengths(numerics: ModuleType, length: int, seeds: int, route: str, dtype: torch.dtype) -> None:
    routes = None if ROUTES[route] is None else [ROUTES[route]] * 6
    seeds = seeds if dtype == torch.float else 1
    check(numerics, lambda seed: case(seed, queries=length, routes=routes, dtype=dtype), seeds)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("keys", [1, 63, 65, 1000])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8, 16, 17, 33])
def test_fewer_queries_than_keys(numerics: ModuleType, queries: int, keys: int, dtype: torch.dtype) -> None:
    """More queries than keys leave the first ones with nothing to see."""
    check(numerics, lambda seed: case(seed, queries=queries, keys=keys, dtype=dtype), seeds_of(dtype))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (4, 200)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("route", list(Route))
def test_one_head_of_a_route_alone(numerics: ModuleType, route: Route, batch: int, queries: int, keys: int) -> None:
    check(numerics, lambda seed: case(seed, 1, 1, queries, keys, batch=batch, routes=[route]))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (8, 130)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (6, 2), (9, 1), (40, 1)])
def test_groups_share_their_keys(
    numerics: ModuleType, heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype
) -> None:
    """1 to 40 query heads on one KV head; with few queries the rows of a group fill several tiles."""
    check(numerics, lambda seed: case(seed, heads, kv_heads, queries, keys, batch=2, dtype=dtype), seeds_of(dtype) // 2)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(66, 66), (3, 130)])
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(1, 1), (20, 20), (80, 80), (96, 96), (128, 128), (256, 256), (64, 128), (192, 128), (36, 100), (30, 7)],
)
def test_head_sizes(
    numerics: ModuleType, dim: int, value_dim: int, queries: int, keys: int, dtype: torch.dtype
) -> None:
    check(numerics, lambda seed: case(seed, 3, 1, queries, keys, dim, value_dim, dtype=dtype), seeds_of(dtype))


# Masks.


PADS = (0, 13, 66)
MASKS: dict[str, Callable[[int, int, int], Arguments]] = {
    "everything": lambda queries, keys, seed: {"causal": False},
    "left, by start": lambda queries, keys, seed: {"sink_start": torch.tensor(PADS)},
    "left, by start, all": lambda queries, keys, seed: {"sink_start": torch.tensor(PADS), "causal": False},
    "left, by mask": lambda queries, keys, seed: {"mask": padded(queries, keys, "left")},
    "left, by both": lambda queries, keys, seed: {
        "mask": padded(queries, keys, "left"),
        "sink_start": torch.tensor(PADS),
    },
    "right": lambda queries, keys, seed: {"mask": padded(queries, keys, "right")},
    "window": lambda queries, keys, seed: {"mask": causal(queries, keys) & ~causal(queries, keys, 20)},
    "random": lambda queries, keys, seed: {"mask": random_mask(3, queries, keys, seed)},
    "random, for all": lambda queries, keys, seed: {"mask": random_mask(1, queries, keys, seed)},
    "random, from start": lambda queries, keys, seed: {
        "mask": random_mask(1, queries, keys, seed),
        "sink_start": torch.tensor(PADS),
    },
}


def causal(queries: int, keys: int, back: int = 0) -> Tensor:
    """`[1, 1, Lq, Lk]`: each query sees up to `back` keys before its own."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries - back)


def padded(queries: int, keys: int, side: str) -> Tensor:
    """Causal `[B, 1, Lq, Lk]` without the first or last PADS columns of each row."""
    column, pads = torch.arange(keys), torch.tensor(PADS)[:, None]
    real = column >= pads if side == "left" else column < keys - pads
    return causal(queries, keys) & real[:, None, None]


def random_mask(batch: int, queries: int, keys: int, seed: int) -> Tensor:
    """Some rows see nothing, and none sees anything of one block."""
    mask = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(seed)) > 0.5
    mask[:, :, : queries // 4] = False
    mask[0, :, :, 64:128] = False
    return mask


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (40, 200), (5, 140)])
@pytest.mark.parametrize("name", MASKS)
def test_masks(numerics: ModuleType, name: str, queries: int, keys: int, dtype: torch.dtype) -> None:
    def make(seed: int) -> Arguments:
        arguments = case(seed, 4, 2, queries, keys, batch=3, dtype=dtype)
        return {**arguments, "sink_size": 4, **MASKS[name](queries, keys, seed)}

    check(numerics, make, seeds_of(dtype) // 2)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("queries", [70, 5])
@pytest.mark.parametrize("limits", [{}, {"s_aux": torch.ones(6)}, {"clip_row": torch.ones(6)}, {"softcap": 5.0}])
def test_rows_that_see_nothing_are_zero(
    numerics: ModuleType, limits: Arguments, queries: int, dtype: torch.dtype
) -> None:
    mask = random_mask(3, queries, 130, 0)
    mask[1] = False
    hidden = ~mask.any(-1, keepdim=True)
    for isa in instruction_sets():
        out = run(numerics, isa, {**case(queries=queries, keys=130, batch=3, dtype=dtype), "mask": mask, **limits})
        assert (out.masked_select(hidden) == 0).all()
        assert (out[2, :, -1] != 0).any()


# Options.


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (8, 200)])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"clip_row": torch.tensor([0.5, 2.0, 8.0, torch.inf, 1.0, 3.0])},
        {"clip_absolute": torch.tensor([0.5, 2.0, 8.0, torch.inf, 1.0, 3.0])},
        {"s_aux": torch.tensor([-3.0, 0.0, 1.0, 30.0, 2.0, -torch.inf])},
        {"softcap": 5.0, "clip_row": torch.full((6,), 3.0), "s_aux": torch.ones(6), "sink_size": 4},
        {"clip_row": torch.full((6,), 3.0), "clip_absolute": torch.full((6,), 2.0), "sink_start": torch.tensor([3, 0])},
    ],
    ids=lambda options: "+".join(options),
)
def test_limits_on_scores(
    numerics: ModuleType, options: Arguments, queries: int, keys: int, dtype: torch.dtype
) -> None:
    make = lambda seed: {**case(seed, queries=queries, keys=keys, batch=2, dtype=dtype), **options}  # noqa: E731
    check(numerics, make, seeds_of(dtype))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (3, 150), (2, 3)])
@pytest.mark.parametrize("start", [None, [0, -1], [-3, -4], [-100, 2]])
@pytest.mark.parametrize("sink_size", [0, 1, 4, 70])
def test_sinks(numerics: ModuleType, sink_size: int, start: list[int] | None, queries: int, keys: int) -> None:
    """Fewer, as many and more than a block or the keys; some that left a sliding cache."""
    fixed = {"sink_size": sink_size, "sink_start": None if start is None else torch.tensor(start)}
    make = lambda seed: {**case(seed, 3, 1, queries, keys, batch=2, routes=[0, 1, 2]), **fixed}  # noqa: E731
    check(numerics, make)


# Hard inputs.


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (6, 130)])
@pytest.mark.parametrize("what", ["query", "key", "value", "key_mean"])
def test_zeros(numerics: ModuleType, what: str, queries: int, keys: int, dtype: torch.dtype) -> None:
    """The whole tensor, one head of it, ten tokens of it."""
    for zeros in (slice(None), (..., 0, slice(None), slice(None)), (..., slice(-10, None), slice(None))):

        def make(seed: int, zeros: Any = zeros) -> Arguments:
            arguments = case(seed, queries=queries, keys=keys, dtype=dtype)
            arguments[what][slice(None) if what == "key_mean" else zeros] = 0
            return arguments

        check(numerics, make, seeds_of(dtype) // 2)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (8, 70)])
@pytest.mark.parametrize("place", [0, 30, 69])
@pytest.mark.parametrize("what", ["key", "value"])
def test_one_token_a_thousand_times_larger(
    numerics: ModuleType, what: str, place: int, queries: int, keys: int, dtype: torch.dtype
) -> None:
    def make(seed: int) -> Arguments:
        arguments = case(seed, queries=queries, keys=keys, dtype=dtype)
        arguments[what][:, :, place] *= 1000
        return arguments

    check(numerics, make, seeds_of(dtype))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (8, 200)])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ninety(numerics: ModuleType, sign: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    def make(seed: int) -> Arguments:
        arguments = case(seed, queries=queries, keys=keys, dtype=dtype)
        scores = arguments["query"].float() @ arguments["key"].float().repeat_interleave(3, 1).transpose(-1, -2)
        arguments["query"] *= sign * 90 / (scores.abs().max() * arguments["scaling"])
        return arguments

    check(numerics, make, seeds_of(dtype))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("queries", [4, 65, 68, 72, 130])
def test_scores_that_rise_from_block_to_block(numerics: ModuleType, queries: int, dtype: torch.dtype) -> None:
    """What a row has so far is rescaled at each; 68 and 72 leave one and two tiles of four rows to themselves."""

    def make(seed: int) -> Arguments:
        arguments = case(seed, queries=queries, keys=330, routes=[INT8, SINK] * 3, dtype=dtype)
        arguments["query"][..., 1] = 8
        arguments["key"][..., 1] += 100 * (torch.arange(330) // 64).clamp(max=3)  # a last rise would hide all before it
        return arguments

    check(numerics, make, seeds_of(dtype))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("queries", [150, 5])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_number_that_is_not_finite_reaches_the_rows_that_see_it(
    numerics: ModuleType, what: str, poison: float, queries: int, dtype: torch.dtype
) -> None:
    """A value's scale covers its block, so it may reach every row that sees a key of that block, and no other."""
    keys, token, block = 150, 147 if queries == 5 else 90, 64
    position = torch.arange(queries) + keys - queries
    arguments = {**case(queries=queries, keys=keys, dtype=dtype, routes=[0, 1, 2, 2, 1, 0]), "sink_size": 4}
    for isa in instruction_sets():
        clean = run(numerics, isa, arguments)
        spoilt = {**arguments, what: arguments[what].clone()}
        spoilt[what][:, :, token - keys + (queries if what == "query" else keys), 3] = poison
        out = run(numerics, isa, spoilt)
        sees = position == token if what == "query" else position >= token
        may_see = position >= token // block * block if what == "value" else sees
        assert not out[:, :, sees].isfinite().all(-1).any(), isa
        assert torch.equal(out[:, :, ~may_see], clean[:, :, ~may_see]), isa


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("queries", [90, 5])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("side", ["left", "right", "start"])
def test_hidden_keys_have_no_effect(
    numerics: ModuleType, side: str, poison: float, queries: int, dtype: torch.dtype
) -> None:
    keys = 90
    column, pads = torch.arange(keys), torch.tensor(PADS)[:, None]
    hidden = column >= keys - pads if side == "right" else column < pads
    options: Arguments = {"sink_size": 4}
    options |= {"sink_start": torch.tensor(PADS)} if side == "start" else {"mask": padded(queries, keys, side)}
    arguments = case(queries=queries, keys=keys, batch=3, dtype=dtype)
    spoilt = {
        n: x.masked_fill(hidden[:, None, :, None], poison) if n in ("key", "value") else x for n, x in arguments.items()
    }
    for isa in instruction_sets():
        clean = run(numerics, isa, {**arguments, **options})
        assert torch.equal(run(numerics, isa, {**spoilt, **options}), clean), isa


# Threads and memory.


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("options", [{}, {"mask": causal(300, 300)}, {"softcap": 5.0, "clip_row": torch.ones(6)}])
def test_threads_do_not_change_a_prefill(numerics: ModuleType, options: Arguments, dtype: torch.dtype) -> None:
    arguments = {**case(queries=300, dtype=dtype), **options}
    for isa in instruction_sets():
        results = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(run(numerics, isa, arguments))
        assert all(torch.equal(results[0], other) for other in results[1:]), isa


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("options", [{}, {"s_aux": torch.ones(6)}, {"clip_row": torch.ones(6)}, {"sink_size": 300}])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_decoding_split_over_threads(
    numerics: ModuleType, threads: int, options: Arguments, dtype: torch.dtype
) -> None:
    """One query over 3,000 keys is shared out along the keys."""
    torch.set_num_threads(threads)
    make = lambda seed: {**case(seed, queries=1, keys=3000, dtype=dtype), **options}  # noqa: E731
    check(numerics, make, 3 if dtype == torch.float else 1)


def spread(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in other memory: `[B, L, H, D]` as transformers' projections write them, gaps, a wider row."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    longer = torch.zeros(x.shape[0] + 1, x.shape[1], x.shape[2] + 3, x.shape[3] + 1, dtype=x.dtype)
    longer[1:, :, 3:, 1:] = x
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second channel": wide[..., ::2],
        "a part": longer[1:, :, 3:, 1:],
    }


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("layout", ["transposed", "every second channel", "a part"])
@pytest.mark.parametrize("queries", [70, 4])
def test_memory_layout_changes_nothing(numerics: ModuleType, queries: int, layout: str, dtype: torch.dtype) -> None:
    mask = random_mask(1, queries, 90, 0)
    arguments = {**case(queries=queries, keys=90, batch=2, dtype=dtype), "mask": mask.expand(2, 1, -1, -1).contiguous()}
    strided = {**arguments, **{name: spread(arguments[name])[layout] for name in ("query", "key", "value")}}
    masks = mask, mask.expand(2, 1, -1, -1), spread(mask)[layout]
    for isa in instruction_sets():
        expected = run(numerics, isa, arguments)
        for same in masks:
            assert torch.equal(run(numerics, isa, {**strided, "mask": same}), expected), isa
        assert expected.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("kernels_only")
def test_inputs_are_left_alone(numerics: ModuleType, dtype: torch.dtype) -> None:
    arguments = {**case(dtype=dtype), "clip_row": torch.ones(6), "s_aux": torch.ones(6), "mask": causal(70, 70)}
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    run(numerics, "portable", arguments)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


# Which calls take the kernels.


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (2, 130)])
def test_float16(numerics: ModuleType, queries: int, keys: int) -> None:
    check(numerics, lambda seed: case(seed, queries=queries, keys=keys, dtype=torch.float16), 2)


@pytest.mark.usefixtures("kernels_only")
def test_autocast_changes_nothing(numerics: ModuleType) -> None:
    arguments = case()
    for isa in instruction_sets():
        with torch.autocast("cpu", torch.bfloat16):
            inside = run(numerics, isa, arguments)
        assert torch.equal(inside, run(numerics, isa, arguments))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"weight_scale": "row"}, torch.float),
        ({"weight_scale": "fixed"}, torch.float),
        ({"block": 32}, torch.bfloat16),
        ({"scaling": -0.1}, torch.float),
        ({}, torch.double),
    ],
)
def test_calls_outside_the_kernels_equal_the_reference(
    numerics: ModuleType, options: Arguments, dtype: torch.dtype
) -> None:
    arguments = {**case(batch=2, dtype=dtype), **options}
    assert torch.equal(run(numerics, "portable", arguments), as_reference(arguments, dtype))


def test_an_unknown_instruction_set_is_refused() -> None:
    before = _cpu.isa()
    assert not _cpu.select_isa("sse")
    assert _cpu.isa() == before


# torch's machinery.


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (2, 70)])
def test_operator_is_registered_as_torch_expects(queries: int, keys: int, dtype: torch.dtype) -> None:
    arguments = case(queries=queries, keys=keys, batch=2, dtype=dtype)
    for extra in ({}, {"mask": padded(queries, keys, "left")[:2], "s_aux": torch.ones(6)}):
        torch.library.opcheck(torch.ops.quantsink.sink_attention.default, tuple(Call.of(**arguments, **extra)))


@pytest.mark.usefixtures("kernels_only")
def test_compiled_code_gives_the_same(dtype: torch.dtype) -> None:
    arguments = case(dtype=dtype)
    query = arguments.pop("query")
    eager = lambda q: sink_attention(q * 2, **arguments).transpose(1, 2).flatten(2) + 1  # noqa: E731
    assert torch.equal(torch.compile(eager, backend="aot_eager", fullgraph=True)(query), eager(query))


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """Whatever is imported first; QUANTSINK_CPU_ISA names a lesser instruction set."""
    code = """
import quantsink.kernels._cpu as kernels
import torch
torch.ones(10**6).sum()
print(kernels.isa(), len({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
"""
    environment = {**os.environ, "QUANTSINK_CPU_ISA": "portable"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["portable", "1"]


@pytest.mark.parametrize(("name", "answer"), [("portable", "portable"), ("sse9", "ValueError: QUANTSINK_CPU_ISA=sse9")])
def test_the_environment_variable_chooses_an_instruction_set_or_is_refused(name: str, answer: str) -> None:
    code = "import quantsink.kernels, quantsink.kernels._cpu as c; print(c.isa())"
    child = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "QUANTSINK_CPU_ISA": name}, capture_output=True, text=True
    )
    assert answer in child.stdout + child.stderr
    assert (child.returncode == 0) == (name == "portable")


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("routes", [[3, 0], [255, 1]])
def test_routes_that_do_not_exist_are_refused(routes: list[int]) -> None:
    arguments = case(heads=2, kv_heads=1, routes=routes)
    with pytest.raises(ValueError, match="routes must be 0"):
        sink_attention(**arguments)
    with pytest.raises(ValueError, match="routes must be 0"):
        sink_attention(**{**arguments, "routes": torch.tensor(routes) + 256})


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("route", [INT8, SINK, NATIVE])
def test_scores_that_overflow_are_seen(numerics: ModuleType, isa: str, route: Route) -> None:
    arguments = case(queries=20, routes=[route] * 6)
    arguments.update(query=arguments["query"].abs() * 1e22, key=arguments["key"].abs() * 1e22)
    assert not run(numerics, isa, arguments).isfinite().all(-1).any()


@pytest.mark.usefixtures("kernels_only")
def test_keys_in_float32_are_not_rounded_to_the_query_s_type() -> None:
    arguments = case(queries=20)
    mixed = sink_attention(**{**arguments, "query": arguments["query"].bfloat16()})
    exact = sink_attention(**{**arguments, "query": arguments["query"].bfloat16().float()})
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, exact.bfloat16())


def test_gradients_and_negative_softcaps_are_refused() -> None:
    arguments = case(queries=5)
    with pytest.raises(ValueError, match="no gradient"):
        sink_attention(**{**arguments, "key": arguments["key"].requires_grad_()})
    with pytest.raises(ValueError, match="softcap -1"):
        sink_attention(**{**case(queries=5), "softcap": -1.0})
