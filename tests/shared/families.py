"""One tiny model with random weights per family of transformers, where its heads lie, and sinks planted in it.

`Layout` is a second source of truth beside `quantsink.models.architecture`: read off transformers' modelling code by
hand, and never from quantsink.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.pytorch_utils import Conv1D

VOCABULARY, BOS, EOS = 258, 0, 1
SINK_AXIS, TEXT_AXIS = 0, 1
"""What the BOS carries, what every other token carries, where `plant` has been."""
AXES = slice(0, 2)
"""Both: axes of the residual that nothing else writes to there."""

WRITERS = {"o_proj", "out_proj", "dense", "c_proj", "down_proj", "down_proj_bias", "dense_4h_to_h", "fc2"}
"""Names of what writes to the residual in a causal family."""
POSITIONS = {"wpe", "embed_positions"}

Rows = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """Where one attention layer's heads lie.

    Modules are names as in `named_modules()`. `q_rows[h]` are the output channels of `q_module` that make query head
    h, `k_rows[g]` and `v_rows[g]` those of KV head g, `o_columns[h]` the input columns of `o_module` that head h feeds.
    Latent attention: `k_rows` are those of the part without positions; the rotary part is common to all heads.
    """

    q_module: str
    q_rows: Rows
    k_module: str
    k_rows: Rows
    v_module: str
    v_rows: Rows
    o_module: str
    o_columns: Rows

    def kv_head(self, head: int) -> int:
        return head * len(self.k_rows) // len(self.q_rows)


def _blocks(numbers: Sequence[int], size: int) -> Rows:
    return [list(range(i * size, (i + 1) * size)) for i in numbers]


def _separate(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    """Three modules: q [0..H), k [0..G), v [0..G)."""
    return _blocks(range(heads), size), _blocks(range(kv_heads), size), _blocks(range(kv_heads), size)


def _stacked(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    """One module: all of q, then all of k, then all of v."""
    last = heads + kv_heads
    return _blocks(range(heads), size), _blocks(range(heads, last), size), _blocks(range(last, last + kv_heads), size)


def _grouped(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    """One module: for each KV head its queries, its k, its v; with as many KV heads as heads: q k v q k v ..."""
    step = heads // kv_heads + 2
    q = [group * step + i for group in range(kv_heads) for i in range(step - 2)]
    k = [group * step + step - 2 for group in range(kv_heads)]
    return _blocks(q, size), _blocks(k, size), _blocks([i + 1 for i in k], size)


def _latent(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    """q [nope, rope] per head in one module; [k nope, v] per head in another."""
    nope, step = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
    pairs = _blocks(range(heads), step)
    q = _blocks(range(heads), nope + config.qk_rope_head_dim)
    return q, [rows[:nope] for rows in pairs], [rows[nope:] for rows in pairs]


def _falcon(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    old = config.multi_query and not config.new_decoder_architecture
    return (_stacked if old else _grouped)(heads, kv_heads, size, config)


def _bigcode(heads: int, kv_heads: int, size: int, config: Any) -> tuple[Rows, Rows, Rows]:
    return (_stacked if config.multi_query else _grouped)(heads, kv_heads, size, config)


@dataclass(frozen=True)
class _Place:
    """Names inside the base model, `{}` the layer; which rows are whose; how many KV heads there are."""

    block: str
    q: str
    k: str
    v: str
    o: str
    rows: Callable[[int, int, int, Any], tuple[Rows, Rows, Rows]] = _separate
    kv_heads: Callable[[Any], int] = lambda config: config.num_key_value_heads


def _all(config: Any) -> int:
    return config.num_attention_heads


_LLAMA = _Place("layers.{}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")


def _fused(block: str, name: str, out: str, rows: Any, kv_heads: Any = _all) -> _Place:
    return _Place(block, name, name, name, out, rows, kv_heads)


PLACES: dict[str, _Place] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "gpt_oss"), _LLAMA),
    "phi3": _fused("layers.{}.self_attn", "qkv_proj", "o_proj", _stacked, lambda config: config.num_key_value_heads),
    "gpt_neox": _fused("layers.{}.attention", "query_key_value", "dense", _grouped),
    "gpt2": _fused("h.{}.attn", "c_attn", "c_proj", _stacked),
    "gpt_bigcode": _fused("h.{}.attn", "c_attn", "c_proj", _bigcode, lambda c: 1 if c.multi_query else _all(c)),
    "falcon": _fused(
        "h.{}.self_attention", "query_key_value", "dense", _falcon,
        lambda c: c.num_kv_heads if c.new_decoder_architecture else 1 if c.multi_query else _all(c),
    ),
    "opt": _Place("decoder.layers.{}.self_attn", "q_proj", "k_proj", "v_proj", "out_proj", kv_heads=_all),
    "deepseek_v3": _Place("layers.{}.self_attn", "q_b_proj", "kv_b_proj", "kv_b_proj", "o_proj", _latent, _all),
    "bert": _Place("encoder.layer.{}.attention", "self.query", "self.key", "self.value", "output.dense", kv_heads=_all),
    "vit": _Place("layers.{}.attention", "q_proj", "k_proj", "v_proj", "o_proj", kv_heads=_all),
}  # fmt: skip


def layout(model: Any, layer: int) -> Layout:
    """Where the heads of one layer lie, from the names and the config of the model's family."""
    config, place = model.config, PLACES[model.config.model_type]
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    prefix = "" if model.base_model is model else model.base_model_prefix + "."
    block = prefix + place.block.format(layer)
    names = {part: f"{block}.{getattr(place, part)}" for part in "qkvo"}
    if place.rows is _latent and config.q_lora_rank is None:
        names["q"] = f"{block}.q_proj"
    q, k, v = place.rows(heads, place.kv_heads(config), size, config)
    return Layout(names["q"], q, names["k"], k, names["v"], v, names["o"], _blocks(range(heads), len(v[0])))


