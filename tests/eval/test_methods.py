"""What each method does to a model, and what it weighs."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from quantsink.calibration.calibration import Calibration
from quantsink.errors import CheckpointError, UsageError
from quantsink.eval import METHODS, parse_methods
from quantsink.eval.footprint import count_parameters, footprint, payload_bytes, payload_on_disk
from quantsink.eval.methods import CACHES, GROUPS, WHOLE_MODEL
from quantsink.kernels import Route
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import AttentionTable
from quantsink.models.architecture import Architecture

SINK, INT8, NATIVE = Route.SINK, Route.INT8, Route.NATIVE


def build(name: str, model: LlamaForCausalLM, calibration: Calibration) -> LlamaForCausalLM:
    return METHODS[name].build(copy.deepcopy(model), calibration)


def routes(model: LlamaForCausalLM) -> Counter[int]:
    tables = [module for module in model.modules() if isinstance(module, AttentionTable)]
    return Counter(itertools.chain.from_iterable(table.routes.tolist() for table in tables))


def test_every_name_is_known_by_itself_and_in_all() -> None:
    assert [method.name for method in parse_methods("all")] == list(METHODS)
    assert [method.name for method in parse_methods("w8a8, attention-row,w8a8")] == [
        "reference",
        "w8a8",
        "attention-row",
    ]
    assert {method.group for method in METHODS.values()} | {"checkpoint", *CACHES} == set(GROUPS)


def test_an_unknown_method_is_named_with_those_known() -> None:
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
def test_routes(name: str, expected: dict[int, int], model: LlamaForCausalLM, calibration: Calibration) -> None:
    built = build(name, model, calibration)
    assert routes(built) == expected
    quantized = sum(isinstance(module, QuantizedLinear) for module in built.modules())
    assert quantized == (14 if METHODS[name].group in WHOLE_MODEL else 0)


def test_clipping_alone_bounds_every_head(model: LlamaForCausalLM, calibration: Calibration) -> None:
    for name, kind in (("clip-absolute-10", "absolute"), ("clip-row-10", "row")):
        tables = [m for m in build(name, model, calibration).modules() if isinstance(m, AttentionTable)]
        assert {table.rule.clip.kind for table in tables} == {kind}
        assert all(table.clip is not None and bool((table.clip == 10).all()) for table in tables)


def test_plain_methods_keep_nothing_native(model: LlamaForCausalLM, calibration: Calibration) -> None:
    for name, kind in (("w8a8-plain", "per_token"), ("w8a8-static-plain", "static")):
        for module in build(name, model, calibration).modules():
            if isinstance(module, QuantizedLinear):
                assert (module.activations, module.sink_rows, module.shape.columns, module.shape.rows) == (
                    kind,
                    "plain",
                    0,
                    0,
                )


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", ["reference", "bnb-llm-int8", "w8a8", "attention-sink"])
def test_the_payload_is_what_safetensors_writes(
    name: str, tie: bool, tiny: Callable[..., LlamaForCausalLM], calibration: Calibration, tmp_path: Path
) -> None:
    built = build(name, tiny(tie_word_embeddings=tie), calibration)
    tensors = {key: value for key, value in built.state_dict().items() if not (tie and key == "lm_head.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    on_disk = payload_on_disk(tmp_path)
    assert payload_bytes(built) == on_disk
    assert on_disk == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.1)


@pytest.mark.parametrize("tie", [True, False])
def test_the_payload_is_what_save_pretrained_writes(
    tie: bool, tiny: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    model = tiny(tie_word_embeddings=tie)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert payload_on_disk(tmp_path) == payload_bytes(model) == 4 * count_parameters(model)


def test_bits_of_the_reference_and_of_a_mixed_model(model: LlamaForCausalLM, calibration: Calibration) -> None:
    architecture, parameters = Architecture.of(model), count_parameters(model)
    plain = footprint(model, architecture, parameters)
    assert (plain.bits_weight, plain.bits_kv, plain.bits_attention, plain.native_heads) == (32, 32, 32, 8)
    half = footprint(copy.deepcopy(model).to(torch.bfloat16), architecture, parameters)
    assert (half.bits_weight, half.bits_kv, half.bits_attention) == (16, 16, 16)
    mixed = build("attention-sink", model, calibration)
    next(m for m in mixed.modules() if isinstance(m, AttentionTable)).routes[:] = NATIVE
    assert footprint(mixed, architecture, parameters).bits_attention == 20


def test_a_checkpoint_without_tensors_or_cut_off_is_an_error(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        payload_on_disk(tmp_path)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut off"):
        payload_on_disk(tmp_path)
    path.write_bytes(b"\x00" * 4)
    with pytest.raises(CheckpointError, match="not readable"):
        payload_on_disk(tmp_path)
