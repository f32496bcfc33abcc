"""Two kinds of attention in one model: heads side by side in a layer, and layers one after another."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec, Mechanism, Part, Tokens
from quantsink.eval.lab.mechanisms import (
    LEARNABLE_SINKS,
    SINK_BIAS,
    START,
    LearnableSinks,
    LearnableSinksPart,
    SinkBiasPart,
)
from quantsink.eval.lab.windows import WINDOW, check_window, near


@dataclass(frozen=True)
class HybridHeads(Mechanism):
    """The last `sink_heads` heads are for the sink, the others ordinary and without a sink of their own.

    Args:
        kind: what the sink heads have: a trainable bias on the first token (`SinkBias`), one learnable sink key and
            value (`LearnableSinks`), or nothing.
        window: ordinary heads see this many of the newest tokens, sink heads everything: global memory.
    """

    sink_heads: int = 1
    kind: Literal["bias", "learnable"] | None = "bias"
    window: int | None = None
    start: float = START

    def __post_init__(self) -> None:
        if self.window is not None:
            check_window("hybrid heads", self.window)
        elif self.kind is None:
            raise UsageError("hybrid heads: without kind and window all heads are alike; give one of them")

    @property
    def name(self) -> str:
        count = "" if self.sink_heads == 1 else f"-{self.sink_heads}"
        kind = "" if self.kind == "bias" else f"-{self.kind or 'plain'}"
        return f"hybrid-heads{count}{kind}" + ("" if self.window is None else f"-window-{self.window}")

    @property
    def claims(self) -> frozenset[str]:
        window: frozenset[str] = frozenset() if self.window is None else WINDOW
        return window | (frozenset() if self.kind is None else SINK_BIAS if self.kind == "bias" else LEARNABLE_SINKS)

    def build(self, dim: int, heads: int, head_dim: int) -> "HybridHeadsPart":
        if not 1 <= self.sink_heads < heads:
            raise UsageError(f"hybrid heads: {self.sink_heads} sink heads of {heads}; at least 1 of each kind belongs")
        return HybridHeadsPart(heads, head_dim, self)


class HybridHeadsPart(Part):
    """`sink` is the part of the sink heads alone."""

    sink: SinkBiasPart | LearnableSinksPart | None

    def __init__(self, heads: int, head_dim: int, rule: HybridHeads) -> None:
        super().__init__()
        self.ordinary, self.window = heads - rule.sink_heads, rule.window
        self.sink = None
        if rule.kind == "bias":
            self.sink = SinkBiasPart(rule.sink_heads, rule.start)
        elif rule.kind == "learnable":
            self.sink = LearnableSinksPart(rule.sink_heads, head_dim, LearnableSinks())
        self.heads = heads

    def inside(self, tokens: Tokens) -> Tensor | None:
        return None if self.window is None else near(tokens, self.window) | self._sink_heads(tokens.x.device)

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor | None:
        if not isinstance(self.sink, SinkBiasPart):
            return None
        return pad(self.sink.by_head, (self.ordinary, 0))[:, None, None] * tokens.leading(1)

    def sinks(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if not isinstance(self.sink, LearnableSinksPart):
            return None
        key, value = (pad(states, (0, 0, 0, 0, self.ordinary, 0)) for states in self.sink.sinks()[:2])
        return key, value, self._sink_heads(key.device)

    def _sink_heads(self, device: torch.device) -> Tensor:
        """`[1, H, 1, 1]`."""
        return (torch.arange(self.heads, device=device) >= self.ordinary)[None, :, None, None]


def layer_mix(
    layers: int,
    middle: AttentionSpec,
    top: AttentionSpec,
    bottom: AttentionSpec | None = None,
    *,
    top_layers: int | None = None,
    bottom_layers: int | None = None,
) -> tuple[AttentionSpec, ...]:
    """A spec for each layer, e.g. sinks in the middle and gated attention on top.

    Args:
        top_layers: by default a third of all, at least 1.
        bottom_layers: by default as many again where there is a `bottom`, else 0.

    Raises:
        UsageError: top and bottom leave no layer for the middle.
    """
    above = max(layers // 3, 1) if top_layers is None else top_layers
    below = bottom_layers if bottom_layers is not None else 0 if bottom is None else max(layers // 3, 1)
    if min(above, below) < 0 or above + below >= layers or (below and bottom is None):
        raise UsageError(
            f"layer mix: {below} bottom and {above} top layers of {layers}; leave at least 1 for the middle, "
            "and give a bottom for bottom layers"
        )
    first = () if bottom is None else (bottom,) * below
    return first + (middle,) * (layers - above - below) + (top,) * above


__all__ = ["HybridHeads", "layer_mix"]
