"""`SinkCache`: a KV cache for transformers that keeps its sinks exact and the rest in 8, 4, 3 or 2 bits."""

import copy
import logging
import math
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from quantsink.cache.layer import SinkLayer
from quantsink.cache.layout import LayerPolicy
from quantsink.cache.placeholder import PassMask
from quantsink.errors import ArchitectureError, CacheError, RecipeError
from quantsink.hf.patches import changing, use_attention
from quantsink.kernels.coded_attention.codes import Metric
from quantsink.layers.tables import CACHE_TABLE, CacheTable
from quantsink.models.architecture import attention_layers
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.rotary import rotations
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache, Rounding, Widths

log = logging.getLogger(__name__)


class Calibrated(Protocol):
    """What a cache needs of a `quantsink.Calibration`."""

    def cache_plan(self, model: Any, options: KVCache) -> CachePlan: ...


class SinkCache(Cache):
    """A transformers cache made for one model: `model.generate(..., past_key_values=cache)` (`cache=` from 5.21 on).

    Layers with full attention keep sink tokens and the newest tokens exact and everything between as codes, which
    attention reads in place. Layers with sliding attention keep their window exact, as transformers does.

    Args:
        model: a transformers causal language model, quantized by quantsink or not. Its attention implementation becomes
            "quantsink", which computes as PyTorch's SDPA where neither a `SinkCache` nor an INT8 table is in play.
        plan: which head keeps what; `Calibration.cache_plan` makes one.

    Raises:
        CacheError: the plan does not fit the model.
        ArchitectureError: layers or positions that this cache does not know.
    """

    def __init__(self, model: Any, plan: CachePlan) -> None:
        self.plan = plan
        self.policies = policies(model, plan)
        modules = [model.get_submodule(policy.name) for policy in self.policies]
        coded = [index for index, policy in enumerate(self.policies) if policy.kind == "codes"]
        metrics = {index: metric_of(modules[index], self.policies[index], plan) for index in coded}
        if not coded:
            log.warning("SinkCache: every layer of this model has sliding attention; the cache holds no codes")
        with changing(model) as changes:
            use_attention(changes)
            rotate = rotations(model, coded) if plan.options.max_length is not None else {}
        layers: list[Any] = [
            SinkLayer(policy, module, rotate.get(index), metrics[index])
            if policy.kind == "codes"
            else DynamicSlidingWindowLayer(sliding_window=policy.windows[0])
            for index, (policy, module) in enumerate(zip(self.policies, modules, strict=True))
        ]
        super().__init__(layers=layers)
        self.layers: list[Any]
        self._share(PassMask())

    def _share(self, pass_mask: PassMask) -> None:
        """Give every layer the one mask of the pass in progress."""
        self._pass_mask = pass_mask
        coded = [layer for layer in self.layers if isinstance(layer, SinkLayer)]
        for layer in coded:
            layer.pass_mask, layer.last = pass_mask, layer is coded[-1]

    def __deepcopy__(self, memory: dict[int, Any]) -> "SinkCache":
        new = object.__new__(type(self))
        memory[id(self)] = new
        shared = {"plan", "policies", "_pass_mask"}
        vars(new).update({k: v if k in shared else copy.deepcopy(v, memory) for k, v in vars(self).items()})
        new._share(PassMask())
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_pass_mask"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share(PassMask())

    @classmethod
    def from_calibration(
        cls,
        model: Any,
        calibration: Calibrated,
        bits: int | float = 4,
        *,
        sink_size: int | None = None,
        residual: int = 64,
        widths: str = "measured",
        rounding: str = "query",
        stream: str | int = "off",
        max_length: int | None = None,
        seed: int = 0,
    ) -> "SinkCache":
        """A cache for `model` that gives each head the bits its calibration says it needs.

        Example:
            cache = quantsink.SinkCache.from_calibration(model, quantsink.Calibration.load("calibration"), bits=4)
            model.generate(**inputs, past_key_values=cache)

        A cache serves one batch of sequences. `cache.reset()` empties it for the next.

        Args:
            model: a transformers causal language model, the calibrated one; quantized by quantsink or not.
            calibration: what `quantsink.calibrate` returned, or `quantsink.Calibration.load(folder)`.
            bits: of a code, on average over the KV heads; 2 to 8. Scales and zero points come on top (0.5 bits with
                heads of 64).
            sink_size: first tokens that stay exact; None: as many as the calibration counts, at least 4.
            residual: newest tokens that stay exact.
            widths: `measured` gives more bits to heads with a larger error, `uniform` the same to all, `random`
                deals the measured ones at random (the control). docs/cache.md describes them.
            rounding: `query` rounds keys so that the scores of calibrated queries change least, `nearest` each number
                by itself.
            stream: `off` forgets nothing. `auto` lets heads that calibration saw looking only at sinks and the newest
                256 tokens forget the rest. A number does so with that many tokens.
            max_length: tokens that a rolling cache holds, sinks included; None: all.
            seed: of `widths="random"`.

        Returns:
            the empty cache. The model's attention implementation becomes "quantsink".

        Raises:
            RecipeError: an invalid option. CalibrationError: calibrated on another model, or without what an option
                needs. CacheError, ArchitectureError: a model that this cache does not support.
        """
        if not hasattr(calibration, "cache_plan"):
            raise RecipeError(
                f"calibration: expected a quantsink.Calibration, not {type(calibration).__name__}; "
                "quantsink.Calibration.load(folder) gives one"
            )
        options = KVCache(
            bits, sink_size, residual, cast(Widths, widths), cast(Rounding, rounding), str(stream), max_length, seed
        )
        return cls(model, calibration.cache_plan(model, options))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As transformers'; each layer is updated once a pass, in order.

        Raises:
            CacheError: a layer that the cache does not have, or an earlier pass that did not reach every layer.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise CacheError(f"layer {layer_idx}: the cache was made for {len(self.layers)} layers, of another model")
        if layer_idx == 0:
            self._check_whole()
            self._pass_mask.mask = None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_whole(self) -> None:
        """Refuse to go on where the last pass missed a layer."""
        seen = {layer.get_seq_length() for layer in self.layers}
        if len(seen) > 1:
            most = max(seen)
            late = next(i for i, layer in enumerate(self.layers) if layer.get_seq_length() < most)
            raise CacheError(
                f"{self.policies[late].name}: its cache was not updated in the last pass "
                f"({self.layers[late].get_seq_length()} of {most} tokens); call cache.reset() and start again"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from every layer, or from none.

        Raises:
            CacheError: a layer no longer holds what would be needed.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        for layer, policy in zip(self.layers, self.policies, strict=True):
            if isinstance(layer, SinkLayer):
                layer.check_crop(tokens_to_remove)
            elif tokens_to_remove and layer.get_seq_length() >= layer.sliding_window and not layer.record_past:
                raise CacheError(
                    f"{policy.name}: its window has moved on and cannot be cropped; call activate_past_recording() "
                    "before the passes that may be taken back"
                )
        super().crop(tokens_to_remove)

    @property
    def bits_per_number(self) -> float:
        """Real bits of a number held as a code, scales and zero points included, over all layers that hold codes."""
        coded = [policy for policy in self.policies if policy.kind == "codes"]
        heads = sum(policy.kv_heads for policy in coded)
        return sum(policy.bits_per_number * policy.kv_heads for policy in coded) / heads if heads else math.nan

    def nbytes(self) -> int:
        """Bytes of every tensor that the cache holds now."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor that the cache holds now."""
        tensors: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer, SinkLayer):
                tensors += layer.tensors()
            elif layer.is_initialized:
                tensors += [x for x in (layer.keys, layer.values) if x is not None]
        return tensors


