"""Exchange the modules of a model for quantized ones, to quantize it and to load a checkpoint alike."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import quantsink.layers  # noqa: F401  (registers what replaces a model's modules)
from quantsink.errors import ArchitectureError, CheckpointError, ModelError
from quantsink.hf.config import QuantSinkConfig
from quantsink.hf.own_cache import check_cache, install
from quantsink.hf.patches import Changes, changing, untie, use_attention
from quantsink.layers.linear import plain_output_head
from quantsink.layers.replacement import REPLACEMENTS, ReadModel, Replacement, Site, site_of
from quantsink.layers.shared_input import share_inputs
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import matrix
from quantsink.plan import Outline, Plan

log = logging.getLogger(__name__)


class Exchange(NamedTuple):
    """One module to be exchanged."""

    replacement: type[Replacement]
    place: str
    specification: Any


def planned(plan: Plan, read: ReadModel) -> list[Exchange]:
    """What a plan exchanges in a model, checked before anything is.

    Raises:
        QuantSinkError: the plan does not fit the model.
    """
    if plan.cache is not None:
        check_cache(read.model, plan.cache)
    return [
        Exchange(replacement, *item) for replacement in REPLACEMENTS for item in replacement.planned(plan, read).items()
    ]


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Quantize the modules of `model` in place as `plan` says and return it.

    Raises:
        ModelError: the model is quantized already.
        QuantSinkError: the plan names modules that the model does not have.
        The model has not been changed then, nor after any other exception.
    """
    with changing(model) as changes:
        apply_plan(changes, plan)
    return model


def apply_plan(changes: Changes, plan: Plan) -> dict[str, Exchange]:
    """As `apply`, with other changes; returns what was exchanged, by place."""
    model = changes.model
    check_unquantized(model)
    read = ReadModel.of(model)
    exchanges = planned(plan, read)
    head = plain_output_head(model) if plan.recipe.output_head == "int8" else None
    warn_of_zeros({name: dead_channels(matrix(read.modules[name])) for name in plan.linears})
    _exchange(changes, read, exchanges, plan.sink_size, lambda replacement: replacement.of)
    if head is not None:
        untie(changes, head)
    if plan.cache is not None:
        install(changes, plan.cache)
    if plan.attentions or plan.cache is not None:
        use_attention(changes)
    return {exchange.place: exchange for exchange in exchanges}


def build(changes: Changes, config: QuantSinkConfig) -> None:
    """Exchange the modules of a fresh (usually meta) model for empty quantized ones.

    Raises:
        CheckpointError: the config names a module that the model does not have, or other head counts.
    """
    outline: Outline = config.outline()
    try:
        read = ReadModel.of(changes.model)
    except ArchitectureError as error:
        raise CheckpointError(f"config.json: {error}; export again") from error
    exchanges = [
        Exchange(replacement, *item)
        for replacement in REPLACEMENTS
        for item in replacement.stored(outline, read).items()
    ]
    _exchange(changes, read, exchanges, outline.sink_size, lambda replacement: replacement.empty)


def _exchange(
    changes: Changes,
    read: ReadModel,
    exchanges: list[Exchange],
    sink_size: int,
    make: Callable[[type[Replacement]], Callable[[Site, Any], Replacement]],
) -> None:
    context, decoder = TokenContext(sink_size), read.architecture.decoder
    changes.hook(decoder, "which rows are sink tokens", lambda: context.attach(read.modules[decoder]))
    with torch.no_grad():
        for replacement, place, specification in exchanges:
            changes.put(place, make(replacement)(site_of(read.model, place, context), specification))
            for name, value in replacement.CONFIG.items():
                changes.configure(name, value)
    share_inputs(read.model, read.architecture.shared_inputs)


def dead_channels(weight: Tensor) -> int:
    """Output channels that hold only zeros; of a weight without data, none."""
    return 0 if weight.is_meta else int((weight == 0).all(1).sum())


def warn_of_zeros(dead: Mapping[str, int]) -> None:
    """Dead channels are quantized exactly, but who trained them may not know of them."""
    layers = [f"{name} ({count})" for name, count in dead.items() if count]
    if layers:
        more = f" and {len(layers) - 3} more layers" if len(layers) > 3 else ""
        log.warning("output channels that hold only zeros: %s%s", ", ".join(layers[:3]), more)


def check_unquantized(model: nn.Module) -> None:
    """Refuse a model whose weights are quantized already; quantizing twice loses accuracy without a trace."""
    config = getattr(model, "config", None)
    method = getattr(config, "quantization_config", None) or getattr(model, "quantization_method", None)
    if method or any(isinstance(module, Replacement) for module in model.modules()):
        raise ModelError(f"{type(model).__name__}: already quantized; load the original model instead")
