"""The quantized linear layer: INT8 weight, optional native rows and columns, inputs native, per token or static."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import QuantSinkError
from quantsink.kernels import Layer, quantize_per_channel, quantized_linear
from quantsink.layers.buffers import keep_float32
from quantsink.layers.shared_input import Peers
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import matrix
from quantsink.plan import LinearPlan


class QuantizedLinear(nn.Module):
    """`y = x W^T + b` with N outputs and K inputs.

    Tensors (docs/formats.md): `weight` int8 `[N, K]` with zeros where native, `weight_scale` `[N]`, `bias` `[N]`,
    `native_rows` `[R, K]` at `native_row_index` `[R]`, `native_columns` `[N, C]` at `native_column_index` `[C]`,
    `input_scale` and `sink_scale` `[1]` for static inputs.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    native_rows: Tensor
    native_row_index: Tensor
    native_columns: Tensor
    native_column_index: Tensor
    input_scale: Tensor
    sink_scale: Tensor

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        activations: str,
        sink_rows: str,
        rows: int,
        columns: int,
        context: TokenContext,
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        super().__init__()
        self.name, self.context, self.peers = name, context, Peers()
        self.activations, self.sink_rows, self.rows, self.columns = activations, sink_rows, rows, columns
        self.out_features, self.in_features = shape
        self.register_buffer("weight", torch.empty(shape, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.empty(shape[0], dtype=torch.float32))
        self.register_buffer("bias", torch.empty(shape[0], dtype=dtype) if bias else None)
        if rows:
            self.register_buffer("native_rows", torch.empty(rows, shape[1], dtype=dtype))
            self.register_buffer("native_row_index", torch.empty(rows, dtype=torch.int32))
        if columns:
            self.register_buffer("native_columns", torch.empty(shape[0], columns, dtype=dtype))
            self.register_buffer("native_column_index", torch.empty(columns, dtype=torch.int32))
        if activations == "static":
            self.register_buffer("input_scale", torch.empty(1, dtype=torch.float32))
            if sink_rows == "table":
                self.register_buffer("sink_scale", torch.empty(1, dtype=torch.float32))

    @classmethod
    def empty(
        cls, name: str, linear: nn.Module, plan: LinearPlan, rows: int, columns: int, context: TokenContext
    ) -> "QuantizedLinear":
        """In place of `linear`, on its device, with tensors that hold nothing yet."""
        weight = matrix(linear)
        with weight.device:
            return cls(
                name,
                (weight.shape[0], weight.shape[1]),
                activations=plan.activations,
                sink_rows=plan.sink_rows,
                rows=rows,
                columns=columns,
                context=context,
                dtype=weight.dtype,
                bias=linear.bias is not None,
            )

    @classmethod
    def of(cls, name: str, linear: nn.Module, plan: LinearPlan, context: TokenContext) -> "QuantizedLinear":
        """Quantize one layer; weights go to symmetric INT8 per output channel, native slices are kept as they are."""
        weight = matrix(linear).detach()
        new = cls.empty(name, linear, plan, len(plan.native_rows), len(plan.native_columns), context)
        rest = weight.clone(memory_format=torch.contiguous_format)
        if plan.native_rows:
            index = torch.tensor(plan.native_rows, device=weight.device)
            new.native_rows, new.native_row_index = weight[index].clone(), index.int()
            rest[index] = 0
        if plan.native_columns:
            index = torch.tensor(plan.native_columns, device=weight.device)
            new.native_columns, new.native_column_index = rest[:, index].clone(), index.int()
            rest[:, index] = 0
        new.weight, new.weight_scale = quantize_per_channel(rest)
        if isinstance(linear.bias, Tensor):
            new.bias = linear.bias.detach().clone()
        if plan.activations == "static":
            new.input_scale = torch.tensor([plan.input_scale], dtype=torch.float32, device=weight.device)
            if plan.sink_rows == "table":
                new.sink_scale = torch.tensor([plan.sink_scale], dtype=torch.float32, device=weight.device)
        return new

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to(dtype)` changes what is native; scales stay float32, as the format says."""
        return keep_float32(self, fn, ("weight_scale", "input_scale", "sink_scale"), super()._apply, recurse)

    def forward(self, x: Tensor) -> Tensor:
        if self.activations != "native" and torch.is_grad_enabled() and x.requires_grad:
            raise QuantSinkError(f"{self.name}: INT8 inputs have no gradient; call the model under torch.no_grad()")
        merging = self.context.merging if self._merges(x) else None
        y = None if merging is None else merging.take(self, x)
        if y is None:
            sink = None
            if self.activations != "native" and self.sink_rows != "plain":
                sink = self.context.sink_rows(x.shape, self.name)
            rows = x.reshape(-1, self.in_features)
            if merging is None:
                y = quantized_linear(rows, sink, self.tensors())
            else:
                y = merging.compute(self, x, rows, sink)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _merges(self, x: Tensor) -> bool:
        """Whether other layers may be computed with this one. Not outside the model's forward pass, after which nothing
        is kept."""
        if torch.compiler.is_compiling() or not self.context.running or not x.is_cpu or self._forward_pre_hooks:
            return False
        return not (torch.is_grad_enabled() and x.requires_grad)

    @property
    def kind(self) -> tuple[str, str, str]:
        """Layers of one kind, parts of one module, may be computed together where they read the same input."""
        return self.name.rpartition(".")[0], self.activations, self.sink_rows

    def tensors(self) -> Layer:
        """What its kernel takes."""
        found = self._buffers.get
        return Layer(
            self.weight,
            self.weight_scale,
            found("bias"),
            found("native_rows"),
            found("native_row_index"),
            found("native_columns"),
            found("native_column_index"),
            found("input_scale"),
            found("sink_scale"),
            self.activations,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, activations={self.activations}, "
            f"native_rows={self.rows}, native_columns={self.columns}"
        )
