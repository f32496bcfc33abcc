"""`quantsink::quantized_linear`: one linear layer with INT8 weights in one call, whatever the layer's options are.

The reference reads like the formula of docs/formats.md. On CPU, C++ quantizes the rows, multiplies and applies scales,
native columns and bias in one pass over memory (docs/decisions/0002-int8-product.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantsink.kernels.dispatch import check_devices, direct
from quantsink.kernels.quantized_linear import cpu
from quantsink.kernels.quantized_linear.reference import Layer, reference

__all__ = ["Layer", "quantized_linear", "quantized_linears"]

torch.library.define(
    "quantsink::quantized_linear",
    "(Tensor x, Tensor? sink, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? native_rows,"
    " Tensor? native_row_index, Tensor? native_columns, Tensor? native_column_index, Tensor? input_scale,"
    " Tensor? sink_scale, str activations) -> Tensor",
)


@torch.library.impl("quantsink::quantized_linear", "CompositeExplicitAutograd")
def _reference(x: Tensor, sink: Tensor | None, *layer: object) -> Tensor:
    return reference(x, sink, Layer(*layer))  # type: ignore[arg-type]


@torch.library.impl("quantsink::quantized_linear", "CPU")
def _cpu(x: Tensor, sink: Tensor | None, *tensors: object) -> Tensor:
    layer = Layer(*tensors)  # type: ignore[arg-type]
    outputs = cpu.multiply(x, sink, (layer,))
    return reference(x, sink, layer) if outputs is None else outputs[0]


_operator = torch.ops.quantsink.quantized_linear.default


@torch.library.register_fake("quantsink::quantized_linear")
def _fake(x: Tensor, sink: Tensor | None, weight: Tensor, *rest: object) -> Tensor:
    check_devices(_operator, (x, sink, weight, *rest))
    return x.new_empty((x.shape[0], weight.shape[0]))


def quantized_linear(x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    """`x W^T + b` of one quantized layer.

    Args:
        x: `[M, K]`, any floating type.
        sink: `[S]` int64, the rows of `x` that belong to sink tokens and are treated as such: through the layer's
            `sink_scale` where it has one, else unquantized. None: no row.
        layer: the weights.

    Returns:
        `[M, N]` in the type of `x`. A row that holds NaN or inf comes out without a finite number.

    Raises:
        ValueError: an input of another shape or on another device than the layer's, unknown activations.
    """
    outputs = quantized_linears(x, sink, (layer,))
    if outputs is not None:
        return outputs[0]
    if x.dim() != 2 or layer.weight.dim() != 2:
        raise ValueError(
            f"quantized_linear: an input {list(x.shape)} for weights {list(layer.weight.shape)}; give [M, K] for [N, K]"
        )
    if layer.activations not in cpu.INPUTS:
        raise ValueError(f"quantized_linear: activations {layer.activations!r} are not one of {', '.join(cpu.INPUTS)}")
    if torch.is_grad_enabled() and x.requires_grad:
        return reference(x, sink, layer)
    result: Tensor = _operator(x, sink, *layer)
    return result


def quantized_linears(x: Tensor, sink: Tensor | None, layers: Sequence[Layer]) -> list[Tensor] | None:
    """`quantized_linear` of several layers with the same activations, bit for bit, in one pass over the input.

    None off the CPU, without the C++ kernels, and where something watches operators (`torch.compile`, a profiler).
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    if not direct(x, sink, *(tensor for layer in layers for tensor in layer[:-1])):
        return None
    return cpu.multiply(x, sink, layers)
