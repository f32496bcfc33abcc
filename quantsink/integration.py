"""What makes transformers save and load quantsink checkpoints: a quantization config and a quantizer, registered."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.core_model_loading import dot_natural_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantsink import attention
from quantsink.adopted import ADOPTED
from quantsink.apply import check_head, replace
from quantsink.architecture import Architecture, device_of, is_linear, output_head, sizes
from quantsink.attention import TABLE, AttentionTable
from quantsink.cache import TABLE as CACHE_TABLE
from quantsink.cache import CacheTable, install
from quantsink.context import TokenContext
from quantsink.errors import ArchitectureError, CheckpointError, QuantSinkError, RecipeError
from quantsink.experts import ExpertWeights, index_experts, put
from quantsink.kernels import Route
from quantsink.kernels.coded_attention.codes import WIDTHS
from quantsink.linear import QuantizedLinear
from quantsink.plan import CacheLayerPlan, CachePlan, LinearPlan, Plan, head_plan
from quantsink.recipe import Recipe
from quantsink.source import HASHED
from quantsink.strict_json import named, said, shown

METHOD = "quantsink"
FORMAT_VERSION = 1
UNIMPORTED = "quantsink checkpoint: run `import quantsink` before loading it (pip install quantsink)"
"""Stands as `attn_implementation` in config.json. transformers does not know such an attention and stops with it, so a
user who forgot the import reads what to do; the quantizer replaces it as soon as quantsink is imported."""

MOST_LAYERS = 2048
"""Where quantization_config does not name more of them."""

_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F32": torch.float32}


@register_quantization_config(METHOD)
class QuantSinkConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json; docs/formats.md describes each key.

    Args:
        format_version: of the checkpoint format.
        recipe: the recipe as JSON values.
        sink_size: sink tokens a sequence.
        linears: `{module: [native rows, native columns]}` of every quantized linear layer.
        attentions: `{module: [heads, KV heads, head size]}` of every attention module that holds a table.
        kv_cache: what the model's own `SinkCache` keeps, None where it makes none: `sinks`, `residual`, `max_length`,
            `rounding` and `layers`, `{module: {"bits": [KV heads], "windows": [KV heads]}}`.
        experts: every module of experts with INT8 weights.
    """

    def __init__(
        self,
        /,
        format_version: int,
        recipe: dict[str, Any],
        sink_size: int,
        linears: dict[str, list[int]],
        attentions: dict[str, list[int]],
        kv_cache: dict[str, Any] | None = None,
        experts: list[str] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if type(format_version) is not int or format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"config.json: quantsink format {shown(format_version)}, this version reads {FORMAT_VERSION}; "
                "update quantsink"
            )
        if unknown:
            raise CheckpointError(
                f"config.json: quantization_config has an unknown key {shown(min(unknown))}; update quantsink"
            )
        if quant_method != METHOD:
            raise CheckpointError(f"config.json: quant_method {shown(quant_method)} is not {METHOD!r}; export again")
        self.quant_method = quant_method  # type: ignore[assignment]  # a closed enum there
        self.format_version = format_version
        self.recipe = recipe
        self.sink_size = sink_size
        self.linears = linears
        self.attentions = attentions
        self.kv_cache = kv_cache
        self.experts = [] if experts is None else experts
        self.parsed()

    @classmethod
    def of(cls, plan: Plan) -> "QuantSinkConfig":
        return cls(
            FORMAT_VERSION,
            plan.recipe.to_dict(),
            plan.sink_size,
            {name: [len(p.native_rows), len(p.native_columns)] for name, p in plan.linears.items()},
            {name: [len(p.routes), len(p.key_mean), len(p.key_mean[0])] for name, p in plan.attentions.items()},
            None if plan.cache is None else _cache_to_dict(plan.cache),
            list(plan.experts),
        )

    def cache_plan(self) -> CachePlan | None:
        """What the model's own `SinkCache` keeps.

        Raises:
            CheckpointError: a value that cannot be right.
        """
        return None if self.kv_cache is None else _cache_from_dict(self.kv_cache)

    def parsed(self) -> Recipe:
        """The recipe; also checks the other fields.

        Raises:
            CheckpointError: a value of the wrong kind.
        """
        try:
            recipe = Recipe.from_dict(self.recipe, "config.json: quantization_config.recipe")
        except RecipeError as error:
            raise CheckpointError(f"{error}; export again") from None
        native = recipe.attention.kind == "native", recipe.weights == "native"
        if (native[0] and self.attentions) or (native[1] and (self.linears or self.experts)):
            raise CheckpointError(
                "config.json: quantization_config.recipe contradicts its linears, attentions or experts; export again"
            )
        good = (
            _counts(self.linears, 2) and _counts(self.attentions, 3) and _count(self.sink_size) and self.sink_size > 0
        )
        good = good and isinstance(self.experts, list) and all(map(_name, self.experts))
        if not good:
            raise CheckpointError(
                "config.json: quantization_config.linears, attentions, experts or sink_size is damaged; export again"
            )
        kept = self.cache_plan()
        if not _agree(recipe, self.sink_size, kept):
            raise CheckpointError(
                "config.json: quantization_config.recipe contradicts its kv_cache or sink_size; export again"
            )
        return recipe


