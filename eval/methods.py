"""The methods of a report: what each one is, and how it is built from the unquantized model."""

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.errors import QuantSinkError, UsageError
from quantsink.eval.divergence import MakeCache
from quantsink.hf.convert import apply
from quantsink.hf.patches import changing
from quantsink.models.architecture import Architecture
from quantsink.recipe import PRESETS, Activations, Attention, Clip, Recipe

OUTLIER_THRESHOLD = 6.0
"""LLM.int8()'s default: input columns above it are multiplied in 16 bits (Dettmers et al., NeurIPS 2022)."""

GROUPS = {
    "reference": "Reference",
    "peer": "Other toolkits",
    "plain": "Whole model, sinks ignored",
    "attention": "INT8 attention alone, weights native",
    "clip": "Clipped scores alone, everything native",
    "preset": "quantsink's presets, whole model",
    "control": "Controls",
    "checkpoint": "Exported checkpoints",
    "cache": "KV caches, weights native",
    "peer-cache": "Other KV caches",
}
"""Groups of rows in the order of the report, with their headings."""
WHOLE_MODEL = ("peer", "plain", "preset", "control", "checkpoint")
"""Groups whose linear layers are quantized."""
CACHES = ("cache", "peer-cache")
"""Groups measured through a KV cache."""
PEERS = ("peer", "peer-cache")
"""Groups of other toolkits' methods. If one fails, its row says why."""


class NotRunError(QuantSinkError):
    """A method that cannot run here; the report shows the message as the reason."""


@dataclass(frozen=True)
class Method:
    """How one row is made.

    `build` takes a copy of the model, which it may change, and the calibration if `calibrated`. `cache` takes the model
    that was built and returns the function that makes each window's KV cache.
    """

    name: str
    description: str
    group: str
    build: Callable[[Any, Calibration | None], Any]
    calibrated: bool = True
    cache: Callable[[Any, Calibration | None], MakeCache] | None = None


def parse_methods(names: str = "all") -> tuple[Method, ...]:
    """`all`, `none`, or names separated by commas. The reference is always measured, and comes first.

    Raises:
        UsageError: an unknown name.
    """
    special = {"all": list(METHODS), "none": []}
    chosen = special.get(names.strip(), [name.strip() for name in names.split(",")])
    unknown = [name for name in chosen if name not in METHODS]
    if unknown:
        raise UsageError(f"--methods {', '.join(map(repr, unknown))}: unknown; known are all, {', '.join(METHODS)}")
    return tuple(METHODS[name] for name in dict.fromkeys(["reference", *chosen]))


def from_recipe(name: str, description: str, group: str, recipe: Recipe) -> Method:
    """A method that applies one recipe; use it to put your own recipe into a report."""
    return Method(name, description, group, lambda model, calibration: _quantize(model, calibration, recipe))


def _quantize(model: Any, calibration: Calibration | None, recipe: Recipe) -> Any:
    if calibration is None:
        raise UsageError("this method needs a calibration of the model; give --calibration")
    return apply(model, plan(calibration, recipe))


def _reference(model: Any, _: Calibration | None) -> Any:
    return model


def _clipped(clip: Clip) -> Callable[[Any, Calibration | None], Any]:
    """Every head on the native route, so that only the clip changes anything."""

    def build(model: Any, calibration: Calibration | None) -> Any:
        heads = Architecture.of(model).heads
        return _quantize(model, calibration, _attention(native_heads=heads, clip=clip))

    return build


def _llm_int8(model: Any, _: Calibration | None) -> Any:
    """Every linear layer of the decoder as bitsandbytes' `Linear8bitLt`."""
    device = next(model.parameters()).device
    layer = _linear8bit(device)
    with changing(model) as changes:
        for name in Architecture.of(model).linears:
            changes.put(name, layer(model.get_submodule(name)))
    return model


def _linear8bit(device: torch.device) -> Callable[[nn.Linear], nn.Module]:
    try:
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
    except Exception as error:
        raise NotRunError(f"bitsandbytes cannot be imported: {one_line(error)}") from error

    def convert(linear: nn.Linear) -> nn.Module:
        new: nn.Module = bitsandbytes.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
            threshold=OUTLIER_THRESHOLD,
            device="meta",
        )
        weight = linear.weight.detach().cpu()
        new.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
        new.bias = linear.bias
        new.requires_grad_(False)
        return new

    try:
        convert(nn.Linear(32, 32))(torch.ones(1, 32, device=device))
    except Exception as error:
        raise NotRunError(f"bitsandbytes does not run on {device}: {one_line(error)}") from error
    return convert


@contextlib.contextmanager
def quiet_peers() -> Iterator[None]:
    """Silence bitsandbytes, which logs every optional kernel it lacks and every cast of every layer."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


_NO_ATTENTION = Attention(kind="native", sinks="none")
_WEIGHTS_NATIVE = Recipe(
    weights="native", activations=Activations("native", native_columns=0.0, sink_rows="plain"), attention=_NO_ATTENTION
)


def _plain(activations: Any) -> Recipe:
    return Recipe(activations=Activations(activations, native_columns=0.0, sink_rows="plain"), attention=_NO_ATTENTION)


def _attention(**options: Any) -> Recipe:
    return replace(_WEIGHTS_NATIVE, attention=Attention(**options))


def _standard() -> list[Method]:
    w8a8 = PRESETS["w8a8"]
    random_w8a8 = replace(w8a8, attention=replace(w8a8.attention, sinks="random"))
    absolute, row = Clip("absolute", 10.0, math.inf), Clip("row", 10.0, math.inf)
    rows = [
        ("w8a8-plain", "one scale per token, no column native, attention native", "plain", _plain("per_token")),
        ("w8a8-static-plain", "one fixed scale per tensor, attention native", "plain", _plain("static")),
        ("attention-fixed", "one fixed scale, 1/127", "attention", _attention(sinks="none", weight_scale="fixed")),
        (
            "attention-row",
            "one scale per row, as published kernels have it",
            "attention",
            _attention(sinks="none", weight_scale="row"),
        ),
        (
            "attention-block",
            "one scale per row and 64 keys, no sink token split off",
            "attention",
            _attention(sinks="none"),
        ),
        ("attention-sink", "the sink token split off in the sink heads", "attention", _attention()),
        (
            "attention-random",
            "the sink token split off in as many random heads",
            "attention",
            _attention(sinks="random"),
        ),
        ("attention-all", "the sink token split off in every head", "attention", _attention(sinks="all")),
    ]
    presets = [
        ("w8a16", "INT8 weights only", "preset", PRESETS["w8a16"]),
        ("w8a8", "one input scale per token, INT8 attention, sinks and outliers native", "preset", w8a8),
        ("w8a8-static", "fixed input scales: one for sink tokens, one for the rest", "preset", PRESETS["w8a8-static"]),
        ("w8a8-random", "w8a8 with the sink route on as many random heads", "control", random_w8a8),
    ]
    return [
        Method("reference", "the unquantized model", "reference", _reference, calibrated=False),
        Method("bnb-llm-int8", "bitsandbytes LLM.int8(), threshold 6", "peer", _llm_int8, calibrated=False),
        *(from_recipe(*row) for row in rows),
        Method("clip-absolute-10", "scores clamped to +-10", "clip", _clipped(absolute)),
        Method("clip-row-10", "scores more than 10 below the row's maximum dropped", "clip", _clipped(row)),
        *(from_recipe(*row) for row in presets),
    ]


METHODS = {method.name: method for method in _standard()}
"""The standard methods by name, in the order of the report."""
