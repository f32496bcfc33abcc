"""Quantized linear layers on CPU: addresses and sizes for C++ (kernels/csrc/linear.h)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantsink.kernels.cpu import library
from quantsink.kernels.quantized_linear.reference import Layer

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INPUTS = {"native": 0, "per_token": 1, "static": 2}
UNQUANTIZED_ROWS = 16
"""Up to so many rows of native activations read the INT8 weights directly; for more, widening the weights pays."""


def multiply(x: Tensor, sink: Tensor | None, layers: Sequence[Layer]) -> list[Tensor] | None:
    """The outputs of layers of one kind of activations, whose input `[M, K]` is read once where they turn it into the
    same codes. None where C++ does not know the types or does not find the tensors as it expects them."""
    built, activations = library(), layers[0].activations
    if built is None or x.dtype not in TYPES or not x.is_cpu or not _inside(sink, len(x)):
        return None
    m, k = x.shape
    if activations == "native" and m > UNQUANTIZED_ROWS:
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    if sink is not None:
        sink = sink.long().contiguous()
    outs, fields = [], []
    for layer in layers:
        out = torch.empty(m, layer.weight.shape[0], dtype=x.dtype)
        found = _fields(layer, k, out)
        if found is None:
            return None
        outs.append(out)
        fields.append(found)
    done = m == 0 or built.linear(
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
    if not done:
        raise MemoryError(f"quantized_linear: no memory for {m} rows of {k} inputs")
    for layer, out in zip(layers, outs, strict=True):
        if layer.native_rows is not None and layer.native_row_index is not None:
            index = layer.native_row_index.long()
            exact = x @ layer.native_rows.t()
            out[:, index] = exact if layer.bias is None else (exact.float() + layer.bias[index]).to(x.dtype)
    return outs


def _fields(layer: Layer, k: int, out: Tensor) -> list[int] | None:
    """The layer's numbers in the order of bind_linear.cpp."""
    weight, scale, bias, _, _, columns, index, input_scale, sink_scale, _ = layer
    n, count = weight.shape[0], 0
    if weight.dtype != torch.int8 or weight.shape[1] != k or not weight.is_contiguous() or not weight.is_cpu:
        return None
    if not _dense(scale, torch.float32, (n,)) or (columns is None) != (index is None):
        return None
    if not all(x is None or _dense(x, torch.float32, (1,)) for x in (input_scale, sink_scale)):
        return None
    native = bias if columns is None else columns
    if columns is not None and index is not None:
        count = len(index)
        if not _dense(index, torch.int32, (count,)) or not _dense(columns, columns.dtype, (n, count)):
            return None
    if native is not None and native.dtype not in TYPES:
        return None
    if bias is not None and native is not None and not _dense(bias, native.dtype, (n,)):
        return None
    return [
        n,
        weight.data_ptr(),
        scale.data_ptr(),
        0 if native is None else TYPES[native.dtype],
        0 if bias is None else bias.data_ptr(),
        0 if columns is None else columns.data_ptr(),
        0 if index is None else index.data_ptr(),
        count,
        0 if input_scale is None else input_scale.data_ptr(),
        0 if sink_scale is None else sink_scale.data_ptr(),
        out.data_ptr(),
    ]


def _dense(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype == dtype and x.shape == shape and x.is_contiguous() and x.is_cpu


def _inside(sink: Tensor | None, rows: int) -> bool:
    """Whether all sink rows lie where C++ may write; the reference counts negative ones from the end, or raises."""
    return sink is None or len(sink) == 0 or (int(sink.min()) >= 0 and int(sink.max()) < rows)
