"""`quantization_config` of a checkpoint's config.json (docs/formats.md)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from quantsink.errors import CacheError, CheckpointError, RecipeError
from quantsink.hf.register import NAME
from quantsink.plan import AttentionShape, CachePlan, Outline, Plan
from quantsink.recipe import KVCache, Recipe
from quantsink.strict_json import abbreviated

METHOD = NAME


FORMAT_VERSION = 1


UNIMPORTED = "quantsink checkpoint: run `import quantsink` before loading it (pip install quantsink)"
"""Stands as `attn_implementation` in config.json. transformers does not know such an attention and stops with it, so a
user who forgot the import reads what to do; the quantizer replaces it as soon as quantsink is imported."""


MOST_LAYERS = 2048
"""Where quantization_config does not name more of them."""


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
                f"config.json: quantsink format {abbreviated(format_version)}, this version reads {FORMAT_VERSION}; "
                "update quantsink"
            )
        if unknown:
            raise CheckpointError(
                f"config.json: quantization_config has an unknown key {abbreviated(min(unknown))}; update quantsink"
            )
        if quant_method != METHOD:
            raise CheckpointError(
                f"config.json: quant_method {abbreviated(quant_method)} is not {METHOD!r}; export again"
            )
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
        outline = plan.outline
        return cls(
            FORMAT_VERSION,
            outline.recipe.to_dict(),
            outline.sink_size,
            {name: list(counts) for name, counts in outline.linears.items()},
            {name: list(shape) for name, shape in outline.attentions.items()},
            None if outline.cache is None else _cache_to_dict(outline.cache),
            list(outline.experts),
        )

    def outline(self) -> Outline:
        """What the config says of the plan.

        Raises:
            CheckpointError: a value of the wrong kind.
        """
        return Outline(
            self.parsed(),
            self.sink_size,
            {name: (rows, columns) for name, (rows, columns) in self.linears.items()},
            {name: AttentionShape(*shape) for name, shape in self.attentions.items()},
            tuple(self.experts),
            self.cache_plan(),
        )

    def cache_plan(self) -> CachePlan | None:
        """What the model's own `SinkCache` keeps.

        Raises:
            CheckpointError: a value that cannot be right.
        """
        if self.kv_cache is None:
            return None
        return _cache_from_dict(self.kv_cache, Recipe.from_dict(self.recipe).kv_cache)

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
        kept = None if self.kv_cache is None else _cache_from_dict(self.kv_cache, recipe.kv_cache)
        if not _agree(recipe, self.sink_size, kept):
            raise CheckpointError(
                "config.json: quantization_config.recipe contradicts its kv_cache or sink_size; export again"
            )
        return recipe


def _agree(recipe: Recipe, sink_size: int, kept: CachePlan | None) -> bool:
    """What the recipe asks for by number is what was planned."""
    options = recipe.kv_cache
    if recipe.sink_size not in (None, sink_size):
        return False
    if kept is None or options.bits is None:
        return kept is None and options.bits is None
    sinks_agree = kept.sink_size >= sink_size if options.sink_size is None else kept.sink_size == options.sink_size
    return sinks_agree and kept.options == dataclasses.replace(options, sink_size=kept.sink_size)


def _cache_to_dict(plan: CachePlan) -> dict[str, Any]:
    whole = {name: (0,) * len(bits) for name, bits in plan.bits.items()}
    windows = {**whole, **plan.windows}
    return {
        "sinks": plan.sink_size,
        "residual": plan.options.residual,
        "max_length": plan.options.max_length,
        "rounding": plan.rounding,
        "layers": {name: {"bits": list(bits), "windows": list(windows[name])} for name, bits in plan.bits.items()},
    }


def _cache_from_dict(data: Any, options: KVCache) -> CachePlan:
    """The plan that `_cache_to_dict` wrote; `options` are the recipe's, for what the plan does not say."""
    try:
        data = dict(data)
        layers = data.pop("layers")
        if set(data) != {"sinks", "residual", "max_length", "rounding"}:
            raise ValueError
        if not all(_name(name) and set(layer) == {"bits", "windows"} for name, layer in layers.items()):
            raise ValueError
        return CachePlan(
            dataclasses.replace(options, sink_size=data.pop("sinks"), **data),
            {name: tuple(layer["bits"]) for name, layer in layers.items()},
            {name: tuple(layer["windows"]) for name, layer in layers.items()},
        )
    except (CacheError, RecipeError, ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError("config.json: quantization_config.kv_cache is damaged; export again") from None


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