def metric_of(module: nn.Module, policy: LayerPolicy, plan: CachePlan) -> Metric | None:
    """What a layer rounds its keys with; None: each number by itself.

    Raises:
        CacheError: a plan without what its rounding needs, or with another shape.
    """
    if plan.rounding == "nearest":
        return None
    table = getattr(module, CACHE_TABLE, None)
    if isinstance(table, CacheTable) and policy.name not in plan.query_gram:
        return table.metric
    gram = plan.query_gram.get(policy.name)
    if gram is None or tuple(gram.shape) != (policy.kv_heads, policy.head_dim, policy.head_dim):
        statistics = "no query_gram" if gram is None else f"a query_gram of {list(gram.shape)}"
        raise CacheError(
            f"{policy.name}: {statistics} in the plan; rounding for queries needs one of the model's own shape"
        )
    return Metric.of(gram)


def policies(model: Any, plan: CachePlan) -> tuple[LayerPolicy, ...]:
    """What each layer of `model` keeps.

    Raises:
        CacheError, ArchitectureError: as `SinkCache`.
    """
    layers = attention_layers(model)
    kinds, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    unknown = set(plan.bits) - {layer.name for layer in layers}
    if unknown:
        raise CacheError(f"{sorted(unknown)[0]}: in the plan but not in the model; the plan is for another model")
    return tuple(_policy(model, plan, layer, kind) for layer, kind in zip(layers, kinds, strict=True))


def _policy(model: Any, plan: CachePlan, layer: AttentionLayer, kind: str) -> LayerPolicy:
    place = f"{model.config.model_type}: {layer.name}"
    if not layer.causal or (layer.k.size, layer.value_dim) != (layer.head_dim, layer.head_dim):
        attention = "latent attention, whose cache holds no keys" if layer.causal else "an encoder's attention"
        raise ArchitectureError(f"{place}: SinkCache does not support {attention}")
    if kind not in ("full_attention", "sliding_attention"):
        raise ArchitectureError(f"{place}: SinkCache does not support {kind} layers")
    policy = LayerPolicy.of(layer, plan, model.dtype.itemsize)
    try:
        policy.bits_per_number  # noqa: B018  (refuses a head size that has no codes)
    except ValueError as error:
        raise ArchitectureError(f"{layer.name}: {error}") from error
    return policy


__all__ = ["LayerPolicy", "SinkCache", "metric_of", "policies"]
