"""Files written and read tensor by tensor are those of the safetensors library, and damaged ones are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantsink.checkpoint.safetensors_io import NotStreamableError, lay, read_headers, write
from quantsink.errors import ModelError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.int8),
    "c.weight": torch.linspace(0, 1, 5).bfloat16(),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(7, dtype=torch.int64),
}


def test_a_file_is_byte_for_byte_the_librarys(tmp_path):
    places = lay(tmp_path / "ours.safetensors", TENSORS, {"format": "pt"})
    for name in reversed(TENSORS):
        write(*places[name], TENSORS[name])
    save_file(TENSORS, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_tensors_are_read_one_by_one(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    stored = read_headers([tmp_path / "x.safetensors"])
    assert stored.keys() == TENSORS.keys()
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(stored[name].read(), tensor)
        assert stored[name].size == tensor.nbytes
        assert stored[name].meta().shape == tensor.shape
        assert stored[name].meta().is_meta


def test_a_tensor_that_stands_in_two_files_is_named(tmp_path):
    for name in ("1", "2"):
        save_file({"twice": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"2\.safetensors: twice is also in 1\.safetensors"):
        read_headers([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])


def damaged(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["a"].update(data_offsets=[0, 24]), "does not lie where its header says"),
        (lambda h: h["a"].update(shape=[2, 4]), "does not lie where its header says"),
        (lambda h: h["a"].update(shape=[-2, 3]), "has a shape that cannot be right"),
        (lambda h: h.pop("b"), "holds .* bytes where its header says"),
    ],
)
def test_a_header_that_lies_is_named(change, message, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    damaged(path, change)
    with pytest.raises(ModelError, match=message):
        read_headers([path])


def test_an_unknown_type_has_to_be_loaded_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    damaged(path, lambda header: header["a"].update(dtype="F4"))
    with pytest.raises(NotStreamableError, match=r"a in x\.safetensors is F4"):
        read_headers([path])


def test_a_file_cut_off_while_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    stored = read_headers([path])
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ModelError, match="cannot be read: ends after"):
        [tensor.read() for tensor in stored.values()]
