"""Apply a plan to a model: the only place where modules are exchanged, at quantization and at reload alike."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import ModelError, QuantSinkError
from quantsink.hf.attention import NAME
from quantsink.hf.sink_cache import install, policies
from quantsink.layers.experts import ExpertWeights, index_experts, put
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import TABLE, AttentionTable
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import Architecture, device_of, matrix, output_head, sizes
from quantsink.plan import Plan, head_plan

log = logging.getLogger(__name__)


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Quantize `model` in place as `plan` says and return it.

    Raises:
        ModelError: the model is quantized already.
        QuantSinkError: the plan names modules that the model does not have. Nothing has been changed then.
    """
    check_unquantized(model)
    architecture = Architecture.of(model)
    modules = dict(model.named_modules())
    _check_plan(model, architecture, plan, modules)
    head = check_head(model) if plan.recipe.output_head == "int8" else None
    context = TokenContext(plan.sink_size)
    context.attach(modules[architecture.decoder])
    for layer in architecture.attentions:
        if layer.name in plan.attentions:
            table = AttentionTable.of(layer, plan.attentions[layer.name], plan.recipe.attention, context)
            modules[layer.name].add_module(TABLE, table.to(device_of(modules[layer.q.module])))
    warn_of_zeros({name: dead_channels(matrix(modules[name])) for name in plan.linears})
    with torch.no_grad():
        for name, linear_plan in plan.linears.items():
            replace(model, name, QuantizedLinear.of(name, modules[name], linear_plan, context))
        for experts in architecture.experts:
            if experts.name in plan.experts:
                put(modules[experts.name], experts, ExpertWeights.of)
                index_experts(model)
        if head is not None:
            replace(model, head, QuantizedLinear.of(head, modules[head], head_plan(plan.recipe), context))
            untie(model, head)
    if plan.cache is not None:
        install(model, plan.cache)
    if plan.attentions or plan.cache is not None:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    return model


def dead_channels(weight: Tensor) -> int:
    """Output channels that hold only zeros; of a weight without data, none."""
    return 0 if weight.is_meta else int((weight == 0).all(1).sum())


def warn_of_zeros(dead: Mapping[str, int]) -> None:
    """Dead channels are quantized exactly, but who trained them may not know of them."""
    found = [f"{name} ({count})" for name, count in dead.items() if count]
    if found:
        more = f" and {len(found) - 3} more layers" if len(found) > 3 else ""
        log.warning("output channels that hold only zeros: %s%s", ", ".join(found[:3]), more)


def _check_plan(model: Any, architecture: Architecture, plan: Plan, modules: dict[str, Any]) -> None:
    """Everything that could go wrong half-way is looked at before the first module is exchanged."""
    layers = {layer.name: layer for layer in architecture.attentions}
    for name, attention in plan.attentions.items():
        layer = layers.get(name)
        shape = (len(attention.routes), len(attention.key_mean), *{len(row) for row in attention.key_mean})
        if layer is None or shape != (layer.heads, layer.kv_heads, layer.head_dim):
            raise QuantSinkError(f"{name}: the plan's heads {shape} are not the model's; calibrate this model again")
        if not all(math.isfinite(value) for row in attention.key_mean for value in row):
            raise QuantSinkError(f"{name}: the plan's mean key is not finite; calibrate this model again")
    unknown = set(plan.experts) - {experts.name for experts in architecture.experts}
    if unknown:
        raise QuantSinkError(f"{min(unknown)}: in the plan but no experts of the model; calibrate this model again")
    if plan.cache is not None:
        policies(model, plan.cache)
    known = set(architecture.linears)
    for name, linear in plan.linears.items():
        if name not in known:
            raise QuantSinkError(f"{name}: in the plan but no linear layer of the model; calibrate this model again")
        outputs, inputs = sizes(modules[name])
        rows, columns = max(linear.native_rows, default=0), max(linear.native_columns, default=0)
        if rows >= outputs or columns >= inputs:
            raise QuantSinkError(f"{name}: the plan is for another size; calibrate this model again")
        if not (0 < linear.input_scale < math.inf and 0 < linear.sink_scale < math.inf):
            raise QuantSinkError(f"{name}: the plan's scales must be positive and finite; calibrate this model again")


def check_head(model: Any) -> str:
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


def untie(model: Any, head: str) -> None:
    """Let `head` keep weights of its own, in this model and in what loads its config."""
    model.config.tie_word_embeddings = False
    tied = getattr(model, "all_tied_weights_keys", {})
    model.all_tied_weights_keys = {k: v for k, v in tied.items() if not k.startswith(f"{head}.")}


def check_unquantized(model: nn.Module) -> None:
    """Refuse a model whose weights are quantized already; quantizing twice loses accuracy without a trace."""
    config = getattr(model, "config", None)
    method = getattr(config, "quantization_config", None) or getattr(model, "quantization_method", None)
    if method or any(
        isinstance(module, QuantizedLinear | AttentionTable | ExpertWeights) for module in model.modules()
    ):
        raise ModelError(f"{type(model).__name__}: already quantized; load the original model instead")


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
