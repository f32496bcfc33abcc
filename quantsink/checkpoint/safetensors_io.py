"""Safetensors files read and written tensor by tensor, whatever their size."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantsink import strict_json
from quantsink.errors import ModelError

_DTYPES = {
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "U32": torch.uint32,
    "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""Types by their names in a file, in the order in which safetensors lays tensors."""


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_ORDER = {dtype: place for place, dtype in enumerate(_DTYPES.values())}


_LONGEST_HEADER = 100_000_000


class NotStreamableError(ModelError):
    """Why a model must be loaded whole: transformers does more on loading it than reading tensors."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file: its bytes lie from `start` on."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> Tensor:
        """Read, not mapped: a mapped file would count against what limits a process's memory.

        Raises:
            ModelError: the file cannot be read.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        into, done = memoryview(_bytes(tensor)), 0
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start)
                while done < self.size:
                    count = file.readinto(into[done:])
                    if not count:
                        raise OSError(f"ends after {self.start + done} bytes")
                    done += count
        except OSError as error:
            raise ModelError(
                f"{self.file}: cannot be read: {error.strerror or error}; fetch the model again"
            ) from error
        return tensor


def read_headers(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of a model's safetensors files.

    Raises:
        ModelError: a damaged file, or a tensor that is in two of them.
        NotStreamableError: a type that PyTorch does not have.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in sorted(_header(file).items()):
            if name in tensors:
                raise ModelError(
                    f"{file}: {name} is also in {tensors[name].file.name}, two tensors of one name; "
                    "fetch the model again"
                )
            tensors[name] = stored
    return tensors


def _header(file: Path) -> dict[str, Stored]:
    """A file's tensors, which must fill it without gaps or overlaps."""
    tensors, end = {}, 0
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(_LONGEST_HEADER, file.stat().st_size):
                raise ValueError("its header is longer than the file")
            entries = strict_json.parse(opened.read(length))
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if entry["dtype"] not in _DTYPES:
                raise NotStreamableError(f"{name} in {file.name} is {entry['dtype']}")
            if not all(type(size) is int and size >= 0 for size in entry["shape"]):
                raise ValueError(f"{name} has a shape that cannot be right")
            stored = Stored(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + first)
            if first != end or last != first + stored.size:
                raise ValueError(f"{name} does not lie where its header says")
            tensors[name], end = stored, last
        if 8 + length + end != file.stat().st_size:
            raise ValueError(f"holds {file.stat().st_size} bytes where its header says {8 + length + end}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file}: its model cannot be loaded, damaged: {error}; fetch the model again") from error
    return tensors


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def lay(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, tuple[Path, int]]:
    """Begin a safetensors file: its header, and room for tensors in the order that safetensors gives them.

    Returns:
        Where each tensor's bytes belong.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
        starts[name], size = end, tensor.numel() * tensor.dtype.itemsize
        end += size
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end - size, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: (path, 8 + len(text) + start) for name, start in starts.items()}


def write(path: Path, start: int, tensor: Tensor) -> None:
    """Write a tensor's bytes where `lay` made room for them."""
    rest = memoryview(_bytes(tensor.detach().contiguous()))
    with path.open("r+b", buffering=0) as file:
        while rest:
            start += (count := os.pwrite(file.fileno(), rest, start))
            rest = rest[count:]
