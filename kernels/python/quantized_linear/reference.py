"""The quantized linear layer in PyTorch: what every other implementation is held to, and what runs on CUDA."""

from typing import NamedTuple

import torch
from torch import Tensor

from quantsink.kernels.int8_linear import int8_linear, quantize_per_token, quantize_static


class Layer(NamedTuple):
    """One layer's tensors, as docs/formats.md names them: N outputs, K inputs, R native rows, C native columns."""

    weight: Tensor
    """`[N, K]` int8, 0 at native rows and columns."""
    weight_scale: Tensor
    """`[N]` float32."""
    bias: Tensor | None = None
    """`[N]`."""
    native_rows: Tensor | None = None
    """`[R, K]`."""
    native_row_index: Tensor | None = None
    """`[R]` int32."""
    native_columns: Tensor | None = None
    """`[N, C]`."""
    native_column_index: Tensor | None = None
    """`[C]` int32."""
    input_scale: Tensor | None = None
    """`[1]` float32, static activations."""
    sink_scale: Tensor | None = None
    """`[1]` float32: static activations of sink rows."""
    activations: str = "per_token"
    """`native`, `per_token` or `static`."""


def reference(x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    """See `quantized_linear`."""
    rest, columns = x, None
    if layer.native_column_index is not None:
        index = layer.native_column_index.long()
        columns = x[:, index]
        rest = x.index_fill(1, index, 0)
    y = _int8(rest, sink, layer)
    if columns is not None and layer.native_columns is not None:
        y += columns.float() @ layer.native_columns.float().t()
    if layer.native_rows is not None and layer.native_row_index is not None:
        y[:, layer.native_row_index.long()] = (x @ layer.native_rows.t()).float()
    if layer.bias is not None:
        y += layer.bias
    return y.to(x.dtype)


def _int8(x: Tensor, sink: Tensor | None, layer: Layer) -> Tensor:
    """`[M, N]` in float32: the part of the product that has INT8 weights."""
    if layer.activations == "native":
        return _dequantized(x, layer)
    if layer.input_scale is None:
        codes, scale = quantize_per_token(x)
    else:
        scale = layer.input_scale.view(1, 1)
        if sink is not None and layer.sink_scale is not None:
            scale = scale.repeat(len(x), 1)
            scale[sink] = layer.sink_scale
        codes = quantize_static(x, scale)
        scale = scale + x.float().sum(-1, keepdim=True) * 0  # a row with NaN or inf stays visible
    y = int8_linear(codes, layer.weight, scale, layer.weight_scale)
    if sink is not None and layer.sink_scale is None:
        y[sink] = _dequantized(x[sink], layer)
    return y


def _dequantized(x: Tensor, layer: Layer) -> Tensor:
    if x.dtype == torch.float16:
        x = x.float()  # codes up to 127 times a massive activation would pass float16's 65,504
    return (x @ layer.weight.to(x.dtype).t()).float() * layer.weight_scale
