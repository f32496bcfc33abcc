"""The rows of a report and the conditions under which they were measured: frozen values, strict to and from JSON."""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from quantsink.errors import UsageError
from quantsink.eval.bootstrap import kl_interval, kl_mean, perplexity, ratio_interval
from quantsink.eval.divergence import WindowSums

OK = "ok"


@dataclass(frozen=True)
class Footprint:
    """The size of a model.

    bits_weight: payload bits per parameter of the reference, tied parameters counted once. bits_kv: bits per coded
    number in the KV cache, scales included. bits_attention: mean over heads. payload_bytes: of the tensors as stored.
    sink_heads, native_heads: number of heads by route. kv_bytes: of the whole KV cache, exact parts included, after the
    last full window; None where the model was measured without a cache.
    """

    bits_weight: float
    bits_kv: float
    bits_attention: float
    payload_bytes: int
    sink_heads: int
    native_heads: int
    kv_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """One method. Figures are None where `status` is not `ok`; bounds also where one window gives no interval.

    ppl: perplexity, ppl_ratio: over the reference's. kl: KL(reference || model) in nats per token. `*_low`, `*_high`:
    95 % interval. top1: share of tokens whose most likely successor is the reference's. windows: the sums behind them.
    """

    method: str
    description: str
    group: str
    status: str
    bits_weight: float | None = None
    bits_kv: float | None = None
    bits_attention: float | None = None
    payload_bytes: int | None = None
    ppl: float | None = None
    ppl_ratio: float | None = None
    ppl_ratio_low: float | None = None
    ppl_ratio_high: float | None = None
    kl: float | None = None
    kl_low: float | None = None
    kl_high: float | None = None
    top1: float | None = None
    sink_heads: int | None = None
    native_heads: int | None = None
    kv_bytes: int | None = None
    windows: tuple[WindowSums, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == OK

    @classmethod
    def of(
        cls,
        method: str,
        description: str,
        group: str,
        footprint: Footprint,
        sums: tuple[WindowSums, ...],
        reference: tuple[WindowSums, ...],
    ) -> "Row":
        """A measured row. Both sides are sums over the same windows."""
        ratio, divergence = ratio_interval(sums, reference), kl_interval(sums)
        count = sum(window.count for window in sums)
        return cls(
            method,
            description,
            group,
            OK,
            **dataclasses.asdict(footprint),
            ppl=perplexity(sums),
            ppl_ratio=perplexity(sums) / perplexity(reference),
            ppl_ratio_low=ratio[0] if ratio else None,
            ppl_ratio_high=ratio[1] if ratio else None,
            kl=kl_mean(sums),
            kl_low=divergence[0] if divergence else None,
            kl_high=divergence[1] if divergence else None,
            top1=sum(window.top1 for window in sums) / count,
            windows=sums,
        )


@dataclass(frozen=True)
class CalibrationFacts:
    """The calibration behind the rows. `covers_text`: it read the text that is measured here."""

    data: tuple[str, ...]
    tokens: int
    seq_len: int
    covers_text: bool


@dataclass(frozen=True)
class Versions:
    """Versions of the packages that the figures depend on; `not installed` for a missing one."""

    python: str
    torch: str
    transformers: str
    quantsink: str
    bitsandbytes: str
    hqq: str


@dataclass(frozen=True)
class Conditions:
    """What was measured, on which text, and how.

    bos: token id before each window, None = no BOS. context: tokens at the start of each window that are not scored.
    """

    model: str
    model_fingerprint: str
    parameters: int
    dtype: str
    data: str
    data_fingerprint: str
    length: int
    stride: int
    context: int
    bos: int | None
    windows: int
    scored: int
    complete: bool
    calibration: CalibrationFacts | None
    device: str
    threads: int
    versions: Versions
    date: str


COMPARED = ("model_fingerprint", "length", "stride", "context", "bos", "dtype", "data_fingerprint")
"""Conditions that two rows must share to appear in one table."""


def compare_conditions(first: Conditions, second: Conditions) -> None:
    """Refuse rows that were measured differently.

    Raises:
        UsageError: names the first condition that differs and both its values.
    """
    for name in COMPARED:
        values = [getattr(conditions, name) for conditions in (first, second)]
        if values[0] != values[1]:
            a, b = (value[:12] if name.endswith("fingerprint") else value for value in values)
            raise UsageError(f"not comparable: {name} is {a} in one and {b} in the other; measure both alike")


def to_plain(value: Any) -> Any:
    """Plain JSON values; an infinite perplexity is written as the string "inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return "inf" if value == math.inf else value


def from_plain(hint: Any, value: Any, place: str) -> Any:
    """The inverse of `to_plain`, for a value of type `hint`: every key must be there, and no other.

    Raises:
        UsageError: names the place and what is wrong there.
    """
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return None if value is None else from_plain(typing.get_args(hint)[0], value, place)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type, hint), value, place)
    if origin is tuple:
        _require(isinstance(value, list), place, "a list", value)
        return tuple(from_plain(typing.get_args(hint)[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if hint is float:
        _require(value == "inf" or (type(value) in (int, float) and math.isfinite(value)), place, "a number", value)
        return float(value)
    _require(type(value) is hint, place, hint.__name__, value)
    return value


def _object(value_type: type, value: Any, place: str) -> Any:
    _require(isinstance(value, dict), place, "an object", value)
    hints = typing.get_type_hints(value_type)
    wrong = [f"unknown key {key!r}" for key in value if key not in hints]
    wrong += [f"no {key!r}" for key in hints if key not in value]
    if wrong:
        raise UsageError(f"{place}: {wrong[0]}; this report was written by another version of quantsink, measure again")
    return value_type(**{key: from_plain(hint, value[key], f"{place}.{key}") for key, hint in hints.items()})


def _require(good: bool, place: str, expected: str, value: Any) -> None:
    if not good:
        raise UsageError(f"{place}: expected {expected}, found {value!r}")