def _agree(recipe: Recipe, sink_size: int, kept: CachePlan | None) -> bool:
    """What the recipe asks for by number is what was planned."""
    wanted = recipe.kv_cache
    if kept is None or wanted.bits is None:
        return kept is None and wanted.bits is None and recipe.sink_size in (None, sink_size)
    return (
        recipe.sink_size in (None, sink_size)
        and (kept.residual, kept.max_length, kept.rounding) == (wanted.residual, wanted.max_length, wanted.rounding)
        and (kept.sinks >= sink_size if wanted.sink_size is None else kept.sinks == wanted.sink_size)
    )


def _cache_to_dict(plan: CachePlan) -> dict[str, Any]:
    layers = {name: {"bits": list(p.bits), "windows": list(p.windows)} for name, p in plan.layers.items()}
    return {
        "sinks": plan.sinks,
        "residual": plan.residual,
        "max_length": plan.max_length,
        "rounding": plan.rounding,
        "layers": layers,
    }


def _cache_from_dict(data: Any) -> CachePlan:
    try:
        keys, layers = {"sinks", "residual", "max_length", "rounding", "layers"}, {}
        if (
            set(data) != keys
            or data["rounding"] not in ("query", "nearest")
            or not all(_count(data[k]) for k in ("sinks", "residual"))
        ):
            raise ValueError
        if data["max_length"] is not None and not _count(data["max_length"]):
            raise ValueError
        for name, layer in data["layers"].items():
            if not _name(name):
                raise ValueError
            bits, windows = layer["bits"], layer["windows"]
            if set(layer) != {"bits", "windows"} or len(bits) != len(windows) or not all(map(_count, windows)):
                raise ValueError
            if not all(_count(width) and width in WIDTHS for width in bits):
                raise ValueError
            layers[name] = CacheLayerPlan(tuple(bits), tuple(windows))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError("config.json: quantization_config.kv_cache is damaged; export again") from None
    return CachePlan(data["sinks"], data["residual"], data["max_length"], layers, data["rounding"])


def _counts(value: object, length: int) -> bool:
    return isinstance(value, Mapping) and all(
        _name(name) and isinstance(item, Sequence) and len(item) == length and all(map(_count, item))
        for name, item in value.items()
    )


