"""A recipe: what the user wants done. Frozen, strict, JSON in and out; the presets are constants at the end."""

import dataclasses
import fnmatch
import json
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantsink import strict_json
from quantsink.errors import RecipeError

WIDTHS = (8, 4, 3, 2)
BLOCK = 64
"""Bits of a cache's codes, and tokens per block: the kernels' own, repeated so that a recipe needs no PyTorch."""
LEAST_SINKS = 4
"""Exact sink tokens at least: two bits profit from four (docs/decisions/0007-cache.md)."""
Widths = Literal["measured", "uniform", "random"]
Rounding = Literal["query", "nearest"]
WIDTH_CHOICES: tuple[str, ...] = typing.get_args(Widths)
ROUNDING_CHOICES: tuple[str, ...] = typing.get_args(Rounding)
NOT_REQUIRED = ("bits", "sink_size", "max_length")
"""Options of a cache that may be None."""


@dataclass(frozen=True)
class Activations:
    """Inputs of the linear layers. Example: `per_token` gives an input `[B, L, K]` scales `[B, L, 1]`."""

    kind: Literal["native", "per_token", "static"] = "per_token"
    native_columns: float = 0.01
    """Share of input columns that stay native, those with the largest calibrated input without the sink rows."""
    sink_rows: Literal["native", "table", "plain"] = "native"
    """Rows of sink tokens: unquantized, through a scale of their own (`static` only), or like every other row."""


@dataclass(frozen=True)
class Clip:
    """Bound on scores. `absolute` clamps to +-bound; `row` drops what lies `bound` below the row's maximum."""

    kind: Literal["none", "absolute", "row"] = "none"
    bound: float = 10.0
    max_loss: float = 1e-3
    """Mean attention weight that a head may lose to its bound in calibration; a head over it is not clipped, and named.
    inf clips every head, whatever it costs."""


@dataclass(frozen=True)
class Attention:
    """How heads are routed and what an INT8 head does."""

    kind: Literal["native", "int8"] = "int8"
    sinks: Literal["detected", "none", "all", "random"] = "detected"
    """Heads on the `sink` route; `random` takes as many heads as are detected, by `seed`: the control."""
    native_heads: int = 0
    """This many heads, those with the largest measured attention-output error, stay native."""
    native: tuple[str, ...] = ()
    """Heads that stay native in any case, each as "layer.head", "18.8" for layer 18 head 8."""
    weight_scale: Literal["block", "row", "fixed"] = "block"
    """Scale of the 8-bit attention weights: per (row, `block` keys), per row, or 1/127 everywhere."""
    block: int = 64
    clip: Clip = field(default_factory=Clip)
    seed: int = 0


