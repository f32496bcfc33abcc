"""`quantsink inspect --cache`: the size of a model's KV cache under a recipe, computed without loading the model."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoModelForCausalLM

from quantsink.cache.layout import LayerPolicy
from quantsink.cache.size import layer_bytes, total
from quantsink.calibration.cache_plan import cache_plan
from quantsink.calibration.calibration import Calibration
from quantsink.calibration.stored import FACTS
from quantsink.checkpoint.save_load import read_config
from quantsink.errors import CheckpointError, UsageError
from quantsink.hf.config import QuantSinkConfig
from quantsink.kernels.coded_attention.codes import Record
from quantsink.models.architecture import Architecture
from quantsink.models.head_layout import AttentionLayer
from quantsink.plan import CachePlan
from quantsink.recipe import Recipe

EXACT_BYTES = 2
"""Bytes per exact number: bfloat16."""


def describe_cache(
    path: Path, recipe: str | None, kv_bits: float | None, lengths: list[int]
) -> tuple[dict[str, Any], RenderableType]:
    """The cache of a calibration under a recipe, or of a checkpoint, as a JSON object and as tables that rich prints.

    Raises:
        UsageError: `path` is neither a calibration nor a checkpoint with a cache, or a length is below 1.
        CheckpointError: the checkpoint is damaged.
    """
    if any(length < 1 for length in lengths):
        raise UsageError(f"--length {min(lengths)}: 1 or more")
    if (path / FACTS).is_file():
        calibration = Calibration.load(path)
        options = Recipe.load(recipe).kv_cache if recipe else Recipe().kv_cache
        bits = kv_bits if kv_bits is not None else 4 if options.bits is None else options.bits
        plan = cache_plan(calibration, dataclasses.replace(options, bits=bits))
        return _describe(calibration.model, plan, calibration.layers, lengths)
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: neither a calibration ({FACTS}) nor a checkpoint (config.json)")
    if recipe or kv_bits is not None:
        raise UsageError(f"{path}: the checkpoint has a cache plan; --recipe and --kv-bits go with a calibration")
    try:
        stored_plan = QuantSinkConfig(**read_config(path)).cache_plan()
    except TypeError as error:
        raise CheckpointError(f"{path / 'config.json'}: quantization_config is damaged: {error}") from error
    if stored_plan is None:
        raise UsageError(f"{path}: its recipe has no kv_cache; `quantsink export --kv-bits 4` writes one")
    return _describe(str(path), stored_plan, _layers(path), lengths)


def _layers(path: Path) -> tuple[AttentionLayer, ...]:
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    config._attn_implementation = None
    with torch.device("meta"):
        return Architecture.of(AutoModelForCausalLM.from_config(config)).attentions


def _describe(
    name: str, plan: CachePlan, layers: tuple[AttentionLayer, ...], lengths: list[int]
) -> tuple[dict[str, Any], RenderableType]:
    policies = [LayerPolicy.of(layer, plan, EXACT_BYTES) for layer in layers]
    coded = [policy for policy in policies if policy.kind == "codes"]
    bits_per_number = [
        Record(bits, policy.head_dim, policy.head_dim).bits_per_number for policy in coded for bits in policy.bits
    ]
    rows = []
    for length in lengths:
        size = total(layer_bytes(policy, length) for policy in policies)
        rows.append(
            {
                "length": length,
                "bytes": size.all,
                "bytes_codes": size.codes,
                "bytes_exact": size.exact,
                "bytes_bf16": size.full,
                "bytes_token": size.all / length,
                "bytes_token_bf16": size.full / length,
                "ratio": size.all / size.full,
            }
        )
    facts = {
        "kind": "cache",
        "model": name,
        "sinks": plan.sink_size,
        "residual": plan.options.residual,
        "max_length": plan.options.max_length,
        "bits_per_number": sum(bits_per_number) / len(bits_per_number) if bits_per_number else None,
        "sequences": rows,
        "layers": {
            policy.name: {"window": policy.windows[0]}
            if policy.kind == "window"
            else {"bits": list(policy.bits), "windows": list(policy.windows)}
            for policy in policies
        },
    }
    return facts, _render(facts)


def _render(facts: dict[str, Any]) -> RenderableType:
    rolling = "" if facts["max_length"] is None else f", at most {facts['max_length']:,} tokens per layer"
    bits = (
        ""
        if facts["bits_per_number"] is None
        else f", codes of {facts['bits_per_number']:.2f} bits per number with their scales"
    )
    summary = f"{facts['sinks']} sink tokens and the newest {facts['residual']} exact in bfloat16{bits}{rolling}"
    size = Table(title="One sequence", title_justify="left")
    for heading in ("tokens", "bytes", "bytes per token", "in bfloat16", "ratio"):
        size.add_column(heading, justify="right")
    for row in facts["sequences"]:
        size.add_row(
            f"{row['length']:,}", f"{row['bytes']:,}", f"{row['bytes_token']:,.0f}", f"{row['bytes_token_bf16']:,.0f}",
            f"{row['ratio']:.3f}",
        )  # fmt: skip
    layers = Table(title="Layers", title_justify="left")
    layers.add_column("attention")
    layers.add_column("bits of each KV head")
    for name, layer in facts["layers"].items():
        layers.add_row(name, _policy(layer))
    return Group(Text(summary), size, layers)


def _policy(layer: dict[str, Any]) -> str:
    if "bits" not in layer:
        return f"exact, window of {layer['window']:,} tokens"
    return " ".join(
        f"{bits}" if not window else f"{bits} (newest {window:,})"
        for bits, window in zip(layer["bits"], layer["windows"], strict=True)
    )


__all__ = ["describe_cache"]