def _name(value: object) -> bool:
    """A module's dotted name; nothing that would break an error's one line."""
    return isinstance(value, str) and 0 < len(value) <= 1000 and value.isprintable()


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@register_quantizer(METHOD)
class QuantSinkQuantizer(HfQuantizer):
    """Builds the quantized modules before transformers fills them from the shards."""

    requires_calibration = True
    quantization_config: QuantSinkConfig
    late = False
    """The model class takes our attention only once its modules are there."""

    def update_attn_implementation(self, config: Any) -> Any:
        self._check_layers(config)
        wanted = config._attn_implementation
        ours = self.quantization_config.attentions or self.quantization_config.kv_cache is not None
        own = attention.NAME if ours else None
        if wanted in (None, UNIMPORTED, attention.NAME):
            self.late = own is not None and config.model_type in ADOPTED
            config._attn_implementation = None if self.late else own
        elif own:
            logging.getLogger(__name__).warning(
                "attn_implementation=%r: the checkpoint's INT8 attention and its KV cache are not used; leave the "
                "argument out to use them",
                wanted,
            )
        return config

    def _check_layers(self, config: Any) -> None:
        """Before the model is built: a damaged number of layers would have transformers build for hours."""
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        most = max(len(self.quantization_config.attentions), MOST_LAYERS)
        if isinstance(layers, int) and layers > most:
            raise CheckpointError(f"config.json: num_hidden_layers {layers}, {most} at most here; export again")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        build(model, self.quantization_config)
        if self.late:
            model.set_attn_implementation(attention.NAME)
        files = kwargs.get("checkpoint_files")
        if files:
            check_tensors(model, [Path(file) for file in files])
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        check_values(model)
        mark(model, self)
        plan = self.quantization_config.cache_plan()
        if plan is not None and model.config._attn_implementation == attention.NAME:
            try:
                install(model, plan)
            except QuantSinkError as error:
                raise CheckpointError(f"config.json: quantization_config.kv_cache: {error}") from error
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """In the order in which transformers saves a loaded model, so that a second save gives the same shards."""
        return dict(sorted(model.state_dict().items(), key=lambda item: dot_natural_key(item[0]))), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def build(model: Any, config: QuantSinkConfig) -> None:
    """Exchange the modules of a fresh (usually meta) model for empty quantized ones.

    Raises:
        CheckpointError: the config names a module that the model does not have, or other head counts.
    """
    recipe = config.parsed()
    try:
        architecture = Architecture.of(model)
    except ArchitectureError as error:
        raise CheckpointError(f"config.json: {error}; export again") from error
    modules = dict(model.named_modules())
    context = TokenContext(config.sink_size)
    context.attach(modules[architecture.decoder])
    layers = {layer.name: layer for layer in architecture.attentions}
    layer_devices = {layer.name: device_of(modules[layer.q.module]) for layer in architecture.attentions}
    for name, shape in config.attentions.items():
        layer = layers.get(name)
        if layer is None or [layer.heads, layer.kv_heads, layer.head_dim] != list(shape):
            raise CheckpointError(
                f"config.json: {name} with heads {list(shape)} is not in the model it describes; "
                "load it with AutoModelForCausalLM"
            )
        with layer_devices[name]:
            table = AttentionTable(layer.heads, layer.kv_heads, layer.head_dim, recipe.attention, context)
        modules[name].add_module(TABLE, table)
    for name, (rows, columns) in config.linears.items():
        linear = modules.get(name)
        if linear is None or not is_linear(linear) or rows > sizes(linear)[0] or columns > sizes(linear)[1]:
            raise CheckpointError(
                f"config.json: {name} [{rows}, {columns}] does not fit a linear layer of the model; export again"
            )
        plan = LinearPlan(recipe.activations.kind, recipe.activations.sink_rows)
        replace(model, name, QuantizedLinear.empty(name, linear, plan, rows, columns, context))
    known = {experts.name: experts for experts in architecture.experts}
    for name in config.experts:
        if name not in known:
            raise CheckpointError(
                f"config.json: {name} is no module of experts in the model it describes; export again"
            )
        put(modules[name], known[name], ExpertWeights.empty)
        index_experts(model)
    kept = config.cache_plan()
    for name in kept.layers if kept is not None and kept.rounding == "query" else ():
        layer = layers.get(name)
        if layer is None:
            raise CheckpointError(f"config.json: kv_cache: {name} is not in the model it describes; export again")
        with layer_devices[name]:
            modules[name].add_module(CACHE_TABLE, CacheTable(layer.kv_heads, layer.head_dim))
    if recipe.output_head == "int8":
        name = check_head(model)
        replace(model, name, QuantizedLinear.empty(name, modules[name], head_plan(recipe), 0, 0, context))


