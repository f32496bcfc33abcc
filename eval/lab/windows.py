"""Mechanisms about distance: biases that grow with it, and windows beyond which nothing is seen.

The distance of query i and key j is i - j where attention is causal, else |i - j|. A token that is kept (the first one
with `keep_sink`, those of `SinksByLength` always) is seen from everywhere.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import TABLES, Mechanism, Part, Tokens, distances

WINDOW = frozenset({"window"})


@dataclass(frozen=True)
class DistanceBias(Mechanism):
    """s_ij += -m_h distance, m_h = 2^(-8 (h + 1) / H) (Press et al., "Train short, test long" (ALiBi), 2022).

    Args:
        trainable: the slopes m are parameters that start there; else they stay.
    """

    trainable: bool = False

    @property
    def name(self) -> str:
        return "distance-bias-trained" if self.trainable else "distance-bias"

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"slope of the distance"})

    def build(self, dim: int, heads: int, head_dim: int) -> "DistanceBiasPart":
        return DistanceBiasPart(heads, self.trainable)


class DistanceBiasPart(Part):
    slopes: Tensor

    def __init__(self, heads: int, trainable: bool) -> None:
        super().__init__()
        slopes = torch.tensor(alibi_slopes(heads))
        if trainable:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        return self.slopes[:, None, None] * -distances(tokens.length, tokens.x.device).abs()


def alibi_slopes(heads: int) -> list[float]:
    """Powers of 2^(-8 / H); where H is no power of 2, every other one of the next power's slopes fills up."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]


@dataclass(frozen=True)
class RelativeBias(Mechanism):
    """s_ij += t_h[bucket(i - j)], a trained table (Raffel et al., "T5", 2020, section 2.1); it starts at 0.

    Half of the buckets are for one distance each, the others widen logarithmically up to `max_distance`; without
    causality keys behind and keys ahead have half of all buckets each.
    """

    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets // 2:
            raise UsageError(
                f"relative bias: buckets {self.buckets} must be a multiple of 4, and max_distance {self.max_distance} "
                "beyond half of them"
            )

    @property
    def name(self) -> str:
        return "relative-bias" if self == RelativeBias() else f"relative-bias-{self.buckets}-{self.max_distance}"

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"relative bias"})

    def build(self, dim: int, heads: int, head_dim: int) -> "RelativeBiasPart":
        return RelativeBiasPart(heads, self)


class RelativeBiasPart(Part):
    """`table` is `[buckets, H]`."""

    def __init__(self, heads: int, rule: RelativeBias) -> None:
        super().__init__()
        self.rule = rule
        self.table = nn.Parameter(torch.zeros(rule.buckets, heads))

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        bucket = _buckets(tokens.length, self.rule.buckets, self.rule.max_distance, tokens.causal, tokens.x.device)
        return self.table[bucket].permute(2, 0, 1)


@functools.lru_cache(maxsize=TABLES)
def _buckets(length: int, buckets: int, max_distance: int, causal: bool, device: torch.device) -> Tensor:
    """`[L, L]` bucket of each query and key."""
    with torch.inference_mode(False):
        behind = distances(length, device)
        distance = behind.clamp(min=0) if causal else behind.abs()
        count = buckets if causal else buckets // 2
        exact = count // 2
        grown = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact) * (count - exact)
        bucket = torch.where(distance < exact, distance, (exact + grown.long()).clamp(max=count - 1))
        return bucket if causal else bucket + count * (behind < 0)


@dataclass(frozen=True)
class WindowDecay(Mechanism):
    """s_ij += log(1 - distance / window) inside the window, nothing is seen outside; kept tokens do not decay."""

    window: int
    keep_sink: bool = False

    def __post_init__(self) -> None:
        check_window("window decay", self.window)

    @property
    def name(self) -> str:
        return f"window-decay-{self.window}" + "-sink" * self.keep_sink

    @property
    def claims(self) -> frozenset[str]:
        return WINDOW

    def build(self, dim: int, heads: int, head_dim: int) -> "WindowDecayPart":
        return WindowDecayPart(self.window, self.keep_sink)


class WindowPart(Part):
    """The newest `window` tokens, the query's own among them; without causality as many ahead."""

    def __init__(self, window: int, keep_sink: bool) -> None:
        super().__init__()
        self.window, self.keep_sink = window, keep_sink

    def inside(self, tokens: Tokens) -> Tensor:
        return near(tokens, self.window)

    def kept(self, tokens: Tokens) -> Tensor | None:
        return tokens.leading(1) if self.keep_sink else None


class WindowDecayPart(WindowPart):
    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        distance = distances(tokens.length, tokens.x.device).abs().clamp(max=self.window - 1)
        decay = torch.log1p(distance.to(tokens.x.dtype) / -self.window)
        return decay if tokens.kept is None else decay.masked_fill(tokens.kept, 0)


@dataclass(frozen=True)
class SegmentWindow(Mechanism):
    """Marked tokens (`Inputs.marked`) see every token and every token sees them; all else sees the newest `window`.

    The global tokens of Beltagy et al., "Longformer", 2020; causal where attention is.
    """

    window: int
    keep_sink: bool = True

    def __post_init__(self) -> None:
        check_window("segment window", self.window)

    @property
    def name(self) -> str:
        return f"segment-window-{self.window}" + "-sink" * self.keep_sink

    @property
    def claims(self) -> frozenset[str]:
        return WINDOW

    def build(self, dim: int, heads: int, head_dim: int) -> "SegmentWindowPart":
        return SegmentWindowPart(self.window, self.keep_sink)


class SegmentWindowPart(WindowPart):
    def inside(self, tokens: Tokens) -> Tensor:
        marked = tokens.marked
        if marked is None:
            raise UsageError("segment window: nothing says which tokens are marked; give Inputs(marked=...)")
        return near(tokens, self.window) | marked[:, None, :, None] | marked[:, None, None, :]


def near(tokens: Tokens, window: int) -> Tensor:
    """`[L, L]`: pairs less than `window` apart."""
    return distances(tokens.length, tokens.x.device).abs() < window


def check_window(name: str, window: int) -> None:
    if window < 1:
        raise UsageError(f"{name}: window {window} must be at least 1 token")
