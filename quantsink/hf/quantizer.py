"""What makes transformers save and load quantsink checkpoints: a quantization config and a quantizer, registered."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import dot_natural_key
from transformers.quantizers.base import HfQuantizer

from quantsink.errors import ArchitectureError, CheckpointError, QuantSinkError
from quantsink.hf import attention
from quantsink.hf.config import METHOD, MOST_LAYERS, UNIMPORTED, QuantSinkConfig
from quantsink.hf.convert import check_head, replace
from quantsink.hf.sink_cache import install
from quantsink.hf.validate import check_tensors, check_values
from quantsink.layers.experts import ExpertWeights, index_experts, put
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.tables import CACHE_TABLE, TABLE, AttentionTable, CacheTable
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import Architecture, device_of, is_linear, output_head, sizes
from quantsink.models.falcon import ADOPTED
from quantsink.plan import LinearPlan, head_plan


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
    for name in kept.bits if kept is not None and kept.rounding == "query" else ():
        layer = layers.get(name)
        if layer is None:
            raise CheckpointError(f"config.json: kv_cache: {name} is not in the model it describes; export again")
        with layer_devices[name]:
            modules[name].add_module(CACHE_TABLE, CacheTable(layer.kv_heads, layer.head_dim))
    if recipe.output_head == "int8":
        name = check_head(model)
        replace(model, name, QuantizedLinear.empty(name, modules[name], head_plan(recipe), 0, 0, context))


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