@dataclass(frozen=True)
class KVCache:
    """The options of a `SinkCache` (docs/cache.md): the recipe's `kv_cache`, and the arguments of
    `SinkCache.from_calibration`. Their rules are checked here and nowhere else.

    Raises:
        RecipeError: an invalid option.
    """

    bits: float | None = None
    """Of a code, on average over the KV heads: 2 to 8. None, in a recipe: the model makes an ordinary cache."""
    sink_size: int | None = None
    """First tokens that stay exact; None: as many as the calibration counts, at least 4."""
    residual: int = 64
    """Newest tokens that stay exact."""
    widths: Widths = "measured"
    """Bits by head: where the calibration measured most error, the same everywhere, or shuffled (the control)."""
    rounding: Rounding = "query"
    """How keys are rounded: for the scores of calibrated queries, or each number by itself."""
    stream: str = "off"
    """`auto`: heads that look only at sinks and the newest 256 tokens forget the rest; a number: that many tokens. A
    number given as int is kept as its digits, as JSON has it."""
    max_length: int | None = None
    """Tokens that a rolling cache holds; None: all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stream, int) and not isinstance(self.stream, bool):
            object.__setattr__(self, "stream", str(self.stream))
        narrow, wide = min(WIDTHS), max(WIDTHS)
        self._check("bits", _is_number(self.bits, narrow, wide), f"a number from {narrow} to {wide}")
        if self.widths == "uniform":
            self._check("bits", self.bits in WIDTHS, f"with uniform widths one of {', '.join(map(str, WIDTHS))}")
        self._check("sink_size", _is_count(self.sink_size), "a whole number, 0 or more")
        self._check("residual", self.residual is not None and _is_count(self.residual), "a whole number, 0 or more")
        self._check("widths", self.widths in WIDTH_CHOICES, f"one of {', '.join(WIDTH_CHOICES)}")
        self._check("rounding", self.rounding in ROUNDING_CHOICES, f"one of {', '.join(ROUNDING_CHOICES)}")
        streams = self.stream in ("auto", "off") or _is_digits(self.stream)
        self._check("stream", streams, "auto, off or a number of tokens")
        exact = (LEAST_SINKS if self.sink_size is None else self.sink_size) + self.residual
        least = exact + 2 * BLOCK
        reason = f"a whole number, at least {least} (sink_size, residual and two blocks of {BLOCK})"
        self._check("max_length", _is_count(self.max_length, least), reason)
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        self._check("seed", whole and self.seed >= 0, "a whole number, 0 or more")

    def _check(self, name: str, valid: bool, expected: str) -> None:
        value = getattr(self, name)
        if not valid and (value is not None or name not in NOT_REQUIRED):
            raise RecipeError(f"kv_cache.{name}: expected {expected}, found {strict_json.abbreviated(value)}")

    def with_sinks(self, calibrated: int) -> "KVCache":
        """The same options with a number for `sink_size`: `calibrated`, at least 4, where it is None."""
        if self.sink_size is not None:
            return self
        return dataclasses.replace(self, sink_size=max(calibrated, LEAST_SINKS))


@dataclass(frozen=True)
class Recipe:
    """What to do to a model. `Recipe.from_json(recipe.to_json()) == recipe`; unknown keys are refused.

    Raises:
        RecipeError: a value outside its range, or options that contradict each other.
    """

    weights: Literal["int8", "native"] = "int8"
    output_head: Literal["native", "int8"] = "native"
    """`int8`: the output head too, weights per output channel, its inputs per token (native where `activations` are). A
    head that shares the embedding's weights gets its own; the embedding stays native."""
    activations: Activations = field(default_factory=Activations)
    attention: Attention = field(default_factory=Attention)
    kv_cache: KVCache = field(default_factory=KVCache)
    sink_size: int | None = None
    """Sink tokens a sequence; None takes the calibration's, and any other value than the calibration's is refused."""
    sink_threshold: float = 0.3
    """BOS mass (or sink mass) from which a head is a sink head."""
    entropy_threshold: float = 1.0
    """Normalized entropy up to which a head is a sink head."""
    exclude: tuple[str, ...] = ()
    """Modules left native: whole dotted names with `*`, `layers.1` covers everything below it and never `layers.11`."""

    def __post_init__(self) -> None:
        a, t = self.activations, self.attention
        _check(self.weights == "int8" or a.kind == "native", "weights: native weights need activations.kind: native")
        _check(self.weights == "int8" or self.output_head == "native", "output_head: int8 needs weights: int8")
        _check(0 <= a.native_columns < 1, "activations.native_columns: a share of the columns, from 0 to below 1")
        _check(
            a.sink_rows != "table" or a.kind == "static", "activations.sink_rows: table needs activations.kind: static"
        )
        _check(t.clip.kind == "none" or t.kind == "int8", "attention.clip: needs attention.kind: int8")
        _check(0 < t.clip.bound < math.inf and t.clip.max_loss >= 0, "attention.clip: bound > 0 and max_loss >= 0")
        _check(t.block > 0 and t.block <= 1040, "attention.block: 1 to 1040 keys, so that INT8 sums stay exact")
        _check(t.native_heads >= 0, "attention.native_heads: 0 or more")
        _check(self.sink_size is None or self.sink_size >= 1, "sink_size: 1 or more")
        _check(0 < self.sink_threshold <= 1, "sink_threshold: above 0, up to 1")
        _check(0 < self.entropy_threshold <= 1, "entropy_threshold: above 0, up to 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `inf` is written as the string "inf"."""
        return typing.cast(dict[str, Any], _plain(dataclasses.asdict(self)))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: object, place: str = "recipe") -> "Recipe":
        """Build a recipe from parsed JSON. `place` names the origin in errors. Missing keys take their defaults."""
        try:
            return typing.cast(Recipe, strict_json.build(cls, data, place))
        except ValueError as error:
            raise RecipeError(f"{error}; `quantsink recipe` prints a good one") from None
        except RecipeError as error:
            raise RecipeError(f"{place}: {str(error).removeprefix('recipe: ')}") from None

    @classmethod
    def from_json(cls, text: str, place: str = "recipe") -> "Recipe":
        try:
            data = strict_json.parse(text)
        except ValueError as error:
            raise RecipeError(f"{place}: not valid JSON: {error}; `quantsink recipe` prints a good one") from None
        return cls.from_dict(data, place)

    @classmethod
    def load(cls, name: "str | Path | Recipe") -> "Recipe":
        """A preset's name, a JSON file, or a recipe itself."""
        if isinstance(name, Recipe):
            return name
        if str(name) in PRESETS:
            return PRESETS[str(name)]
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise RecipeError(f"{name}: a recipe is UTF-8 JSON; write one with `quantsink recipe`") from None
        except (OSError, ValueError):  # no such file, a folder, a name that no file can have
            raise RecipeError(
                f"recipe {strict_json.abbreviated(str(name))}: neither a preset ({', '.join(PRESETS)}) nor a file"
            ) from None
        return cls.from_json(text, str(name))


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted module name, or a module above it, matches one of the patterns, component by component."""
    return any(matches(name, pattern) for pattern in patterns)


def matches(name: str, pattern: str) -> bool:
    """Whether the components of `pattern` match consecutive components of `name`."""
    parts, patterns = name.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(*pair) for pair in zip(parts[first:], patterns, strict=False))
        for first in range(len(parts) - len(patterns) + 1)
    )


def _check(valid: bool, message: str) -> None:
    if not valid:
        raise RecipeError(f"recipe: {message}")


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_count(value: object, least: int = 0) -> bool:
    """A whole number that fits into 31 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_digits(text: object) -> bool:
    """A number of tokens above 0, in digits that `int` takes; str.isdigit also knows superscripts."""
    return isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


_NATIVE_ATTENTION = Attention(kind="native", sinks="none")

PRESETS = {
    "w8a16": Recipe(
        activations=Activations(kind="native", native_columns=0.0, sink_rows="plain"), attention=_NATIVE_ATTENTION
    ),
    "w8a8": Recipe(),
    "w8a8-static": Recipe(activations=Activations(kind="static", sink_rows="table")),
}
"""The presets by name: weights only; dynamic per token; static with one table for sink rows and one for the rest."""
