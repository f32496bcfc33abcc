"""The quantized linear layer on CPU: addresses and sizes for C++ (kernels/csrc/linear.h)."""

import torch
from torch import Tensor

from quantsink.kernels.cpu import library
from quantsink.kernels.quantized_linear.reference import Layer, reference

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INPUTS = {"native": 0, "per_token": 1, "static": 2}
UNQUANTIZED_ROWS = 16
"""Up to so many rows of native activations read the INT8 weights directly; for more, widening the weights pays."""


def multiply(x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    """See `quantized_linear`."""
    built = library()
    if built is None or not _fits(x, layer) or not _inside(sink, len(x)):
        return reference(x, sink, layer)
    weight, scale, bias, rows, row_index, columns, column_index, input_scale, sink_scale, activations = layer
    if x.stride(1) != 1:
        x = x.contiguous()
    if sink is not None:
        sink = sink.long().contiguous()
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype)
    native = columns if columns is not None else bias
    done = m == 0 or built.linear(
        x.data_ptr(),
        x.stride(0),
        TYPES[x.dtype],
        m,
        n,
        k,
        weight.data_ptr(),
        scale.data_ptr(),
        0 if native is None else TYPES[native.dtype],
        0 if bias is None else bias.data_ptr(),
        0 if columns is None else columns.data_ptr(),
        0 if column_index is None else column_index.data_ptr(),
        0 if column_index is None else len(column_index),
        INPUTS[activations],
        0 if input_scale is None else input_scale.data_ptr(),
        0 if sink_scale is None else sink_scale.data_ptr(),
        0 if sink is None else sink.data_ptr(),
        0 if sink is None else len(sink),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if not done:
        raise MemoryError(f"quantized_linear: no memory for {m} rows of {k} inputs and {n} outputs")
    if rows is not None and row_index is not None:
        index = row_index.long()
        exact = x @ rows.t()
        out[:, index] = exact if bias is None else (exact.float() + bias[index]).to(x.dtype)
    return out


def _fits(x: Tensor, layer: Layer) -> bool:
    """Whether C++ knows the types and finds the tensors as it expects them."""
    weight, columns, index = layer.weight, layer.native_columns, layer.native_column_index
    if x.dtype not in TYPES or (layer.activations == "native" and x.shape[0] > UNQUANTIZED_ROWS):
        return False
    if weight.dtype != torch.int8 or not weight.is_contiguous() or x.shape[1] != weight.shape[1]:
        return False
    if not _dense(layer.weight_scale, torch.float32, (weight.shape[0],)):
        return False
    if not all(scale is None or _dense(scale, torch.float32, (1,)) for scale in (layer.input_scale, layer.sink_scale)):
        return False
    if (columns is None) != (index is None):
        return False
    native = layer.bias if columns is None else columns
    if native is None:
        return True
    fits = native.dtype in TYPES
    if columns is not None and index is not None:
        fits &= _dense(index, torch.int32, (len(index),)) and _dense(
            columns, native.dtype, (weight.shape[0], len(index))
        )
    return fits and (layer.bias is None or _dense(layer.bias, native.dtype, (weight.shape[0],)))


def _dense(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype == dtype and tuple(x.shape) == shape and x.is_contiguous()


def _inside(sink: Tensor | None, rows: int) -> bool:
    """Whether all sink rows lie where C++ may write; the reference counts negative ones from the end, or raises."""
    return sink is None or len(sink) == 0 or (int(sink.min()) >= 0 and int(sink.max()) < rows)


__all__ = ["multiply"]
