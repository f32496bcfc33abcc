"""A model that makes a `SinkCache` wherever it would have made a cache of its own: in `generate`, and in a forward pass
with `use_cache` and no cache given."""

import dataclasses
import inspect
import types
from typing import Any

from torch import Tensor

from quantsink.hf.attention import NAME
from quantsink.hf.patches import Changes, make_caches
from quantsink.hf.sink_cache import SinkCache, metric_of, policies
from quantsink.models.inputs import CACHE_ARGUMENTS, cache_argument
from quantsink.plan import CachePlan


def check_cache(model: Any, plan: CachePlan) -> None:
    """Refuse a plan that does not fit the model.

    Raises:
        CacheError, ArchitectureError: as `SinkCache`.
    """
    for policy in policies(model, plan):
        if policy.kind == "codes":
            metric_of(model.get_submodule(policy.name), policy, plan)


def install(changes: Changes, plan: CachePlan) -> None:
    """Let a model with its `CacheTable`s make a `SinkCache` by itself.

    Raises:
        CacheError, ArchitectureError: as `SinkCache`.
    """
    model, kept = changes.model, dataclasses.replace(plan, query_gram={})
    policies(model, kept)
    make_caches(changes, kept, types.MethodType(_prepare_for_generation, model), _before_forward)


def _prepare_for_generation(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """In place of transformers' method of this name, which is called where another kind of cache is asked for."""
    name = cache_argument(model)
    has_cache = any(model_kwargs.get(argument) is not None for argument in CACHE_ARGUMENTS)
    another = generation_config.use_cache is False or generation_config.cache_implementation is not None
    if has_cache or another or model.config._attn_implementation != NAME:
        return type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, *rest, **named)
    model_kwargs[name] = SinkCache(model, model.kv_cache_plan)
    if getattr(generation_config, "is_assistant", False):
        model_kwargs[name].activate_past_recording()
    return None


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = list(inspect.signature(model.forward).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    use_cache = arguments.get("use_cache")
    use_cache = getattr(model.config, "use_cache", True) if use_cache is None else use_cache
    has_cache = any(arguments.get(argument) is not None for argument in CACHE_ARGUMENTS)
    if not use_cache or has_cache or model.config._attn_implementation != NAME:
        return None
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
        return None  # padding on the right: text to be scored, not continued
    name = cache_argument(model)
    if name in names[: len(args)]:
        return None
    return args, {**kwargs, name: SinkCache(model, model.kv_cache_plan)}
