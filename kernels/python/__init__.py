"""Operators that no library ships: attention with a route per head, and the INT8 linear product with its epilogue.

Each operator is a folder: one `torch.library` schema, a PyTorch reference that reads like the formula, and C++ and
Triton overrides held to it. Importing this package registers the operators.
"""

from quantsink.kernels.coded_attention import CodedKV, coded_attention
from quantsink.kernels.int8_linear import int8_linear, quantize_per_channel, quantize_per_token
from quantsink.kernels.quantized_linear import Layer, quantized_linear, quantized_linears
from quantsink.kernels.sink_attention import Route, sink_attention

__all__ = [
    "CodedKV",
    "Layer",
    "Route",
    "coded_attention",
    "int8_linear",
    "quantize_per_channel",
    "quantize_per_token",
    "quantized_linear",
    "quantized_linears",
    "sink_attention",
]
