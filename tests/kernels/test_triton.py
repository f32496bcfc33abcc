"""The Triton kernels of `quantsink::sink_attention`, run on the CPU by Triton's interpreter, held to the error budget.

Triton decides between compiler and interpreter when it is first imported, so the kernels run in a child process: this
file, started with TRITON_INTERPRET=1, answers calls on its standard input.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quantsink.kernels import Route
from quantsink.kernels.sink_attention import triton_backend
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import quantize_value_blocks, reference

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE
# The child process.


def mend_interpreter() -> None:
    """Triton 3.6's interpreter fails on loop bounds under NumPy 2.4, multiplies bfloat16's bits and truncates to it."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def as_float32(x: Any) -> Any:
        wide = (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype == tl.bfloat16 else x.data
        return handle(wide, tl.float32) if x.dtype == tl.bfloat16 else x

    def round_to_nearest(self: Any, x: Any, dtype: Any) -> Any:
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
        return handle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter._patch_lang_tensor = patch_tensor
    builder.create_dot = lambda self, a, b, *rest: dot(self, as_float32(a), as_float32(b), *rest)
    builder.cast_impl = round_to_nearest


def serve() -> None:
    """Answer (what, arguments) with (result, names of the kernels that ran), or with the exception."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.disable(logging.WARNING)
    import warnings

    warnings.simplefilter("ignore")
    mend_interpreter()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    numerics = import_module("numerics")
    launch = import_module("quantsink.kernels.sink_attention.triton_launch")
    run, ran = launch.launch, []

    def record(config: Any, *rest: Any) -> None:
        ran.append(config.kernel)
        run(config, *rest)

    launch.launch = record
    while True:
        try:
            what, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        ran.clear()
        try:
            with numerics.poisoned_memory():
                if what == "attend":
                    answer = triton_backend.attend(Call.of(**arguments))
                else:
                    operands = launch.Operands(Call.of(**arguments))
                    answer = operands.codes(operands.seen(), True)
        except Exception as error:
            answer = error
        pickle.dump((answer, list(ran)), answers)
        answers.flush()


# The tests' side.


class Kernels:
    """Calls into the child process; `ran` names the kernels that the last one launched."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.ran: list[str] = []

    def __call__(self, arguments: dict[str, Any], what: str = "attend") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((what, arguments), self.process.stdin)
        self.process.stdin.flush()
        answer, self.ran = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        yield Kernels(process)
        assert process.stdin is not None
        process.stdin.close()


def case(
    heads: int = 3,
    kv_heads: int = 1,
    queries: int = 70,
    keys: int | None = None,
    dim: int = 64,
    batch: int = 1,
    routes: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Arguments with keys off centre, one channel large, as models have them; routes mixed at random."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
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
        **options,
    }


def as_reference(arguments: dict[str, Any], dtype: torch.dtype | None = None) -> Tensor:
    """The reference's result, with query, key and value in `dtype` (as they are)."""
    cast = {n: x.to(dtype) for n, x in arguments.items() if n in ("query", "key", "value")} if dtype else {}
    return reference(Call.of(**{**arguments, **cast}))


def assert_within_budget(kernels: Kernels, numerics: ModuleType, arguments: dict[str, Any]) -> Tensor:
    out: Tensor = kernels(arguments)
    assert kernels.ran, "the reference ran, not the kernels"
    expected = as_reference(arguments)
    assert (out.dtype, out.shape, out.stride()) == (expected.dtype, expected.shape, expected.stride())
    numerics.assert_within_budget(out, expected, numerics.sink_attention_truth(arguments))
    return out


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


def left_padded(start: Tensor, queries: int, keys: int) -> Tensor:
    return causal_mask(queries, keys) & (torch.arange(keys) >= start[:, None])[:, None, None]


# The formula.


@pytest.mark.parametrize("length", [1, 63, 65, 200])
@pytest.mark.parametrize("route", list(Route))
def test_one_route(kernels: Kernels, numerics: ModuleType, route: Route, length: int) -> None:
    dtype = torch.float32 if length < 200 else torch.bfloat16
    assert_within_budget(kernels, numerics, case(2, 1, length, routes=[route] * 2, dtype=dtype))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (9, 3, 64, torch.float16),
        (4, 2, 80, torch.bfloat16),
        (2, 2, 96, torch.float32),
        (4, 1, 128, torch.bfloat16),
        (2, 1, 256, torch.float16),
    ],
)
@pytest.mark.parametrize("queries", [3, 67])
def test_mixed_routes(
    kernels: Kernels,
    numerics: ModuleType,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    batch: int,
    queries: int,
) -> None:
    assert_within_budget(kernels, numerics, case(heads, kv_heads, queries, 67, dim, batch, dtype=dtype))
    assert kernels.ran[-1] == ("prefill" if queries > 8 else "merge")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 200), (8, 66), (9, 3), (5, 3), (20, 130)])
