"""Quantized linear layers on CPU: addresses and sizes for C++ (kernels/csrc/linear.h)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantsink.kernels.cpu import library
from quantsink.kernels.quantized_linear.reference import Layer

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INPUTS = {"native": 0, "per_token": 1, "static": 2}
UNQUANTIZED_ROWS = 16
"""Up to this many rows of native activations read the INT8 weights directly; above, converting the weights pays."""


def multiply(x: Tensor, sink: Tensor | None, layers: Sequence[Layer]) -> list[Tensor] | None:
    """The outputs of layers with the same activations; `x` `[M, K]` is read once where all need the same codes.

    None for types and memory layouts that C++ does not take.
    """
    built = library()
    if built is None or not layers or x.dim() != 2 or x.dtype not in TYPES or not _inside(sink, len(x)):
        return None
    (m, k), activations = x.shape, layers[0].activations
    if activations == "native" and m > UNQUANTIZED_ROWS:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    if sink is not None:
        sink = sink.long().contiguous()
    outs, fields = [], []
    for layer in layers:
        if not _fits(layer, k, activations):
            return None
        out = torch.empty(m, layer.weight.shape[0], dtype=x.dtype, device="cpu")
        outs.append(out)
        fields.append(_fields(layer, out))
    fits = m == 0 or built.linear(
        x.data_ptr(),
        x.stride(0),
        TYPES[x.dtype],
        m,
        k,
        INPUTS[activations],
        0 if sink is None else sink.data_ptr(),
        0 if sink is None else len(sink),
        fields,
        torch.get_num_threads(),
    )
    if not fits:
        return None
    for layer, out in zip(layers, outs, strict=True):
        if layer.native_rows is not None and layer.native_row_index is not None:
            index = layer.native_row_index.long()
            exact = x @ layer.native_rows.t()
            out[:, index] = exact if layer.bias is None else (exact.float() + layer.bias[index]).to(x.dtype)
    return outs


def _fits(layer: Layer, k: int, activations: str) -> bool:
    """Whether types, shapes and layout are those that C++ takes; it checks the columns' indices itself."""
    weight, scale, bias, _, _, columns, index, input_scale, sink_scale, layer_activations = layer
    if layer_activations != activations or activations not in INPUTS:
        return False
    if (activations == "static") != (input_scale is not None):
        return False
    if weight.dtype != torch.int8 or weight.dim() != 2 or weight.shape[1] != k or not weight.is_contiguous():
        return False
    n = weight.shape[0]
    if not _dense(scale, torch.float32, (n,)) or (columns is None) != (index is None):
        return False
    if not all(x is None or _dense(x, torch.float32, (1,)) for x in (input_scale, sink_scale)):
        return False
    native = bias if columns is None else columns
    if native is None:
        return True
    if columns is not None and index is not None:
        count = len(index)
        if not _dense(index, torch.int32, (count,)) or not _dense(columns, columns.dtype, (n, count)):
            return False
    return native.dtype in TYPES and (bias is None or _dense(bias, native.dtype, (n,)))


def _fields(layer: Layer, out: Tensor) -> list[int]:
    """The layer's numbers in the order of bind_linear.cpp."""
    weight, scale, bias, _, _, columns, index, input_scale, sink_scale, _ = layer
    native = bias if columns is None else columns
    return [
        weight.shape[0],
        weight.data_ptr(),
        scale.data_ptr(),
        0 if native is None else TYPES[native.dtype],
        0 if bias is None else bias.data_ptr(),
        0 if columns is None else columns.data_ptr(),
        0 if index is None else index.data_ptr(),
        0 if index is None else len(index),
        0 if input_scale is None else input_scale.data_ptr(),
        0 if sink_scale is None else sink_scale.data_ptr(),
        out.data_ptr(),
    ]


def _dense(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype == dtype and x.shape == shape and x.is_contiguous()


def _inside(sink: Tensor | None, rows: int) -> bool:
    """Whether all sink rows lie where C++ may write; the reference counts negative ones from the end, or raises."""
    return sink is None or len(sink) == 0 or (int(sink.min()) >= 0 and int(sink.max()) < rows)
