"""What each method does to a model."""

import copy
import itertools
from collections import Counter

import pytest
from transformers import LlamaForCausalLM

from quantsink.calibration.calibration import Calibration
from quantsink.errors import UsageError
from quantsink.eval import METHODS, parse_methods
from quantsink.eval.methods import CACHES, GROUPS, WHOLE_MODEL
from quantsink.kernels import Route
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import AttentionTable

SINK, INT8, NATIVE = Route.SINK, Route.INT8, Route.NATIVE


def build(name: str, model: LlamaForCausalLM, calibration: Calibration) -> LlamaForCausalLM:
    return METHODS[name].build(copy.deepcopy(model), calibration)


def routes(model: LlamaForCausalLM) -> Counter[int]:
    tables = [module for module in model.modules() if isinstance(module, AttentionTable)]
    return Counter(itertools.chain.from_iterable(table.routes.tolist() for table in tables))


def test_every_method_can_be_named_alone_and_is_in_all() -> None:
    assert [method.name for method in parse_methods("all")] == list(METHODS)
    assert [method.name for method in parse_methods("w8a8, attention-row,w8a8")] == [
        "reference",
        "w8a8",
        "attention-row",
    ]
    assert {method.group for method in METHODS.values()} | {"checkpoint", *CACHES} == set(GROUPS)


def test_an_unknown_method_is_reported_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'w9a9'.*known are all, reference, bnb-llm-int8"):
        parse_methods("w8a8,w9a9")


def test_a_calibrated_method_says_that_it_needs_one(model: LlamaForCausalLM) -> None:
    with pytest.raises(UsageError, match="needs a calibration"):
        METHODS["w8a8"].build(copy.deepcopy(model), None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("w8a8-plain", {}),
        ("w8a16", {}),
        ("attention-fixed", {INT8: 8}),
        ("attention-row", {INT8: 8}),
        ("attention-block", {INT8: 8}),
        ("attention-sink", {SINK: 2, INT8: 6}),
        ("attention-random", {SINK: 2, INT8: 6}),
        ("attention-all", {SINK: 8}),
        ("clip-absolute-10", {NATIVE: 8}),
        ("clip-row-10", {NATIVE: 8}),
        ("w8a8", {SINK: 2, INT8: 6}),
        ("w8a8-random", {SINK: 2, INT8: 6}),
    ],
)
def test_each_method_routes_its_heads(
    name: str, expected: dict[int, int], model: LlamaForCausalLM, calibration: Calibration
) -> None:
    built = build(name, model, calibration)
    assert routes(built) == expected
    quantized = sum(isinstance(module, QuantizedLinear) for module in built.modules())
    assert quantized == (14 if METHODS[name].group in WHOLE_MODEL else 0)


def test_clipping_alone_bounds_every_head(model: LlamaForCausalLM, calibration: Calibration) -> None:
    for name, clip in (("clip-absolute-10", "absolute"), ("clip-row-10", "row")):
        tables = [m for m in build(name, model, calibration).modules() if isinstance(m, AttentionTable)]
        assert {table.rule.clip.kind for table in tables} == {clip}
        assert all(table.clip is not None and bool((table.clip == 10).all()) for table in tables)


def test_plain_methods_keep_nothing_native(model: LlamaForCausalLM, calibration: Calibration) -> None:
    for name, activations in (("w8a8-plain", "per_token"), ("w8a8-static-plain", "static")):
        for module in build(name, model, calibration).modules():
            if isinstance(module, QuantizedLinear):
                assert (module.activations, module.sink_rows, module.shape.columns, module.shape.rows) == (
                    activations,
                    "plain",
                    0,
                    0,
                )
