"""The one adapter that says where a model's heads and linear layers are.

Names of config fields come from optimum's NormalizedConfig; everything else is read off the modules themselves and
checked against it. What cannot be established is an `ArchitectureError` before any work.
"""

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from optimum.utils import NormalizedConfigManager
from optimum.utils.normalized_config import NormalizedTextConfigWithGQA
from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from quantsink.errors import ArchitectureError

OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj")
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj")
LATENT_NAMES = ("kv_a_proj_with_mqa", "kv_b_proj")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: H query heads on KVH key/value heads of size D.

    Head h owns rows `h*D : (h+1)*D` of `q`, the same columns of `o`, and reads KV head `h * KVH // H`.
    """

    name: str
    index: int
    heads: int
    kv_heads: int
    head_dim: int
    q: str
    k: str
    v: str
    o: str
    window: int | None = None
    """Newest tokens that a sliding layer sees; None: all."""

    def kv_head(self, head: int) -> int:
        return head * self.kv_heads // self.heads


@dataclass(frozen=True)
class Architecture:
    """Where things are in one model."""

    model_type: str
    decoder: str
    """Dotted name of the module that takes `attention_mask` and the cache; its forward sees every token."""
    attentions: tuple[AttentionLayer, ...]
    linears: tuple[str, ...]
    """Every linear layer inside the decoder blocks, in the order of the modules."""

    @property
    def heads(self) -> int:
        return sum(layer.heads for layer in self.attentions)

    @classmethod
    def of(cls, model: Any) -> "Architecture":
        """Read a transformers causal language model.

        Raises:
            ArchitectureError: not a decoder-only model of separate q, k, v and output projections through
                transformers' attention interface.
        """
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "get_decoder"):
            raise ArchitectureError(f"{type(model).__name__}: not a transformers causal language model")
        kind = config.model_type
        if getattr(config, "is_encoder_decoder", False):
            raise ArchitectureError(f"{kind}: encoder-decoder models are not supported")
        if not getattr(model, "_supports_attention_backend", False):
            raise ArchitectureError(f"{kind}: its attention does not go through transformers' attention interface")
        heads, kv_heads = _config_heads(config)
        found = tuple(_with_windows(config, _attention_layers(model, kind)))
        if not found:
            raise ArchitectureError(f"{kind}: no attention module with q_proj, k_proj, v_proj and an output projection")
        for layer in found:
            if layer.heads != heads or (kv_heads is not None and layer.kv_heads != kv_heads):
                raise ArchitectureError(
                    f"{kind}: {layer.name} has {layer.heads} query and {layer.kv_heads} KV heads, "
                    f"its config says {heads} and {kv_heads}"
                )
        decoder = model.get_decoder()
        name = next(n for n, m in model.named_modules() if m is decoder)
        _check_layers(kind, found, decoder)
        prefix = name + "." if name else ""
        experts = [n for n, p in decoder.named_parameters() if p.dim() == 3]
        if experts:
            raise ArchitectureError(f"{kind}: {experts[0]}: expert weights in one 3-D parameter are not supported yet")
        output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        linears = tuple(
            n for n, m in model.named_modules() if type(m) is nn.Linear and n.startswith(prefix) and m is not output
        )
        return cls(kind, name, found, linears)


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


def _with_windows(config: Any, layers: Iterable[AttentionLayer]) -> Iterator[AttentionLayer]:
    """Each layer with its sliding window, from the kinds of layer that the config names."""
    _, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for layer in layers:
        own = options[layer.index] if layer.index < len(options) else {}
        yield dataclasses.replace(layer, window=own.get("sliding_window"))


def _attention_layers(model: nn.Module, kind: str) -> Iterator[AttentionLayer]:
    for name, module in model.named_modules():
        children = dict(module.named_children())
        fused = [child for child in (*FUSED_NAMES, *LATENT_NAMES) if child in children]
        if fused:
            raise ArchitectureError(
                f"{kind}: {name}.{fused[0]}: fused or latent q/k/v projections are not supported yet"
            )
        if not {"q_proj", "k_proj", "v_proj"} <= children.keys():
            continue
        outputs = [child for child in OUTPUT_NAMES if child in children]
        if len(outputs) != 1:
            raise ArchitectureError(f"{kind}: {name}: no output projection among {', '.join(OUTPUT_NAMES)}")
        yield _attention_layer(kind, name, module, children, outputs[0])


def _attention_layer(
    kind: str, name: str, module: nn.Module, children: dict[str, nn.Module], out: str
) -> AttentionLayer:
    linears: dict[str, nn.Linear] = {}
    for child in ("q_proj", "k_proj", "v_proj", out):
        if type(children[child]) is not nn.Linear:
            raise ArchitectureError(
                f"{kind}: {name}.{child} is a {type(children[child]).__name__}, not a plain linear layer; "
                "quantize the original model, not one that is already quantized or adapted"
            )
        linears[child] = typing.cast(nn.Linear, children[child])
    head_dim, index = getattr(module, "head_dim", None), getattr(module, "layer_idx", None)
    if not isinstance(head_dim, int) or not isinstance(index, int):
        raise ArchitectureError(f"{kind}: {name} does not say its head size and layer number")
    q, k, v, o = (linears[child] for child in ("q_proj", "k_proj", "v_proj", out))
    heads, kv_heads = q.out_features // head_dim, k.out_features // head_dim
    good = (
        q.out_features == heads * head_dim == o.in_features
        and k.out_features == v.out_features == kv_heads * head_dim
        and kv_heads > 0
        and heads % kv_heads == 0
    )
    if not good:
        raise ArchitectureError(
            f"{kind}: {name}: q {q.out_features}, k {k.out_features}, v {v.out_features} and o {o.in_features} "
            f"channels do not divide into heads of {head_dim}"
        )
    q_name, k_name, v_name, o_name = (f"{name}.{child}" for child in ("q_proj", "k_proj", "v_proj", out))
    return AttentionLayer(name, index, heads, kv_heads, head_dim, q_name, k_name, v_name, o_name)


def _check_layers(kind: str, found: tuple[AttentionLayer, ...], decoder: nn.Module) -> None:
    blocks = getattr(decoder, "layers", None)
    if blocks is None or [layer.index for layer in found] != list(range(len(blocks))):
        raise ArchitectureError(
            f"{kind}: {len(found)} attention layers found in {0 if blocks is None else len(blocks)} blocks; "
            "models that mix attention with other layers are not supported"
        )
