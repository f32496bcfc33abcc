"""One attention in which every sink mechanism composes with every normalizer.

    scores  = scaling q k^T + the mechanisms' biases         learnable sink keys stand before the tokens' keys
    weights = normalizer(scores, visible)                    visible: causal, no padding, the mechanisms' windows
    output  = W_o mechanisms(weights v)                      a gate works on the heads' outputs

A mechanism is data, a frozen dataclass (`quantsink.eval.lab.mechanisms`); what it builds is a `Part`, the module that
holds its parameters. The attention asks each part at each of these places, and most parts answer at one of them only.
"""

import functools
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantsink.errors import UsageError
from quantsink.eval.lab.normalizers import Normalizer, Softmax, Softmax1

ROTARY_BASE = 10_000.0
TABLES = 8
"""Lengths of which each table is kept; one of `[L, L]` is made once, not in every layer and step."""


@dataclass(frozen=True)
class Inputs:
    """What one forward knows besides x. The real tokens of a row are one unbroken run."""

    real: Tensor | None = None
    """`[B, L]` bool, true = real token, padding on either side; None: all."""
    marked: Tensor | None = None
    """`[B, L]` bool: tokens in marked segments."""


ALL_REAL = Inputs()


class Tokens:
    """What a part may read of one forward: x `[B, L, dim]`, who is real, where the real tokens lie."""

    def __init__(self, x: Tensor, inputs: Inputs, causal: bool) -> None:
        self.x, self.real, self.marked, self.causal = x, inputs.real, inputs.marked, causal
        self.length = x.shape[1]
        self.kept: Tensor | None = None
        """`[B or 1, 1, 1, L]`: tokens that no window hides, from all parts together; None where there is no window."""

    @functools.cached_property
    def position(self) -> Tensor:
        """`[B or 1, L]`: 0-based, counted from each row's first real token; negative in padding before it."""
        column = _columns(self.length, self.x.device)
        return column if self.real is None else column - self.real.to(torch.uint8).argmax(1, keepdim=True)

    @functools.cached_property
    def visible(self) -> Tensor:
        """`[B or 1, 1, L, L]`: causal where causal, no padding among keys, nothing at all for a query in padding."""
        seen = _allowed(self.length, self.causal, self.x.device)
        return seen if self.real is None else seen & self.real[:, None, None, :] & self.real[:, None, :, None]

    def leading(self, count: int | Tensor) -> Tensor:
        """`[B or 1, 1, 1, L]`: the first `count` real tokens of each row; `count` may be `[B, 1]`."""
        leading = (self.position >= 0) & (self.position < count)
        return (leading if self.real is None else leading & self.real)[:, None, None]