@dataclass(frozen=True)
class Family:
    """One family: `build` makes the model, `rows` says where its heads lie, `inputs` what to feed it."""

    name: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    auto: Any = AutoModelForCausalLM
    norm_unit: float = 1.0
    """Weight with which the family's normalisation multiplies by 1."""

    @property
    def causal(self) -> bool:
        return self.auto is AutoModelForCausalLM

    def build(self, seed: int = 0, attn_implementation: str | None = None, **changes: Any) -> Any:
        """A model in eval mode; biases and norms are random too. `changes` are fields of the config."""
        torch.manual_seed(seed)
        config = AutoConfig.for_model(self.model_type, **{**COMMON, **self.fields, **changes})
        model = self.auto.from_config(config, attn_implementation=attn_implementation).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def inputs(self, tokens: int = 64, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
        """Random text behind a BOS, random text between [CLS] and [SEP], or an image (its size is the config's)."""
        generator = torch.Generator().manual_seed(seed)
        if self.model_type == "vit":
            return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator)}
        ids = torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)
        ids[:, 0] = BOS
        if not self.causal:
            ids[:, -1] = EOS
        return {"input_ids": ids}

    def rows(self, model: Any, layer: int) -> Layout:
        return layout(model, layer)


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_MLP = {"intermediate_size": 96}
_GROUPED = {**_MLP, "num_key_value_heads": 2}
# The first two layers see every token, so that sinks can be planted in the same layers of every family.
_SLIDING = {"sliding_window": 32, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}
_GEMMA = {**_GROUPED, **_SLIDING, "hidden_size": 48, "head_dim": 16, "query_pre_attn_scalar": 16}
_DEEPSEEK = {
    **_MLP, "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "num_mtp_layers": 0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16,
    }
}  # fmt: skip


def _rope(part: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "llama", {**_GROUPED, "hidden_size": 48, "head_dim": 16}),
        Family("mistral", "mistral", {**_GROUPED, "sliding_window": None}),
        Family("qwen2", "qwen2", _GROUPED),
        Family("qwen3", "qwen3", {**_GROUPED, "hidden_size": 40, "head_dim": 16}),
        Family("gemma2", "gemma2", {**_GEMMA, "attn_logit_softcapping": 50.0}, norm_unit=0.0),
        Family("gemma3", "gemma3_text", _GEMMA, norm_unit=0.0),
        Family("phi3", "phi3", _GROUPED),
        Family("gpt_neox", "gpt_neox", {**_MLP, **_rope(1.0)}),
        Family("gpt_neox_partial", "gpt_neox", {**_MLP, **_rope(0.25)}),
        Family("gpt2", "gpt2", {"n_inner": 96}),
        Family("opt", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        Family("falcon_multi_query", "falcon", {"ffn_hidden_size": 96}),
        Family("falcon_new", "falcon", {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2}),
        Family(
            "falcon_per_head",
            "falcon",
            {"ffn_hidden_size": 96, "multi_query": False, "parallel_attn": False, "bias": True},
        ),
        Family("gpt_bigcode", "gpt_bigcode", {"n_head": 4, "n_inner": 96}),
        Family("gpt_bigcode_per_head", "gpt_bigcode", {"n_head": 4, "n_inner": 96, "multi_query": False}),
        Family("mixtral", "mixtral", {**_GROUPED, **_EXPERTS}),
        Family("gpt_oss", "gpt_oss", {**_GROUPED, **_EXPERTS, **_SLIDING, **_YARN, "hidden_size": 48, "head_dim": 16}),
        Family("deepseek_v3", "deepseek_v3", _DEEPSEEK),
        Family("deepseek_v3_full_q", "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None}),
        Family("bert", "bert", _MLP, AutoModelForMaskedLM),
        Family("bert_model", "bert", _MLP, AutoModel),
        Family("vit", "vit", {**_MLP, "image_size": 32, "patch_size": 4}, AutoModel),
    )
}
CAUSAL = tuple(name for name, family in FAMILIES.items() if family.causal)