def test_without_a_mask_the_last_query_sees_every_key(
    kernels: Kernels, numerics: ModuleType, queries: int, keys: int, causal: bool
) -> None:
    arguments = case(queries=queries, keys=keys, batch=2, routes=[0, 1, 2], causal=causal)
    out = assert_within_budget(kernels, numerics, arguments)
    if causal and queries > keys:
        assert out[:, :, : queries - keys].abs().max() == 0


def test_many_rows_of_a_group_decode_in_several_tiles(kernels: Kernels, numerics: ModuleType) -> None:
    assert_within_budget(kernels, numerics, case(9, 1, 5, 150, routes=[0, 1, 2] * 3))
    assert "decode" in kernels.ran


@pytest.mark.parametrize("queries", [6, 70])
@pytest.mark.parametrize("mask_batch", [1, 3])
def test_any_mask(kernels: Kernels, numerics: ModuleType, mask_batch: int, queries: int) -> None:
    """Random visibility, with rows that see nothing and keys that nobody sees."""
    mask = torch.rand(mask_batch, 1, queries, 90, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, 0, :3] = False
    mask[..., 40:45] = False
    arguments = case(queries=queries, keys=90, batch=3, routes=[0, 1, 2], mask=mask)
    arguments["key"][:, :, 40:45] *= 1000
    arguments["value"][:, :, 40:45] *= 1000
    out = assert_within_budget(kernels, numerics, arguments)
    assert out[0, :, :3].abs().max() == 0


def test_sliding_window(kernels: Kernels, numerics: ModuleType) -> None:
    window = causal_mask(200, 200) & ~causal_mask(200, 200).tril(-20)
    assert_within_budget(kernels, numerics, case(queries=200, routes=[0, 1, 2], mask=window, sink_size=4))


@pytest.mark.parametrize("queries", [1, 90])
@pytest.mark.parametrize("with_mask", [True, False])
def test_left_padding(kernels: Kernels, numerics: ModuleType, with_mask: bool, queries: int) -> None:
    start = torch.tensor([0, 13, 68])
    mask = left_padded(start, queries, 90) if with_mask else None
    arguments = case(queries=queries, keys=90, batch=3, routes=[0, 1, 2], mask=mask, sink_start=start, sink_size=4)
    assert_within_budget(kernels, numerics, arguments)


@pytest.mark.parametrize("gone", [3, 4, 100])
def test_sinks_that_left_a_sliding_cache(kernels: Kernels, numerics: ModuleType, gone: int) -> None:
    start = torch.tensor([-gone, 0])
    for queries in (5, 20):
        arguments = case(3, 3, queries, 80, batch=2, routes=[0, 1, 2], sink_size=4, sink_start=start)
        assert_within_budget(kernels, numerics, arguments)


@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize("sink_size", [0, 70, 200])
def test_any_number_of_sinks(kernels: Kernels, numerics: ModuleType, sink_size: int, queries: int) -> None:
    """None, more than a block, more than there are keys."""
    assert_within_budget(kernels, numerics, case(queries=queries, keys=140, routes=[0, 1, 2], sink_size=sink_size))


@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"clip_row": torch.tensor([0.5, 2.0, torch.inf])},
        {"clip_absolute": torch.tensor([0.5, 2.0, torch.inf])},
        {"s_aux": torch.tensor([-3.0, 1.0, 30.0], dtype=torch.bfloat16)},
        {"softcap": 5.0, "clip_row": torch.full((3,), 3.0), "s_aux": torch.ones(3), "sink_size": 4},
        {"clip_row": torch.full((3,), 3.0), "clip_absolute": torch.full((3,), 2.0)},
    ],
    ids=lambda options: "+".join(options),
)
def test_limits_on_scores(kernels: Kernels, numerics: ModuleType, options: dict[str, Any], queries: int) -> None:
    arguments = case(queries=queries, keys=70, batch=2, routes=[0, 1, 2], dtype=torch.float16, **options)
    assert_within_budget(kernels, numerics, arguments)
    assert kernels.ran.count("decode") == (0 if queries == 70 else 1 + ("clip_row" in options))


