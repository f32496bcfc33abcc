"""Apply a plan to a model: the only place where modules are exchanged, at quantization and at reload alike."""

import torch
from torch import nn

from quantsink.architecture import Architecture
from quantsink.attention import NAME, TABLE, AttentionTable
from quantsink.context import TokenContext
from quantsink.errors import ModelError, QuantSinkError
from quantsink.linear import QuantizedLinear
from quantsink.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Quantize `model` in place as `plan` says and return it.

    Raises:
        ModelError: the model is quantized already.
        QuantSinkError: the plan names modules that the model does not have. Nothing has been changed then.
    """
    check_unquantized(model)
    architecture = Architecture.of(model)
    modules = dict(model.named_modules())
    missing = [name for name in (*plan.linears, *plan.attentions) if name not in modules]
    if missing:
        raise QuantSinkError(f"{missing[0]}: in the plan but not in the model; calibrate this model again")
    context = TokenContext(plan.sink_size)
    context.attach(modules[architecture.decoder])
    for layer in architecture.attentions:
        if layer.name in plan.attentions:
            table = AttentionTable.of(layer, plan.attentions[layer.name], plan.recipe.attention, context)
            modules[layer.name].add_module(TABLE, table.to(modules[layer.q].weight.device))
    with torch.no_grad():
        for name, linear_plan in plan.linears.items():
            linear = modules[name]
            if not isinstance(linear, nn.Linear):
                raise QuantSinkError(
                    f"{name}: a {type(linear).__name__}, not a linear layer; calibrate this model again"
                )
            replace(model, name, QuantizedLinear.of(name, linear, linear_plan, context))
    if plan.attentions:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    return model


def check_unquantized(model: nn.Module) -> None:
    """Refuse a model whose weights are quantized already; quantizing twice loses accuracy without a trace."""
    config = getattr(model, "config", None)
    method = getattr(config, "quantization_config", None) or getattr(model, "quantization_method", None)
    if method or any(isinstance(module, QuantizedLinear | AttentionTable) for module in model.modules()):
        raise ModelError(f"{type(model).__name__}: already quantized; load the original model instead")


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
