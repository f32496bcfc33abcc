"""Layers that one module applies to one input, q, k and v or gate and up, are computed in one pass over that input.

The architecture declares which layers belong together (`Architecture.shared_inputs`). transformers calls them one by
one: the first that is called computes all of them, and the others find their outputs here. Results are the same to the
bit (docs/decisions/0002-int8-product.md).

An output is handed out for the very tensor that it was computed from, unchanged. PyTorch counts changes of a tensor,
but not those made under `torch.inference_mode` or through `.data`. So only modules of transformers' own classes share
an input: they change nothing between the calls of their layers (tests/models/test_families.py), and a layer with
hooks, which could, is computed alone.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from quantsink.kernels import quantized_linear, quantized_linears

if TYPE_CHECKING:
    from quantsink.layers.linear import QuantizedLinear


class Ahead(NamedTuple):
    """What was computed ahead: the input, its state then, and the outputs that were not asked for yet."""

    x: Tensor
    state: tuple[int, bool]
    outputs: "dict[QuantizedLinear, Tensor]"


class SharedInputs:
    """One per model, emptied before and after each pass. `ahead` is replaced as a whole, so threads that share a model
    can cost each other time, and nothing else."""

    def __init__(self) -> None:
        self.ahead: Ahead | None = None

    def clear(self) -> None:
        self.ahead = None

    def __getstate__(self) -> dict[str, None]:
        """A copy of a model, or its file, has no pass under way."""
        return {"ahead": None}

    def compute(self, layer: "QuantizedLinear", x: Tensor, rows: Tensor, sink: Tensor | None) -> Tensor:
        """`[M, N]`: the layer's output for `x`, of which `rows` `[M, K]` is a view; `sink` as in `quantized_linear`."""
        ahead = self.ahead
        if ahead is not None and ahead.x is x and ahead.state == _state(x):
            output = ahead.outputs.pop(layer, None)
            if not ahead.outputs:
                self.ahead = None
            if output is not None:
                return output
        group = (layer, *(other for other in layer.group if other is not layer))
        hooked = any(member._forward_pre_hooks or member._forward_hooks for member in group)
        outputs = None if hooked else quantized_linears(rows, sink, [member.tensors() for member in group])
        if outputs is None:
            return quantized_linear(rows, sink, layer.tensors())
        self.ahead = Ahead(x, _state(x), dict(zip(group[1:], outputs[1:], strict=True)))
        return outputs[0]


def _state(x: Tensor) -> tuple[int, bool]:
    """Differs once `x` was changed in place, or where inference mode was entered or left."""
    return 0 if x.is_inference() else x._version, torch.is_inference_mode_enabled()


def share_inputs(model: nn.Module, groups: tuple[tuple[str, ...], ...]) -> None:
    """Let the quantized layers of each group be computed together where they quantize it in the same way."""
    from quantsink.layers.linear import QuantizedLinear

    for names in groups:
        layers = [model.get_submodule(name) for name in names]
        quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
        for layer in quantized:
            group = tuple(other for other in quantized if other.input_kind == layer.input_kind)
            layer.group = group if len(group) > 1 else ()
