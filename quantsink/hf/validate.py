"""Whether the tensors of a checkpoint are those of the model that its config describes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantsink.errors import CheckpointError
from quantsink.layers.replacement import Replacement
from quantsink.models.finite import all_finite
from quantsink.strict_json import one_line, printable

_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}


def check_tensors(model: Any, files: Sequence[Path]) -> None:
    """Compare the shards' headers with the model before anything is read.

    Raises:
        CheckpointError: a damaged shard, or a tensor that is missing, surplus or of another shape or type, by name.
    """
    stored: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    part = shard.get_slice(name)
                    stored[name] = (file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file.name}: damaged: {one_line(error)}; fetch or export the checkpoint again"
            ) from error
    expected = model.state_dict()
    fixed = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, Replacement)
        for name in module.FLOAT32
    }
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    where = ", ".join(file.name for file in files[:3])
    for name, tensor in expected.items():
        if name not in stored:
            if name in tied:
                continue
            raise CheckpointError(f"{name} is missing from {where}; fetch or export the checkpoint again")
        file, shape, dtype = stored[name]
        exact = not tensor.is_floating_point() or name in fixed
        wrong = _DTYPES.get(dtype) != tensor.dtype if exact else not dtype.startswith(("F", "BF"))
        if shape != tuple(tensor.shape) or wrong:
            raise CheckpointError(
                f"{name} in {file.name} is {dtype} {list(shape)} where {tensor.dtype} {list(tensor.shape)} belongs; "
                "fetch or export the checkpoint again"
            )
    surplus = sorted(stored.keys() - expected.keys())
    if surplus:
        raise CheckpointError(
            f"{printable(surplus[0])} in {stored[surplus[0]][0].name} does not belong to this model; export it again"
        )


def check_values(model: Any) -> None:
    """What shapes and types cannot show: indices in range, scales positive, tables finite.

    Raises:
        CheckpointError: the first tensor that cannot be right, by name.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, Replacement):
            for name, tensor in module.named_buffers(recurse=False):
                if tensor.device.type != "meta" and not module.check(name, tensor):
                    raise CheckpointError(
                        f"{prefix}.{name} holds values that cannot be right; export the checkpoint again"
                    )
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.device.type != "meta" and not all_finite(parameter):
                raise CheckpointError(f"{prefix}.{name} holds NaN or inf; fetch or export the checkpoint again")
