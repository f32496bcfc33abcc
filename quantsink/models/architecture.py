"""The one adapter that says where a model's heads and linear layers are.

Names of config fields come from optimum's NormalizedConfig; the rest is read off the modules: which projections an
attention module has, and how many heads their sizes make. Where a fused projection could be cut in several ways, and
in any case before anything is measured, the model itself shows which channels are whose
(`quantsink.models.probe`). What cannot be established is an `ArchitectureError` before any work.
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
from quantsink.models.falcon import adopt
from quantsink.models.head_layout import AttentionLayer, HeadSlices, fused, latent, separate

SEPARATE_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj")
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

    @property
    def heads(self) -> int:
        return sum(layer.heads for layer in self.attentions)

    @property
    def causal(self) -> bool:
        return all(layer.causal for layer in self.attentions)

    @classmethod
    def of(cls, model: Any) -> "Architecture":
        """Read a transformers language model or encoder; see for itself where the heads are, if weights are loaded.

        Raises:
            ArchitectureError: attention that does not go through transformers' attention interface, projections that
                are not known, heads that are mixed or lie elsewhere than the modules' sizes say.
        """
        found, candidates = read(model)
        if any(p.is_meta and not hasattr(m, "_hf_hook") for m in model.modules() for p in m.parameters(recurse=False)):
            return found
        from quantsink.models.probe import settle

        return dataclasses.replace(found, attentions=settle(model, found, candidates))


Candidates = list[list[AttentionLayer]]
"""By layer: every way to cut its projections that their sizes allow."""


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """The attention of a model that may be quantized already; places of slices are a guess where they are fused."""
    return read(model, quantized=True)[0].attentions


def read(model: Any, quantized: bool = False) -> tuple[Architecture, Candidates]:
    """What names and sizes of modules tell, the first way to cut each layer's projections in it.

    Args:
        quantized: take projections of any class that have sizes.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise ArchitectureError(f"{type(model).__name__}: not a transformers model")
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ArchitectureError(f"{kind}: encoder-decoder models are not supported")
    if not getattr(model, "_supports_attention_backend", False) and not adopt(model):
        raise ArchitectureError(f"{kind}: its attention does not go through transformers' attention interface")
    decoder = model.get_decoder()
    name = next(n for n, m in model.named_modules() if m is decoder)
    heads, kv_heads = _config_heads(config)
    candidates = [_with_window(config, layers) for layers in _attention_layers(decoder, name, kind, quantized)]
    found = tuple(layers[0] for layers in candidates)
    if not found:
        raise ArchitectureError(f"{kind}: no attention module with projections that quantsink knows")
    for layer in found:
        if layer.heads != heads or kv_heads not in (None, layer.kv_heads):
            raise ArchitectureError(
                f"{kind}: {layer.name} has {layer.heads} query and {layer.kv_heads} KV heads, "
                f"its config says {heads} and {kv_heads}"
            )
    inside = _blocks(kind, model, found)
    linears = tuple(n for n, m in inside.items() if is_linear(m))
    return Architecture(kind, name, found, linears, tuple(_experts(kind, inside))), candidates


def is_linear(module: nn.Module) -> bool:
    """A plain linear layer: torch's, GPT-2's transposed one, or a subclass of transformers' own."""
    kind = type(module)
    if kind in (nn.Linear, Conv1D):
        return True
    own = isinstance(module, nn.Linear) and kind.__module__.startswith("transformers.models.")
    return own and {n for n, _ in module.named_parameters()} <= {"weight", "bias"}


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
    """A layer's candidates with its sliding window, from the kinds of layer that the config names."""
    text = config.get_text_config(decoder=True)
    if not layers[0].causal or not hasattr(text, "num_hidden_layers"):
        return layers
    _, options = get_layer_types_and_kwargs(text)
    index = layers[0].index
    own = options[index] if index < len(options) else {}
    return [dataclasses.replace(layer, window=own.get("sliding_window")) for layer in layers]


