"""The size of a model in memory is that of its tensors on disk; bits of weights, attention and cache."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from quantsink.calibration.calibration import Calibration
from quantsink.errors import CheckpointError
from quantsink.eval import METHODS
from quantsink.eval.footprint import count_parameters, footprint, payload_bytes, payload_on_disk
from quantsink.kernels import Route
from quantsink.layers.tables import AttentionTable
from quantsink.models.architecture import Architecture


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("codes", torch.zeros(5, dtype=torch.int8))


def test_tied_tensors_count_once_and_buffers_count() -> None:
    assert count_parameters(Tied()) == 12
    assert payload_bytes(Tied()) == 12 * 4 + 5


def test_the_payload_on_disk_is_that_of_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(3, dtype=torch.int8), "c": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    assert payload_on_disk(tmp_path) == 40 + 3 + 8


def test_files_that_are_missing_damaged_or_cut_off_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        payload_on_disk(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        payload_on_disk(tmp_path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="not readable as safetensors"):
        payload_on_disk(tmp_path)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", ["reference", "bnb-llm-int8", "w8a8", "attention-sink"])
def test_the_payload_is_what_safetensors_writes(
    name: str, tie: bool, tiny: Callable[..., LlamaForCausalLM], calibration: Calibration, tmp_path: Path
) -> None:
    built = METHODS[name].build(tiny(tie_word_embeddings=tie), calibration)
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
    mixed = METHODS["attention-sink"].build(copy.deepcopy(model), calibration)
    next(m for m in mixed.modules() if isinstance(m, AttentionTable)).routes[:] = Route.NATIVE
    assert footprint(mixed, architecture, parameters).bits_attention == 20