@pytest.mark.parametrize("queries", [2, 30])
def test_value_heads_may_have_their_own_width(kernels: Kernels, numerics: ModuleType, queries: int) -> None:
    arguments = case(queries=queries, keys=30, routes=[0, 1, 2])
    arguments["value"] = torch.randn(1, 1, 30, 96).bfloat16()
    assert assert_within_budget(kernels, numerics, arguments).shape == (1, 3, queries, 96)


# Codes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_references_to_the_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    """Keys per token, values per block and channel, the first block again without its sinks; ties go to even."""
    arguments = case(2, 2, 150, dim=80, batch=2, dtype=dtype, routes=[0, 1], sink_size=4)
    arguments["key_mean"][0] = 0
    arguments["key"][:, 0, :20] = (torch.arange(80) - 40.0).to(dtype) / 2
    arguments["key"][:, 0, :20, 0] = 127
    arguments["value"][:, :, 30] = 0
    edge, k_codes, k_scale, v_codes, v_scale = kernels(arguments, "codes")
    assert edge == 1
    split = import_module("quantsink.kernels.sink_attention.reference").SplitHeads
    key, value = arguments["key"].float(), arguments["value"].float()
    expected = split(torch.tensor([0, 1]), key, value, torch.arange(2), Call.of(**arguments))
    assert torch.equal(k_codes.flatten(2, 3)[:, :, :150].float(), expected.key_codes.transpose(-1, -2)[:, :, :150])
    assert torch.equal(k_scale.flatten(2)[:, :, :150], expected.key_scale[:, :, 0, :150])
    plain, scale = quantize_value_blocks(torch.nn.functional.pad(value, (0, 0, 0, 42)), 64)
    assert torch.equal(v_codes[:, :, :3].transpose(-1, -2).float(), plain)
    assert torch.equal(v_scale[:, :, :3], scale[:, :, :, 0])
    assert torch.equal(v_codes[:, 1, 3].transpose(-1, -2).float(), expected.value_codes[:, 1, 0])
    assert torch.equal(v_scale[:, 1, 3], expected.value_scale[:, 1, 0, 0])


def test_native_groups_are_not_packed(kernels: Kernels) -> None:
    """Their workspace keeps the poison; a call with native heads alone packs nothing at all."""
    arguments = case(4, 2, 70, routes=[2, 2, 0, 2])
    _, _, k_scale, _, v_scale = kernels(arguments, "codes")
    assert k_scale[:, 0].isnan().all()
    assert v_scale[:, 0].isnan().all()
    assert not k_scale[:, 1].isnan().any()
    kernels(case(4, 2, 70, routes=[2] * 4))
    assert kernels.ran == ["prefill"]


# Hard inputs.


@pytest.mark.parametrize("queries", [2, 70])
def test_scores_of_ninety(kernels: Kernels, numerics: ModuleType, queries: int) -> None:
    arguments = case(queries=queries, keys=70, routes=[0, 1, 2], dtype=torch.float32)
    extreme = arguments["query"] @ arguments["key"].transpose(-1, -2) * arguments["scaling"]
    arguments["query"] *= 90 / extreme.abs().max()
    assert_within_budget(kernels, numerics, arguments)


@pytest.mark.parametrize("queries", [2, 70])
@pytest.mark.parametrize("place", [0, 30, 69])
def test_one_key_a_thousand_times_larger(kernels: Kernels, numerics: ModuleType, place: int, queries: int) -> None:
    arguments = case(queries=queries, keys=70, routes=[0, 1, 2])
    arguments["key"][:, :, place] *= 1000
    assert_within_budget(kernels, numerics, arguments)