def check_tensors(model: Any, files: Sequence[Path]) -> None:
    """Compare the shards' headers with the model before anything is read.

    Raises:
        CheckpointError: a damaged shard, or a tensor that is missing, surplus or of another shape or type, by name.
    """
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118
                    part = shard.get_slice(name)
                    found[name] = (file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file.name}: damaged: {said(error)}; fetch or export the checkpoint again"
            ) from error
    expected = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    where = ", ".join(file.name for file in files[:3])
    for name, tensor in expected.items():
        if name not in found:
            if name in tied:
                continue
            raise CheckpointError(f"{name} is missing from {where}; fetch or export the checkpoint again")
        file, shape, dtype = found[name]
        exact = not tensor.is_floating_point() or name.endswith(("_scale", "key_mean", "clip", "query_gram"))
        wrong = _DTYPES.get(dtype) != tensor.dtype if exact else not dtype.startswith(("F", "BF"))
        if shape != tuple(tensor.shape) or wrong:
            raise CheckpointError(
                f"{name} in {file.name} is {dtype} {list(shape)} where {tensor.dtype} {list(tensor.shape)} belongs; "
                "fetch or export the checkpoint again"
            )
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        raise CheckpointError(
            f"{named(surplus[0])} in {found[surplus[0]][0].name} does not belong to this model; export it again"
        )


def check_values(model: Any) -> None:
    """What shapes and types cannot show: indices in range, scales positive, tables finite.

    Raises:
        CheckpointError: the first tensor that cannot be right, by name.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, QuantizedLinear | AttentionTable | CacheTable | ExpertWeights):
            for name, tensor in module.named_buffers(recurse=False):
                if tensor.device.type != "meta" and not _good_values(module, name, tensor):
                    raise CheckpointError(
                        f"{prefix}.{name} holds values that cannot be right; export the checkpoint again"
                    )
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.device.type != "meta" and not _finite(parameter):
                raise CheckpointError(f"{prefix}.{name} holds NaN or inf; fetch or export the checkpoint again")


def _finite(parameter: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in parameter.detach().flatten().split(HASHED))


def _good_values(module: Any, name: str, tensor: torch.Tensor) -> bool:
    if name.endswith("_index"):
        size = module.out_features if name == "native_row_index" else module.in_features
        return bool(((tensor >= 0) & (tensor < size)).all()) and len(tensor.unique()) == len(tensor)
    if name.endswith("_scale"):
        return bool(((tensor > 0) & tensor.isfinite()).all())
    if name == "routes":
        return bool((tensor <= max(Route)).all())
    if name == "clip":
        return bool((tensor > 0).all())
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def finish(model: Any, config: QuantSinkConfig) -> None:
    """Make a model that a plan was applied to one that `save_pretrained` can write."""
    model.config.quantization_config = config
    mark(model, QuantSinkQuantizer(config, pre_quantized=True))


def mark(model: Any, quantizer: QuantSinkQuantizer) -> None:
    model.requires_grad_(False)
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = METHOD
    model._weight_conversions = []  # a checkpoint of ours has the modules' own names, whatever the original had
    head = output_head(model)
    if head is not None:
        model.get_submodule(head).register_forward_pre_hook(dense_rows)
    vars(model.config)["attn_implementation"] = UNIMPORTED


def dense_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last token's row, cut out of a prompt, keeps the prompt's strides; with weights that need no gradient
    `torch.matmul` then copies them all (SmolLM2-135M: 110 ms a prompt)."""
    if not args:
        return args
    x = args[0]
    return (x.reshape(-1, x.shape[-1]).view(x.shape), *args[1:])


__all__ = ["METHOD", "UNIMPORTED", "QuantSinkConfig", "QuantSinkQuantizer", "build", "check_tensors", "finish"]