def _attention_layers(decoder: nn.Module, prefix: str, kind: str, quantized: bool) -> Iterator[list[AttentionLayer]]:
    modules = {f"{prefix}.{n}".strip("."): m for n, m in decoder.named_modules()}
    index = 0
    for name, module in modules.items():
        children = dict(module.named_children())
        inputs = _inputs(children)
        if inputs is None:
            continue
        if "q_attn" in children:
            raise ArchitectureError(f"{kind}: {name}: cross-attention is not supported")
        outputs = [f"{name}.{child}" for child in OUTPUT_NAMES if child in children]
        outer = f"{name.rpartition('.')[0]}.{OUTER_OUTPUT}"
        outputs += [outer] if not outputs and outer in modules else []
        if len(outputs) != 1:
            raise ArchitectureError(f"{kind}: {name}: no output projection among {', '.join(OUTPUT_NAMES)}")
        own = getattr(module, "layer_idx", None)
        if own is not None and own != index:
            raise ArchitectureError(
                f"{kind}: {name} is attention layer {index} but calls itself {own}; models that mix attention with "
                "other layers are not supported"
            )
        parts = [f"{name}.{child}" for child in inputs]
        for part in (*parts, outputs[0]):
            if not is_linear(modules[part]) and not (quantized and hasattr(modules[part], "in_features")):
                raise ArchitectureError(
                    f"{kind}: {part} is a {type(modules[part]).__name__}, not a plain linear layer; "
                    "quantize the original model, not one that is already quantized or adapted"
                )
        yield _attention_layer(kind, name, index, modules, parts, outputs[0])
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
    kind: str, name: str, index: int, modules: dict[str, nn.Module], inputs: list[str], out: str
) -> list[AttentionLayer]:
    module = modules[name]
    head_dim = next((getattr(module, n) for n in HEAD_SIZES if isinstance(getattr(module, n, None), int)), None)
    if head_dim is None:
        raise ArchitectureError(f"{kind}: {name} does not say its head size")
    value_dim = getattr(module, "v_head_dim", head_dim) if len(inputs) == 2 else head_dim
    rows, o_columns = [sizes(modules[part])[0] for part in inputs], sizes(modules[out])[1]
    heads = o_columns // value_dim
    if heads < 1 or heads * value_dim != o_columns:
        raise ArchitectureError(f"{kind}: {out}: {o_columns} inputs do not divide into heads of {value_dim}")
    if len(inputs) == 3:
        cuts = separate(inputs, rows, heads, head_dim)
    elif len(inputs) == 1:
        cuts = fused(inputs[0], rows[0], heads, head_dim)
    else:
        cuts = latent(inputs, rows, heads, head_dim, value_dim, getattr(module, "qk_nope_head_dim", 0))
    if not cuts:
        found = ", ".join(f"{part.rpartition('.')[2]} {n}" for part, n in zip(inputs, rows, strict=True))
        raise ArchitectureError(
            f"{kind}: {name}: {found} and o {o_columns} channels do not divide into heads of {head_dim}"
        )
    causal = bool(getattr(module, "is_causal", True))
    o = HeadSlices.even(out, heads, value_dim)
    return [
        AttentionLayer(name, index, heads, len(k.starts), head_dim, value_dim, q, k, v, o, causal=causal)
        for q, k, v in cuts
    ]


def _experts(kind: str, modules: dict[str, nn.Module]) -> Iterator[Experts]:
    for name, module in modules.items():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if not own:
            continue
        counts = {p.shape[0] for p in own.values()}
        transposed, count = getattr(module, "is_transposed", None), getattr(module, "num_experts", None)
        if transposed is None or counts != {count}:
            raise ArchitectureError(
                f"{kind}: {name}.{next(iter(own))}: a 3-D parameter of experts that do not go through transformers' "
                "experts interface"
            )
        yield Experts(name, int(typing.cast(int, count)), tuple(own), bool(transposed))


def _blocks(kind: str, model: nn.Module, found: tuple[AttentionLayer, ...]) -> dict[str, nn.Module]:
    """Every module inside the list of blocks that the attention layers lie in, one in each."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    own = [n for n in lists if all(layer.name.startswith(f"{n}.{layer.index}.") for layer in found)]
    if not own or len(lists[own[0]]) != len(found):
        raise ArchitectureError(
            f"{kind}: {len(found)} attention layers found in {len(lists[own[0]]) if own else 0} blocks; "
            "models that mix attention with other layers are not supported"
        )
    return {n: m for n, m in model.named_modules() if n.startswith(own[0] + ".")}
