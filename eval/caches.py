"""The rows of a report that differ only in their KV cache, and the real size of a cache."""

import dataclasses
import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantsink.calibration.calibration import Calibration
from quantsink.errors import CalibrationError, UsageError
from quantsink.eval.divergence import MakeCache
from quantsink.eval.methods import Method, NotRunError, one_line
from quantsink.eval.perplexity import EvalWindow
from quantsink.recipe import WIDTHS

HQQ = {"axis_key": 1, "axis_value": 1, "q_group_size": 64, "residual_length": 128}
"""Groups of 64 numbers of one token, up to 128 tokens exact."""


def parse_widths(text: str) -> tuple[int, ...]:
    """The value of `--kv-bits`: `8,4,3,2` or some of these.

    Raises:
        UsageError: another width.
    """
    names = [name.strip() for name in text.split(",")]
    known = {str(width): width for width in WIDTHS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--kv-bits {unknown[0]!r}: not a width; give some of {', '.join(known)}, separated by commas")
    return tuple(known[name] for name in dict.fromkeys(names))


def cache_methods(bits: Sequence[int]) -> tuple[Method, ...]:
    """quantsink's cache at each width with its controls, then the other toolkits' caches."""
    return tuple(method for b in bits for method in _sink_caches(b)) + tuple(_hqq(b) for b in bits)


def _sink_caches(bits: int) -> list[Method]:
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("", "widths by measured error, keys rounded for calibrated queries, sinks exact", {}),
        ("-no-sinks", "the same bits, no token exact for being a sink", {"sink_size": 0}),
        ("-nearest", "the same bits, every number rounded by itself", {"rounding": "nearest"}),
    ]
    if min(WIDTHS) < bits < max(WIDTHS):  # at the ends every head has the same width
        rows += [
            ("-uniform", f"every head {bits} bits", {"widths": "uniform"}),
            ("-random", "as many heads of each width, chosen at random", {"widths": "random"}),
        ]
    methods = [
        _cached(f"kv{bits}{suffix}", description, "cache", _sink_cache(bits, options))
        for suffix, description, options in rows
    ]
    if bits == max(WIDTHS):
        description = "heads that were local in calibration forget all but sinks and the newest 256 tokens"
        methods += [
            _cached(f"kv{bits}-stream", description, "cache", _streaming(bits, None)),
            _cached(f"kv{bits}-stream-random", "as many heads forget, chosen at random", "cache", _streaming(bits, 0)),
        ]
    return methods


def _streaming(bits: int, seed: int | None) -> Callable[[Any, Calibration | None], MakeCache]:
    """`stream="auto"`; with a seed the heads that stream are shuffled, which is the control."""

    def prepare(model: Any, calibration: Calibration | None) -> MakeCache:
        from quantsink.hf.sink_cache import SinkCache

        if calibration is None:
            raise UsageError("this cache needs a calibration of the model; give --calibration")
        try:
            plan = calibration.cache_plan(model, bits=bits, stream="auto")
        except CalibrationError as error:
            raise NotRunError(str(error)) from error
        windows = [window for layer in plan.windows.values() for window in layer]
        if not any(windows):
            raise NotRunError("no head of this model is local")
        if seed is not None:
            random.Random(seed).shuffle(windows)
            shuffled = iter(windows)
            by_layer = {name: tuple(next(shuffled) for _ in layer) for name, layer in plan.windows.items()}
            plan = dataclasses.replace(plan, windows=by_layer)
        return lambda: SinkCache(model, plan)

    return prepare


def _sink_cache(bits: int, options: dict[str, Any]) -> Callable[[Any, Calibration | None], MakeCache]:
    def prepare(model: Any, calibration: Calibration | None) -> MakeCache:
        from quantsink.hf.sink_cache import SinkCache

        if calibration is None:
            raise UsageError("this cache needs a calibration of the model; give --calibration")
        plan = calibration.cache_plan(model, bits=bits, **options)
        return lambda: SinkCache(model, plan)

    return prepare


def _hqq(bits: int) -> Method:
    """transformers' own quantized cache. It is tried with two updates first, which fails for HQQ at 3 bits."""

    def prepare(model: Any, _: Calibration | None) -> MakeCache:
        if importlib.util.find_spec("hqq") is None:
            raise NotRunError("hqq is not installed; pip install 'quantsink[peers]'")
        from transformers import QuantizedCache

        def make() -> Any:
            return QuantizedCache(backend="hqq", config=model.config, nbits=bits, **HQQ)

        try:
            states = torch.ones(1, 1, 64, 64, dtype=model.dtype, device=model.device)
            trial = make()
            trial.update(states, states, 0)
            trial.update(states, states, 0)
        except Exception as error:
            raise NotRunError(f"HQQ's {bits}-bit cache does not run on this model: {one_line(error)}") from error
        return make

    description = f"transformers' QuantizedCache, HQQ at {bits} bits, groups of {HQQ['q_group_size']}"
    return _cached(f"hqq-kv{bits}", description, "peer-cache", prepare, calibrated=False)


def _cached(
    name: str,
    description: str,
    group: str,
    cache: Callable[[Any, Calibration | None], MakeCache],
    *,
    calibrated: bool = True,
) -> Method:
    return Method(name, description, group, lambda model, _: model, calibrated, cache)


@dataclass
class Weight:
    """The size of the longest window's cache; of several of one length, the last one's."""

    tokens: int = 0
    bits: float = 0.0
    size: int = 0

    def see(self, window: EvalWindow, cache: Any) -> None:
        if len(window.ids) >= self.tokens:
            self.tokens, self.bits, self.size = len(window.ids), cache_bits(cache), cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of every tensor that a transformers cache holds: codes, scales and the parts kept exact."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    return sum(_bytes(tensor) for layer in cache.layers for tensor in _tensors(vars(layer)))


def cache_bits(cache: Any) -> float:
    """Real bits per coded number, its share of scales and zero points included; per number where none is coded."""
    bits = float(getattr(cache, "bits_per_number", math.nan))
    if math.isfinite(bits):
        return bits
    coded = [pair for layer in cache.layers for pair in _coded(layer)]
    if coded:  # HQQ: (codes, {"shape", "scale", "zero", ...})
        numbers: int = sum(math.prod(meta["shape"]) for _, meta in coded)
        return 8 * sum(_bytes(tensor) for tensor in _tensors(coded)) / numbers
    tensors = [tensor for layer in cache.layers for tensor in _tensors(vars(layer))]
    return 8 * sum(map(_bytes, tensors)) / sum(tensor.numel() for tensor in tensors)


def _coded(layer: Any) -> list[Any]:
    pairs = [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values")]
    return [pair for pair in pairs if pair is not None]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
