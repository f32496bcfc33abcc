"""Sizes of models: in memory, in files, tied tensors once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quantsink.errors import CheckpointError
from quantsink.eval.footprint import count_parameters, payload_bytes, payload_on_disk


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
