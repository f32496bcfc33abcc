"""What a caller of `quantsink::sink_attention` may rely on: precision, causality, refusals, PyTorch's machinery."""

from types import ModuleType
from typing import Any

import pytest
import torch
from formula import case, left_padded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quantsink.kernels import Route, sink_attention
from quantsink.kernels.sink_attention.call import Call
from quantsink.kernels.sink_attention.reference import reference

INT8, SINK, NATIVE = Route.INT8, Route.SINK, Route.NATIVE


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
