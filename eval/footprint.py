"""Real sizes: bytes of the tensors as stored, with scales, tables and native slices; tied tensors count once."""

import json
import struct
from pathlib import Path
from typing import Any

from torch import nn

from quantsink.errors import CheckpointError
from quantsink.eval.rows import Footprint
from quantsink.kernels import Route
from quantsink.layers.tables import AttentionTable
from quantsink.models.architecture import Architecture


def footprint(model: nn.Module, architecture: Architecture, parameters: int, payload: int | None = None) -> Footprint:
    """Size and routes of one model.

    Args:
        architecture: the reference's; a quantized model no longer shows its own.
        parameters: of the reference, tied ones once.
        payload: bytes on disk where the model came from there; else those of its state dict.
    """
    tables = [module for module in model.modules() if isinstance(module, AttentionTable)]
    routes = [route for table in tables for route in table.routes.tolist()]
    untouched = architecture.heads - len(routes)
    native = untouched + routes.count(Route.NATIVE)
    bits = _dtype_bits(model)
    size = payload_bytes(model) if payload is None else payload
    return Footprint(
        bits_weight=size * 8 / parameters,
        bits_kv=float(bits),
        bits_attention=(native * bits + (architecture.heads - native) * 8) / architecture.heads,
        payload_bytes=size,
        sink_heads=routes.count(Route.SINK),
        native_heads=native,
    )


def count_parameters(model: nn.Module) -> int:
    """Parameters of an unquantized model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def payload_bytes(model: nn.Module) -> int:
    """Bytes that the state dict takes in a safetensors file, header apart."""
    tensors = model.state_dict().values()
    return sum({(t.device, t.data_ptr(), t.dtype, t.shape): t.numel() * t.element_size() for t in tensors}.values())


def payload_on_disk(folder: Path) -> int:
    """Bytes of all tensors in a checkpoint's safetensors files, headers apart.

    Raises:
        CheckpointError: no such file, or one that is cut off.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors file; a checkpoint is what `quantsink export` writes")
    return sum(_file_payload(path) for path in files)


def _file_payload(path: Path) -> int:
    """The format: the header's length in 8 bytes, a JSON header with each tensor's offsets, the tensors end to end."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, path.stat().st_size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            payload = max(ends, default=0)
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error}); export again") from error
    if path.stat().st_size < 8 + size + payload:
        raise CheckpointError(f"{path}: cut off; export again or fetch the shard")
    return int(payload)


def _dtype_bits(model: Any) -> int:
    return int(model.dtype.itemsize) * 8