@pytest.mark.parametrize("queries", [2, 70])
def test_zero_rows(kernels: Kernels, numerics: ModuleType, queries: int) -> None:
    arguments = case(queries=queries, keys=70, routes=[0, 1, 2])
    arguments["query"][:, :, 1] = 0
    for name in ("key", "value"):
        arguments[name][:, :, 10:20] = 0
    assert_within_budget(kernels, numerics, arguments)
    arguments["key"][:], arguments["key_mean"][:], arguments["value"][:] = 0, 0, 0
    assert (kernels(arguments) == 0).all()


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("options", [{}, {"s_aux": torch.ones(3)}, {"clip_row": torch.ones(3)}, {"softcap": 5.0}])
def test_rows_that_see_nothing_are_zero(kernels: Kernels, options: dict[str, Any], queries: int) -> None:
    mask = torch.zeros(1, 1, queries, 20, dtype=torch.bool)
    out = kernels(case(queries=queries, keys=20, routes=[0, 1, 2], mask=mask, **options))
    assert kernels.ran
    assert (out == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize(("side", "queries"), [("left", 70), ("right", 70), ("left", 3)])
def test_what_pads_hold_never_reaches_a_real_token(kernels: Kernels, side: str, queries: int, poison: float) -> None:
    start, keys = torch.tensor([0, 13, 66]), 70
    if side == "left":
        real, mask = torch.arange(keys) >= start[:, None], left_padded(start, queries, keys)
    else:
        real = torch.arange(keys) < keys - start[:, None]
        mask = causal_mask(queries, keys) & real[:, None, None]
    options = {"mask": mask, "sink_start": start if side == "left" else None, "sink_size": 4}
    arguments = case(queries=queries, keys=keys, batch=3, routes=[0, 1, 2], **options)
    clean = kernels(arguments)
    pad = ~real[:, None, :, None]
    for name in ("key", "value"):
        arguments[name] = arguments[name].masked_fill(pad, poison)
    arguments["query"] = arguments["query"].masked_fill(pad[:, :, keys - queries :], poison)
    out = kernels(arguments)
    assert torch.equal(*(x.masked_fill(pad[:, :, keys - queries :], 0) for x in (out, clean)))


@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_nan_in_a_real_token_stays_visible(kernels: Kernels, name: str, queries: int) -> None:
    arguments = case(queries=queries, keys=70, routes=[0, 1, 2])
    at = 1 if name == "query" else 20
    arguments[name][:, :, at, 3] = torch.nan
    assert kernels(arguments)[:, :, 1 if queries == 3 or name == "query" else 20].isnan().any(-1).all()


def test_strided_inputs(kernels: Kernels) -> None:
    """Heads beside each other as projections leave them, and rows on odd addresses, which are copied."""
    arguments = case(4, 2, 70, batch=2)
    apart = {n: x for n, x in arguments.items() if n in ("query", "key", "value")}
    expected = kernels(arguments)
    strided = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in apart.items()}
    assert torch.equal(kernels({**arguments, **strided}), expected)
    odd = {n: torch.nn.functional.pad(x, (1, 0))[..., 1:] for n, x in apart.items()}
    assert torch.equal(kernels({**arguments, **odd}), expected)


# What the kernels do not serve, and machines without Triton.


@pytest.mark.parametrize(
    "other",
    [
        {"weight_scale": "row"},
        {"weight_scale": "fixed"},
        {"block": 32},
        {"dtype": torch.float64},
        {"dim": 24},
        {"dim": 272},
        {"queries": 0, "keys": 5},
    ],
    ids=str,
)
def test_calls_that_the_kernels_do_not_serve_are_left_to_the_reference(kernels: Kernels, other: dict[str, Any]) -> None:
    arguments = case(**{"queries": 20, **other})
    assert kernels(arguments) is None
    assert kernels.ran == []


def test_routes_that_are_none_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="routes"):
        kernels(case(routes=[0, 1, 3]))


def test_without_triton_the_reference_runs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = "quantsink.kernels.sink_attention"
    monkeypatch.setitem(sys.modules, f"{package}.triton_launch", None)
    monkeypatch.delattr(import_module(package), "triton_launch", raising=False)
    triton_backend.library.cache_clear()
    arguments = case()
    try:
        for _ in range(2):
            assert triton_backend.attend(Call.of(**arguments)) is None
    finally:
        triton_backend.library.cache_clear()
    warnings = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert len(warnings) == 1
    assert "pip install triton" in warnings[0]


def test_the_operator_has_a_cuda_implementation_that_loads_triton_late() -> None:
    program = (
        "import sys, torch, quantsink.kernels\n"
        "assert torch._C._dispatch_has_kernel_for_dispatch_key('quantsink::sink_attention', 'CUDA')\n"
        "assert not [name for name in sys.modules if name.startswith('quantsink') and name.endswith('triton_launch')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_bench_says_in_one_line_that_there_is_no_gpu() -> None:
    bench = Path(__file__).parents[2] / "kernels" / "bench" / "gpu.py"
    ran = subprocess.run([sys.executable, str(bench), "--check-only"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.strip().splitlines()[-1].startswith("gpu.py: PyTorch finds no CUDA device")


if __name__ == "__main__":
    serve()
