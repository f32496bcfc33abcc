"""The one adapter that says where a model's heads and linear layers are.

Names of config fields come from optimum's NormalizedConfig. Everything else is read from the modules: which
projections an attention module has, and how many heads their sizes allow. The model itself then shows which channels
belong to which head (`quantsink.models.probe`), which also decides between several ways to cut a fused projection.
Whatever cannot be established is an `ArchitectureError` before any work.
"""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from optimum.utils import NormalizedConfigManager
from optimum.utils.normalized_config import NormalizedTextConfigWithGQA
from torch import Tensor, nn
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.pytorch_utils import Conv1D

from quantsink.errors import ArchitectureError
from quantsink.models.falcon import can_use_interface
from quantsink.models.head_layout import AttentionLayer, HeadSlices, fused, latent, separate

SEPARATE_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj")
GATED_NAMES = ("gate_proj", "up_proj")
LATENT_NAMES = ("kv_b_proj", "kv_a_proj_with_mqa")
OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj")
OUTER_OUTPUT = "output.dense"
"""BERT's attention leaves its output projection to a neighbour."""
HEAD_SIZES = ("qk_head_dim", "head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True)
class Experts:
    """Weights of E experts in 3-D parameters of one module, each `[E, N, K]`, or `[E, K, N]` if transposed."""

    name: str
    count: int
    weights: tuple[str, ...]
    transposed: bool


@dataclass(frozen=True)
class Architecture:
    """Where things are in one model."""

    model_type: str
    decoder: str
    """Dotted name of the module that takes `attention_mask` and the cache; its forward sees every token."""
    attentions: tuple[AttentionLayer, ...]
    linears: tuple[str, ...]
    """Every linear layer inside the blocks, in the order of the modules."""
    experts: tuple[Experts, ...] = ()
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    """Linear layers that one module applies to one input: q, k, v; gate, up."""

    @property
    def heads(self) -> int:
        return sum(layer.heads for layer in self.attentions)

    @property
    def causal(self) -> bool:
        return all(layer.causal for layer in self.attentions)

    @classmethod
    def of(cls, model: Any) -> "Architecture":
        """Read a transformers language model or encoder. If its weights are loaded, the model is run to see where the
        heads are; it is not changed.

        Raises:
            ArchitectureError: attention that does not use transformers' attention interface, unknown projections, or
                heads that are mixed or lie elsewhere than the modules' sizes say.
        """
        architecture, candidates = read(model)
        if any(p.is_meta and not hasattr(m, "_hf_hook") for m in model.modules() for p in m.parameters(recurse=False)):
            return architecture
        from quantsink.models.probe import settle

        return dataclasses.replace(architecture, attentions=settle(model, architecture, candidates))


Candidates = list[list[AttentionLayer]]
"""By layer: every way to cut its projections that their sizes allow."""


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model that may be quantized already. Where a projection is fused, the places of the
    slices are a guess."""
    return read(model, quantized=True)[0].attentions


def read(model: Any, quantized: bool = False) -> tuple[Architecture, Candidates]:
    """What the names and sizes of modules tell: the architecture with the first way to cut each layer's projections,
    and all the ways.

    Args:
        quantized: accept projections of any class that has sizes.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise ArchitectureError(f"{type(model).__name__}: not a transformers model")
    model_type = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ArchitectureError(f"{model_type}: encoder-decoder models are not supported")
    if not getattr(model, "_supports_attention_backend", False) and not can_use_interface(model):
        raise ArchitectureError(f"{model_type}: its attention does not go through transformers' attention interface")
    decoder = model.get_decoder()
    decoder_name = next(name for name, module in model.named_modules() if module is decoder)
    heads, kv_heads = _config_heads(config)
    candidates = [
        _with_window(config, cuts) for cuts in _attention_layers(decoder, decoder_name, model_type, quantized)
    ]
    layers = tuple(cuts[0] for cuts in candidates)
    if not layers:
        raise ArchitectureError(f"{model_type}: no attention module with projections that quantsink knows")
    for layer in layers:
        if layer.heads != heads or kv_heads not in (None, layer.kv_heads):
            raise ArchitectureError(
                f"{model_type}: {layer.name} has {layer.heads} query and {layer.kv_heads} KV heads, "
                f"its config says {heads} and {kv_heads}"
            )
    modules = _blocks(model_type, model, layers)
    linears = tuple(name for name, module in modules.items() if is_linear(module))
    shared = tuple(_shared_inputs(modules))
    return Architecture(
        model_type, decoder_name, layers, linears, tuple(_experts(model_type, modules)), shared
    ), candidates


def is_linear(module: nn.Module) -> bool:
    """A plain linear layer: torch's, GPT-2's transposed one, or a subclass of transformers' own."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    of_transformers = isinstance(module, nn.Linear) and type(module).__module__.startswith("transformers.models.")
    return of_transformers and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def matrix(linear: nn.Module) -> Tensor:
    """The weight of a linear layer as `[outputs, inputs]`."""
    weight = typing.cast(Tensor, linear.weight)
    return weight.T if isinstance(linear, Conv1D) else weight


def sizes(linear: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, quantized or not."""
    if isinstance(linear, Conv1D):
        return int(linear.nf), int(linear.nx)
    return typing.cast(int, linear.out_features), typing.cast(int, linear.in_features)


def device_of(linear: nn.Module) -> torch.device:
    return typing.cast(Tensor, linear.weight).device


def output_head(model: Any) -> str | None:
    """Dotted name of the linear layer that gives the logits; None where there is none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), None)


def _config_heads(config: Any) -> tuple[int, int | None]:
    text = config.get_text_config(decoder=True)
    try:
        normalized = NormalizedConfigManager.get_normalized_config_class(text.model_type)(text)
    except KeyError:
        normalized = NormalizedTextConfigWithGQA(text)
    try:
        heads = normalized.num_attention_heads
    except AttributeError as error:
        raise ArchitectureError(
            f"{config.model_type}: the config does not say how many attention heads there are"
        ) from error
    kv_heads = getattr(text, "num_key_value_heads", None)
    if not isinstance(heads, int) or not isinstance(kv_heads, int | None):
        raise ArchitectureError(f"{config.model_type}: head counts that differ by layer are not supported")
    return heads, kv_heads


def _with_window(config: Any, layers: list[AttentionLayer]) -> list[AttentionLayer]:
    """A layer's candidates with its sliding window, as the config's layer types say."""
    text = config.get_text_config(decoder=True)
    if not layers[0].causal or not hasattr(text, "num_hidden_layers"):
        return layers
    _, options = get_layer_types_and_kwargs(text)
    index = layers[0].index
    window = options[index].get("sliding_window") if index < len(options) else None
    return [dataclasses.replace(layer, window=window) for layer in layers]


def _attention_layers(
    decoder: nn.Module, prefix: str, model_type: str, quantized: bool
) -> Iterator[list[AttentionLayer]]:
    modules = {f"{prefix}.{n}".strip("."): m for n, m in decoder.named_modules()}
    index = 0
    for name, module in modules.items():
        children = dict(module.named_children())
        inputs = _inputs(children)
        if inputs is None:
            continue
        if "q_attn" in children:
            raise ArchitectureError(f"{model_type}: {name}: cross-attention is not supported")
        outputs = [f"{name}.{child}" for child in OUTPUT_NAMES if child in children]
        outer = f"{name.rpartition('.')[0]}.{OUTER_OUTPUT}"
        outputs += [outer] if not outputs and outer in modules else []
        if len(outputs) != 1:
            raise ArchitectureError(f"{model_type}: {name}: no output projection among {', '.join(OUTPUT_NAMES)}")
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is not None and layer_idx != index:
            raise ArchitectureError(
                f"{model_type}: {name} is attention layer {index} but its layer_idx is {layer_idx}; models that mix "
                "attention with other layers are not supported"
            )
        parts = [f"{name}.{child}" for child in inputs]
        for part in (*parts, outputs[0]):
            if not is_linear(modules[part]) and not (quantized and hasattr(modules[part], "in_features")):
                raise ArchitectureError(
                    f"{model_type}: {part} is a {type(modules[part]).__name__}, not a plain linear layer; "
                    "quantize the original model, not one that is already quantized or adapted"
                )
        yield _attention_layer(model_type, name, index, modules, parts, outputs[0])
        index += 1


def _inputs(children: dict[str, nn.Module]) -> tuple[str, ...] | None:
    """Names of the q, k and v projections: three, or one that is fused, or a latent attention's q and kv."""
    if all(child in children for child in LATENT_NAMES):
        return ("q_b_proj" if "q_b_proj" in children else "q_proj", LATENT_NAMES[0])
    fused = [child for child in FUSED_NAMES if child in children]
    if fused:
        return (fused[0],)
    return next((names for names in SEPARATE_NAMES if set(names) <= children.keys()), None)


def _attention_layer(
    model_type: str, name: str, index: int, modules: dict[str, nn.Module], inputs: list[str], out: str
) -> list[AttentionLayer]:
    module = modules[name]
    head_dim = next((getattr(module, n) for n in HEAD_SIZES if isinstance(getattr(module, n, None), int)), None)
    if head_dim is None:
        raise ArchitectureError(f"{model_type}: {name} does not say its head size")
    value_dim = getattr(module, "v_head_dim", head_dim) if len(inputs) == 2 else head_dim
    rows, o_columns = [sizes(modules[part])[0] for part in inputs], sizes(modules[out])[1]
    heads = o_columns // value_dim
    if heads < 1 or heads * value_dim != o_columns:
        raise ArchitectureError(f"{model_type}: {out}: {o_columns} inputs do not divide into heads of {value_dim}")
    if len(inputs) == 3:
        cuts = separate(inputs, rows, heads, head_dim)
    elif len(inputs) == 1:
        cuts = fused(inputs[0], rows[0], heads, head_dim)
    else:
        cuts = latent(inputs, rows, heads, head_dim, value_dim, getattr(module, "qk_nope_head_dim", 0))
    if not cuts:
        counts = ", ".join(f"{part.rpartition('.')[2]} {n}" for part, n in zip(inputs, rows, strict=True))
        raise ArchitectureError(
            f"{model_type}: {name}: {counts} and o {o_columns} channels do not divide into heads of {head_dim}"
        )
    causal = bool(getattr(module, "is_causal", True))
    o = HeadSlices.even(out, heads, value_dim)
    return [
        AttentionLayer(name, index, heads, len(k.starts), head_dim, value_dim, q, k, v, o, causal=causal)
        for q, k, v in cuts
    ]


def _experts(model_type: str, modules: dict[str, nn.Module]) -> Iterator[Experts]:
    for name, module in modules.items():
        weights = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if not weights:
            continue
        counts = {p.shape[0] for p in weights.values()}
        transposed, count = getattr(module, "is_transposed", None), getattr(module, "num_experts", None)
        if transposed is None or counts != {count}:
            raise ArchitectureError(
                f"{model_type}: {name}.{next(iter(weights))}: a 3-D parameter of experts that do not go through "
                "transformers' experts interface"
            )
        yield Experts(name, int(typing.cast(int, count)), tuple(weights), bool(transposed))


def _shared_inputs(modules: dict[str, nn.Module]) -> Iterator[tuple[str, ...]]:
    """Layers of one input, by the names of modules. Only for classes of transformers: what other code does between the
    calls of two layers is not known."""
    for name, module in modules.items():
        if type(module).__module__.startswith("transformers.models."):
            for group in (*SEPARATE_NAMES, GATED_NAMES):
                layers = [f"{name}.{child}" for child in group]
                if all(layer in modules and is_linear(modules[layer]) for layer in layers):
                    yield tuple(layers)


def _blocks(model_type: str, model: nn.Module, layers: tuple[AttentionLayer, ...]) -> dict[str, nn.Module]:
    """Every module inside the list of blocks that the attention layers lie in, one in each."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    holding = [n for n in lists if all(layer.name.startswith(f"{n}.{layer.index}.") for layer in layers)]
    if not holding or len(lists[holding[0]]) != len(layers):
        raise ArchitectureError(
            f"{model_type}: {len(layers)} attention layers found in {len(lists[holding[0]]) if holding else 0} blocks; "
            "models that mix attention with other layers are not supported"
        )
    return {n: m for n, m in model.named_modules() if n.startswith(holding[0] + ".")}