def weight(module: nn.Module) -> torch.Tensor:
    """The weight as [output, input]; a view also where the module keeps it the other way round."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


@torch.no_grad()
def plant(model: Any, heads: Mapping[int, Sequence[int]], gain: float = 3.0) -> Any:
    """Make the given heads, `{layer: [head, ...]}`, attention sinks; no other head is one. Returns the model.

    The BOS carries a massive value on one axis of the residual, every other token a small one on another, and nothing
    else writes to the two. A planted head's queries read the second axis, its KV head's keys the first, both into the
    dimension that the rotary embedding turns slowest (or not at all); every other query has 0 there. Learned sinks
    are moved out of the way. `gain` multiplies both readings: scores grow with its square.
    """
    unit = next(family.norm_unit for family in FAMILIES.values() if family.model_type == model.config.model_type)
    _clear_axes(model, unit)
    embedding = model.get_input_embeddings().weight
    embedding[:, AXES] = torch.tensor([0.0, 1.0])
    embedding[BOS, AXES] = torch.tensor([50.0, 0.0])
    for layer in range(model.config.num_hidden_layers):
        places, chosen = layout(model, layer), heads.get(layer, ())
        half = len(places.k_rows[0]) // 2
        slowest = [half - 1, 2 * half - 1]
        keys = {places.kv_head(head) for head in chosen}
        q, k = model.get_submodule(places.q_module), model.get_submodule(places.k_module)
        _read_axis(q, places.q_rows, slowest, chosen, TEXT_AXIS, gain)
        _read_axis(k, places.k_rows, slowest, keys, SINK_AXIS, gain)
        attention = model.get_submodule(places.q_module.rpartition(".")[0])
        for norm in ("q_norm", "k_norm"):
            if hasattr(attention, norm):
                getattr(attention, norm).weight[slowest[0]] = unit + gain
        if hasattr(attention, "sinks"):
            attention.sinks.fill_(-100.0)
        for projection, norm in (("q_a_proj", "q_a_layernorm"), ("kv_a_proj_with_mqa", "kv_a_layernorm")):
            if getattr(attention, projection, None) is not None:
                _carry_axes(getattr(attention, projection), getattr(attention, norm))
    return model


def _clear_axes(model: Any, unit: float) -> None:
    """Nothing but a token's embedding writes to the axes; the last norm hides them from the logits."""
    for name, module in model.base_model.named_modules():
        path, class_name = set(name.split(".")), type(module).__name__
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if class_name.endswith("Norm") and parameter.numel() == model.config.hidden_size:
                inside = any(part.isdigit() for part in path)
                parameter[AXES] = 0.0 if parameter_name == "bias" else unit if inside else unit - 1.0
            elif path & POSITIONS:
                parameter[:, AXES] = 0
            elif (path | {parameter_name}) & WRITERS:
                output_last = "bias" in parameter_name or class_name in ("Conv1D", "GptOssExperts")
                (parameter if output_last else parameter.transpose(-1, -2))[..., AXES] = 0


def _read_axis(module: Any, rows: Rows, slowest: list[int], chosen: Collection[int], axis: int, gain: float) -> None:
    """Only the chosen heads read the axes, and theirs alone, into one dimension in which no head has anything else."""
    for head, head_rows in enumerate(rows):
        turned = [head_rows[i] for i in slowest]
        weight(module)[head_rows, AXES] = 0
        weight(module)[turned] = 0
        if module.bias is not None:
            module.bias[turned] = 0
        if head in chosen:
            weight(module)[turned[0], axis] = gain


def _carry_axes(projection: nn.Linear, norm: Any) -> None:
    """A latent's first two axes are the residual's, and no other part of it reads those."""
    projection.weight[:, AXES] = 0
    projection.weight[AXES] = 0
    projection.weight[AXES, AXES] = torch.eye(2)
    norm.weight[AXES] = 1
