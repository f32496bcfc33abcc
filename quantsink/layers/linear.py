"""The quantized linear layer: INT8 weight, optional native rows and columns, inputs native, per token or static."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import CheckpointError, QuantSinkError
from quantsink.kernels import Layer, quantize_per_channel, quantized_linear
from quantsink.layers.replacement import ReadModel, Replacement, Site, register
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import is_linear, matrix, output_head, sizes
from quantsink.plan import LinearPlan, LinearShape, Outline, Plan, head_plan


@register
class QuantizedLinear(Replacement):
    """`y = x W^T + b` with N outputs and K inputs.

    Tensors (docs/formats.md): `weight` int8 `[N, K]` with zeros where native, `weight_scale` `[N]`, `bias` `[N]`,
    `native_rows` `[R, K]` at `native_row_index` `[R]`, `native_columns` `[N, C]` at `native_column_index` `[C]`,
    `input_scale` and `sink_scale` `[1]` for static inputs.
    """

    FLOAT32 = ("weight_scale", "input_scale", "sink_scale")

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
        size: tuple[int, int],
        shape: LinearShape,
        *,
        context: TokenContext,
        dtype: torch.dtype,
        bias: bool,
    ) -> None:
        super().__init__()
        self.name, self.context, self.shape = name, context, shape
        self.group: tuple[QuantizedLinear, ...] = ()
        """Layers that its owner applies to the same input, itself included."""
        self.activations, self.sink_rows = shape.activations, shape.sink_rows
        self.out_features, self.in_features = size
        self.register_buffer("weight", torch.empty(size, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.empty(size[0], dtype=torch.float32))
        self.register_buffer("bias", torch.empty(size[0], dtype=dtype) if bias else None)
        if shape.rows:
            self.register_buffer("native_rows", torch.empty(shape.rows, size[1], dtype=dtype))
            self.register_buffer("native_row_index", torch.empty(shape.rows, dtype=torch.int32))
        if shape.columns:
            self.register_buffer("native_columns", torch.empty(size[0], shape.columns, dtype=dtype))
            self.register_buffer("native_column_index", torch.empty(shape.columns, dtype=torch.int32))
        if shape.activations == "static":
            self.register_buffer("input_scale", torch.empty(1, dtype=torch.float32))
            if shape.sink_rows == "table":
                self.register_buffer("sink_scale", torch.empty(1, dtype=torch.float32))

    @classmethod
    def planned(cls, plan: Plan, read: ReadModel) -> dict[str, LinearPlan]:
        linears = dict(plan.linears)
        known = set(read.architecture.linears)
        for name, linear in linears.items():
            if name not in known:
                raise QuantSinkError(
                    f"{name}: in the plan but no linear layer of the model; calibrate this model again"
                )
            outputs, inputs = sizes(read.modules[name])
            if max(linear.native_rows, default=0) >= outputs or max(linear.native_columns, default=0) >= inputs:
                raise QuantSinkError(f"{name}: the plan is for another size; calibrate this model again")
            if not (0 < linear.input_scale < math.inf and 0 < linear.sink_scale < math.inf):
                raise QuantSinkError(
                    f"{name}: the plan's scales must be positive and finite; calibrate this model again"
                )
        if plan.recipe.output_head == "int8":
            linears[plain_output_head(read.model)] = head_plan(plan.recipe)
        return linears

    @classmethod
    def stored(cls, outline: Outline, read: ReadModel) -> dict[str, LinearShape]:
        activations = outline.recipe.activations
        shapes = {}
        for name, (rows, columns) in outline.linears.items():
            linear = read.modules.get(name)
            if linear is None or not is_linear(linear) or rows > sizes(linear)[0] or columns > sizes(linear)[1]:
                raise CheckpointError(
                    f"config.json: {name} [{rows}, {columns}] does not fit a linear layer of the model; export again"
                )
            shapes[name] = LinearShape(activations.kind, activations.sink_rows, rows, columns)
        if outline.recipe.output_head == "int8":
            shapes[plain_output_head(read.model)] = head_plan(outline.recipe).shape
        return shapes

    @classmethod
    def empty(cls, site: Site, shape: LinearShape) -> "QuantizedLinear":
        weight = matrix(site.original)
        with weight.device:
            return cls(
                site.place,
                (weight.shape[0], weight.shape[1]),
                shape,
                context=site.context,
                dtype=weight.dtype,
                bias=site.original.bias is not None,
            )

    @classmethod
    def of(cls, site: Site, plan: LinearPlan) -> "QuantizedLinear":
        """Weights go to symmetric INT8 per output channel; native slices are kept as they are."""
        weight = matrix(site.original).detach()
        new = cls.empty(site, plan.shape)
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
        if isinstance(site.original.bias, Tensor):
            new.bias = site.original.bias.detach().clone()
        if plan.activations == "static":
            new.input_scale = torch.tensor([plan.input_scale], dtype=torch.float32, device=weight.device)
            if plan.sink_rows == "table":
                new.sink_scale = torch.tensor([plan.sink_scale], dtype=torch.float32, device=weight.device)
        return new

    def check(self, name: str, tensor: Tensor) -> bool:
        if name.endswith("_index"):
            size = self.out_features if name == "native_row_index" else self.in_features
            return bool(((tensor >= 0) & (tensor < size)).all()) and len(tensor.unique()) == len(tensor)
        if name.endswith("_scale"):
            return bool(((tensor > 0) & tensor.isfinite()).all())
        return super().check(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        if self.activations != "native" and torch.is_grad_enabled() and x.requires_grad:
            raise QuantSinkError(f"{self.name}: INT8 inputs have no gradient; call the model under torch.no_grad()")
        sink = None
        if self.activations != "native" and self.sink_rows != "plain":
            sink = self.context.sink_rows(x.shape, self.name)
        rows = x.reshape(-1, self.in_features)
        if self._shares(x):
            y = self.context.shared.compute(self, x, rows, sink)
        else:
            y = quantized_linear(rows, sink, self.tensors())
        return y.reshape(*x.shape[:-1], self.out_features)

    def _shares(self, x: Tensor) -> bool:
        """Whether its group may be computed with it. Not outside the model's pass, after which nothing is kept."""
        if not self.group or torch.compiler.is_compiling() or not self.context.running or not x.is_cpu:
            return False
        return not (torch.is_grad_enabled() and x.requires_grad)

    @property
    def input_kind(self) -> tuple[str, str]:
        """How its input is quantized; layers that agree in it can be computed in one call."""
        return self.activations, self.sink_rows

    def tensors(self) -> Layer:
        """What its kernel takes."""
        buffer = self._buffers.get
        return Layer(
            self.weight,
            self.weight_scale,
            buffer("bias"),
            buffer("native_rows"),
            buffer("native_row_index"),
            buffer("native_columns"),
            buffer("native_column_index"),
            buffer("input_scale"),
            buffer("sink_scale"),
            self.activations,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, activations={self.activations}, "
            f"native_rows={self.shape.rows}, native_columns={self.shape.columns}"
        )


def plain_output_head(model: Any) -> str:
    """The name of an output head that can be quantized.

    Raises:
        QuantSinkError: there is none, or it is no plain linear layer.
    """
    name = output_head(model)
    if name is None or type(model.get_submodule(name)) is not nn.Linear:
        raise QuantSinkError(
            f"{type(model).__name__}: its output head is no plain linear layer; use a recipe with output_head: native"
        )
    return name
