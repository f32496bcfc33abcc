"""Whether the tensors of a checkpoint are those of the model that its config describes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantsink.errors import CheckpointError
from quantsink.kernels import Route
from quantsink.layers.experts import ExpertWeights
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import AttentionTable, CacheTable
from quantsink.models.finite import all_finite
from quantsink.strict_json import named, said

_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}


def check_tensors(model: Any, files: Sequence[Path]) -> None:
    """Compare the shards' headers with the model before anything is read.

    Raises:
        CheckpointError: a damaged shard, or a tensor that is missing, surplus or of another shape or type, by name.
    """
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    part = shard.get_slice(name)
                    found[name] = (file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file.name}: damaged: {said(error)}; fetch or export the checkpoint again"
            ) from error
    expected = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    where = ", ".join(file.name for file in files[:3])
    for name, tensor in expected.items():
        if name not in found:
            if name in tied:
                continue
            raise CheckpointError(f"{name} is missing from {where}; fetch or export the checkpoint again")
        file, shape, dtype = found[name]
        exact = not tensor.is_floating_point() or name.endswith(("_scale", "key_mean", "clip", "query_gram"))
        wrong = _DTYPES.get(dtype) != tensor.dtype if exact else not dtype.startswith(("F", "BF"))
        if shape != tuple(tensor.shape) or wrong:
            raise CheckpointError(
                f"{name} in {file.name} is {dtype} {list(shape)} where {tensor.dtype} {list(tensor.shape)} belongs; "
                "fetch or export the checkpoint again"
            )
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        raise CheckpointError(
            f"{named(surplus[0])} in {found[surplus[0]][0].name} does not belong to this model; export it again"
        )


def check_values(model: Any) -> None:
    """What shapes and types cannot show: indices in range, scales positive, tables finite.

    Raises:
        CheckpointError: the first tensor that cannot be right, by name.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, QuantizedLinear | AttentionTable | CacheTable | ExpertWeights):
            for name, tensor in module.named_buffers(recurse=False):
                if tensor.device.type != "meta" and not _good_values(module, name, tensor):
                    raise CheckpointError(
                        f"{prefix}.{name} holds values that cannot be right; export the checkpoint again"
                    )
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.device.type != "meta" and not all_finite(parameter):
                raise CheckpointError(f"{prefix}.{name} holds NaN or inf; fetch or export the checkpoint again")


def _good_values(module: Any, name: str, tensor: torch.Tensor) -> bool:
    if name.endswith("_index"):
        size = module.out_features if name == "native_row_index" else module.in_features
        return bool(((tensor >= 0) & (tensor < size)).all()) and len(tensor.unique()) == len(tensor)
    if name.endswith("_scale"):
        return bool(((tensor > 0) & tensor.isfinite()).all())
    if name == "routes":
        return bool((tensor <= max(Route)).all())
    if name == "clip":
        return bool((tensor > 0).all())
    return not tensor.is_floating_point() or all_finite(tensor)