class Part(nn.Module):
    """A mechanism at work in one attention of H heads. What it does not override changes nothing."""

    def inside(self, tokens: Tokens) -> Tensor | None:
        """Its window: which pairs it lets see each other, bool broadcastable to `[B, H, L, L]`."""
        return None

    def kept(self, tokens: Tokens) -> Tensor | None:
        """`[B or 1, 1, 1, L]`: tokens that stay visible under windows, its own and others'."""
        return None

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor | None:
        """Added to the scores of the tokens' keys, broadcastable to `[B, H, L, L]` with its last size L."""
        return None

    def sinks(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Learnable keys and values `[H, S, D]`, and which heads see them, bool `[1, H, 1, 1]` (None: all)."""
        return None

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        """Head outputs `[B, H, L, D]`, changed."""
        return heads


class Mechanism(ABC):
    """One sink mechanism as data; its subclasses are frozen dataclasses."""

    after_weights: ClassVar[bool] = False
    """True: it touches neither scores nor keys nor visibility, so any attention function can stand before it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the reports call it, with those settings that make another mechanism of it."""

    @property
    @abstractmethod
    def claims(self) -> frozenset[str]:
        """What it settles alone, e.g. the output; two mechanisms with a claim in common contradict each other."""

    @abstractmethod
    def build(self, dim: int, heads: int, head_dim: int) -> Part:
        """A fresh part with its own parameters."""


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer is made of, e.g. `AttentionSpec(Softmax1(), (OutputGate(),))`."""

    normalizer: Normalizer = Softmax()  # noqa: RUF009 - a frozen dataclass
    mechanisms: tuple[Mechanism, ...] = ()
    causal: bool = True
    rotary: bool = False
    """Rotary positions on queries and keys of tokens. A learnable sink's key stays as it is: at position 0."""

    @property
    def name(self) -> str:
        return " + ".join([self.normalizer.name, *(mechanism.name for mechanism in self.mechanisms)])

    @property
    def expressible(self) -> bool:
        """Whether transformers' attention interface can compute it: softmax or softmax1, at most a gate behind it."""
        plain = isinstance(self.normalizer, Softmax | Softmax1)
        return plain and all(mechanism.after_weights for mechanism in self.mechanisms)


@dataclass(frozen=True)
class Parts:
    """Everything of one attention before its weights; lets others recompute it in 8 bits."""

    query: Tensor
    """`[B, H, L, D]`."""
    key: Tensor
    """`[B, H, S + L, D]`, S learnable sinks first."""
    value: Tensor
    """`[B, H, S + L, D]`."""
    bias: Tensor | None
    """Broadcastable to `[B, H, L, S + L]`; added to scores after scaling."""
    visible: Tensor
    """Bool, broadcastable to `[B, H, L, S + L]`. A query in padding sees nothing."""
    scaling: float
    sinks: int

    def scores(self) -> Tensor:
        """`[B, H, L, S + L]`, invisible keys included."""
        scores = (self.query @ self.key.transpose(-1, -2)) * self.scaling
        return scores if self.bias is None else scores + self.bias


class LabAttention(nn.Module):
    """Self-attention as a spec says, x `[B, L, dim]` -> `[B, L, dim]`, H heads of size D.

    Args:
        config: a transformers config. Where its attention implementation is one of quantsink's, a spec that
            transformers' attention interface can express goes through it: so quantsink calibrates and quantizes it.

    Raises:
        UsageError: mechanisms that contradict each other.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, spec: AttentionSpec, layer_idx: int = 0, config: Any = None
    ) -> None:
        super().__init__()
        _check(spec, layer_idx, head_dim)
        self.spec, self.layer_idx, self.config = spec, layer_idx, config
        self.num_heads, self.head_dim, self.num_key_value_groups = heads, head_dim, 1
        self.is_causal, self.scaling = spec.causal, float(head_dim**-0.5)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)
        self.mechanisms = nn.ModuleList(mechanism.build(dim, heads, head_dim) for mechanism in spec.mechanisms)

    def forward(self, x: Tensor, inputs: Inputs = ALL_REAL, record: list[Tensor] | None = None) -> Tensor:
        """`record` is given the weights `[B, H, L, S + L]`."""
        parts = self.parts(x, inputs)
        implementation = str(getattr(self.config, "_attn_implementation", None))
        if record is None and self.spec.expressible and implementation.startswith("quantsink"):
            return self.finish(self._interface(implementation, parts, inputs), x, inputs)
        weights = self.spec.normalizer(parts.scores(), parts.visible)
        if record is not None:
            record.append(weights)
        return self.finish(weights @ parts.value, x, inputs)

    def parts(self, x: Tensor, inputs: Inputs = ALL_REAL) -> Parts:
        tokens = Tokens(x, inputs, self.is_causal)
        query, key, value = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.spec.rotary:
            query, key = _rotated(tokens, query, key)
        visible, bias = self._visible(tokens), None
        for part in self._working():
            added = part.bias(tokens, visible)
            if added is not None:
                bias = added if bias is None else bias + added
        count = 0
        for part in self._working():
            sinks = part.sinks()
            if sinks is not None:
                count = sinks[0].shape[1]
                key, value = (
                    torch.cat([sink_states.expand(len(x), -1, -1, -1), states], 2)
                    for sink_states, states in ((sinks[0], key), (sinks[1], value))
                )
                bias = None if bias is None else pad(bias, (count, 0))
                visible = _with_sinks(visible, count, sinks[2], tokens)
        return Parts(query, key, value, bias, visible, self.scaling, count)

    def finish(self, heads: Tensor, x: Tensor, inputs: Inputs = ALL_REAL) -> Tensor:
        """Head outputs `[B, H, L, D]` -> mechanisms on the output -> `[B, L, dim]`; zeros where padding is."""
        for part in self._working():
            heads = part.output(heads, x)
        if inputs.real is not None and self.mechanisms:
            heads = heads.masked_fill(~inputs.real[:, None, :, None], 0)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out

    def _working(self) -> Iterable[Part]:
        return typing.cast(Iterable[Part], self.mechanisms)

    def _visible(self, tokens: Tokens) -> Tensor:
        windows = [inside for part in self._working() if (inside := part.inside(tokens)) is not None]
        if not windows:
            return tokens.visible
        kept = [mask for part in self._working() if (mask := part.kept(tokens)) is not None]
        if kept:
            tokens.kept = functools.reduce(torch.logical_or, kept)
        return tokens.visible & functools.reduce(torch.logical_or, kept, windows[0])

    def _interface(self, implementation: str, parts: Parts, inputs: Inputs) -> Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
        options: dict[str, Any] = {"dropout": 0.0, "scaling": self.scaling}
        if isinstance(self.spec.normalizer, Softmax1):
            options["s_aux"] = parts.query.new_zeros(self.num_heads)
        mask = None if inputs.real is None else parts.visible
        heads: Tensor = attend(self, parts.query, parts.key, parts.value, mask, **options)[0]
        return heads.transpose(1, 2)


@contextmanager
def computing(model: nn.Module, forward: Callable[..., Tensor] | None) -> Iterator[None]:
    """Every `LabAttention` of a model computes `forward(module, x, inputs, record)` meanwhile; None: its own."""
    modules = [module for module in model.modules() if isinstance(module, LabAttention)]
    try:
        if forward is not None:
            for module in modules:
                vars(module)["forward"] = functools.partial(forward, module)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)


def _rotated(tokens: Tokens, *states: Tensor) -> Iterable[Tensor]:
    """Rotary positions (Su et al., "RoFormer", 2021), halves as in Llama: channel i turns with channel i + D / 2."""
    half = states[0].shape[-1] // 2
    cos, sin = _turns(tokens.length, half, states[0].dtype, states[0].device)
    if tokens.real is not None:
        place = tokens.position.clamp(min=0)
        cos, sin = cos[place][:, None], sin[place][:, None]
    for state in states:
        yield turned(state, cos, sin)


def turned(state: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + D / 2 turned by an angle each."""
    a, b = state.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@functools.lru_cache(maxsize=TABLES)
def _turns(length: int, half: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position / base^(i / half), `[L, half]`."""
    with torch.inference_mode(False):
        slower = ROTARY_BASE ** (torch.arange(half, device=device, dtype=torch.float64) / -half)
        angle = _columns(length, device).T * slower
        return angle.cos().to(dtype), angle.sin().to(dtype)


@functools.lru_cache(maxsize=TABLES)
def distances(length: int, device: torch.device) -> Tensor:
    """`[L, L]` query column - key column, negative for keys to come."""
    with torch.inference_mode(False):
        column = _columns(length, device)
        return column.T - column


@functools.lru_cache(maxsize=TABLES)
def _columns(length: int, device: torch.device) -> Tensor:
    """`[1, L]`."""
    with torch.inference_mode(False):
        return torch.arange(length, device=device)[None]


@functools.lru_cache(maxsize=TABLES)
def _allowed(length: int, causal: bool, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        every = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
        return every.tril() if causal else every


def _with_sinks(visible: Tensor, count: int, heads: Tensor | None, tokens: Tokens) -> Tensor:
    """Columns for `count` sinks before those of the tokens; every real query of `heads` sees them."""
    sees_sinks = visible.new_ones(1, 1, 1, 1) if tokens.real is None else tokens.real[:, None, :, None]
    sees_sinks = sees_sinks if heads is None else sees_sinks & heads
    batch, width = torch.broadcast_shapes(sees_sinks.shape[:2], visible.shape[:2])
    shape = (batch, width, tokens.length)
    return torch.cat([sees_sinks.expand(*shape, count), visible.expand(*shape, tokens.length)], -1)


def _check(spec: AttentionSpec, layer: int, head_dim: int) -> None:
    if spec.rotary and head_dim % 2:
        raise UsageError(f"attention layer {layer}: rotary positions need heads of even size, not {head_dim}")
    taken: dict[str, str] = {}
    for mechanism in spec.mechanisms:
        for claim in sorted(mechanism.claims):
            if claim in taken:
                raise UsageError(
                    f"attention layer {layer}: {taken[claim]} and {mechanism.name} are both about the {claim}; "
                    "leave one of them out"
                )
            taken[claim] = mechanism.name


__all__ = [
    "ALL_REAL",
    "AttentionSpec",
    "Inputs",
    "LabAttention",
    "Mechanism",
    "Normalizer",
    "Part",
    "Parts",
    "Tokens",
    "computing",
    "turned",
]
