"""Sink mechanisms: who is a sink, how much weight it draws, and the gate that does without one.

Each composes with every normalizer. Formulas are for head h, query i and key j, counted from a row's first real token;
"the first token" is that one, wherever padding puts it. Windows and biases by distance: `quantsink.eval.lab.windows`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import Mechanism, Part, Tokens

START = -0.3
"""Trainable sink biases start here: a sink must earn its weight."""
SINK_BIAS = frozenset({"sink bias"})
LEARNABLE_SINKS = frozenset({"learnable sinks"})


@dataclass(frozen=True)
class SinkBias(Mechanism):
    """s_i0 += b_h: a trainable bias per head on the score of the first token."""

    start: float = START

    @property
    def name(self) -> str:
        return "sink-bias"

    @property
    def claims(self) -> frozenset[str]:
        return SINK_BIAS

    def build(self, dim: int, heads: int, head_dim: int) -> "SinkBiasPart":
        return SinkBiasPart(heads, self.start)


class SinkBiasPart(Part):
    """`by_head` is `[H]`."""

    def __init__(self, heads: int, start: float) -> None:
        super().__init__()
        self.by_head = nn.Parameter(torch.full((heads,), start))

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        return self.by_head[:, None, None] * tokens.leading(1)


@dataclass(frozen=True)
class LearnableSinks(Mechanism):
    """Sink keys and values per head before the tokens, N(0, std²) at the start, visible to every real query.

    Args:
        clip: `clip_gradients` limits the gradient norm of a layer's sink keys and values together to this.
    """

    count: int = 1
    std: float = 0.02
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.std < 0 or self.clip <= 0:
            raise UsageError(
                f"learnable sinks: count {self.count} must be at least 1, std {self.std} not negative, "
                f"clip {self.clip} positive"
            )

    @property
    def name(self) -> str:
        return "learnable-sinks" if self.count == 1 else f"learnable-sinks-{self.count}"

    @property
    def claims(self) -> frozenset[str]:
        return LEARNABLE_SINKS

    def build(self, dim: int, heads: int, head_dim: int) -> "LearnableSinksPart":
        return LearnableSinksPart(heads, head_dim, self)


class LearnableSinksPart(Part):
    """`key` and `value` are `[H * S, D]`: parameters of three dimensions are taken for experts by quantsink."""

    def __init__(self, heads: int, head_dim: int, rule: LearnableSinks) -> None:
        super().__init__()
        self.count, self.clip = rule.count, rule.clip
        self.key, self.value = (nn.Parameter(rule.std * torch.randn(heads * rule.count, head_dim)) for _ in range(2))

    def sinks(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.key.unflatten(0, (-1, self.count)), self.value.unflatten(0, (-1, self.count)), None


def clip_gradients(module: nn.Module) -> None:
    """Limit the gradient of each layer's learnable sinks to their own norm; every other gradient stays as it is."""
    for part in module.modules():
        if isinstance(part, LearnableSinksPart):
            nn.utils.clip_grad_norm_([part.key, part.value], part.clip)


@dataclass(frozen=True)
class SinksByLength(Mechanism):
    """s_ij += b_h for j < sink_count(n), n the real tokens of the row: longer texts have more sinks.

    They stay visible under every window. n is the length of the whole row, so a causal row's outputs depend on how
    many tokens will follow (never on which): among lengths of one count, up to 1,023 for instance, not even on that.
    """

    start: float = START

    @property
    def name(self) -> str:
        return "sinks-by-length"

    @property
    def claims(self) -> frozenset[str]:
        return SINK_BIAS

    def build(self, dim: int, heads: int, head_dim: int) -> "SinksByLengthPart":
        return SinksByLengthPart(heads, self.start)


class SinksByLengthPart(SinkBiasPart):
    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        return self.by_head[:, None, None] * self.kept(tokens)

    def kept(self, tokens: Tokens) -> Tensor:
        if tokens.real is None:
            return tokens.leading(sink_count(tokens.length))
        real = tokens.real.sum(1, keepdim=True)
        most = sink_count(tokens.length)
        grown = [real >= 512 * 2**step for step in range(1, most - LEAST_SINKS + 1)]
        return tokens.leading(sum(grown, torch.full_like(real, LEAST_SINKS)))


LEAST_SINKS = 4


def sink_count(length: int) -> int:
    """4 + floor(log2(length / 512)) from 512 tokens on, 4 below."""
    return LEAST_SINKS + max((length // 512).bit_length() - 1, 0)


@dataclass(frozen=True)
class AlternatingSinks(Mechanism):
    """s_ij += b_h with j = 0 for odd i, and for even i with j the last key that i sees.

    That last key is the query's own where attention is causal, else the row's last real token, or the last inside a
    window. Query 0 of a causal row has one key, which is both.
    """

    start: float = START

    @property
    def name(self) -> str:
        return "alternating-sinks"

    @property
    def claims(self) -> frozenset[str]:
        return SINK_BIAS

    def build(self, dim: int, heads: int, head_dim: int) -> "AlternatingSinksPart":
        return AlternatingSinksPart(heads, self.start)


class AlternatingSinksPart(SinkBiasPart):
    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        odd = (tokens.position % 2 == 1)[:, None, :, None]
        column = torch.arange(tokens.length, device=visible.device)
        last = column == torch.where(visible, column, -1).amax(-1, keepdim=True)
        return self.by_head[:, None, None] * torch.where(odd, tokens.leading(1), last)


@dataclass(frozen=True)
class ContentSink(Mechanism):
    """s_i0 += MLP(m_i)_h, m_i the mean of x over what query i may know, MLP: dim -> hidden -> H with GELU.

    Causal: the mean of tokens 0..i, else of all real tokens. A window does not narrow it.
    """

    hidden: int = 16

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise UsageError(f"content sink: hidden size {self.hidden} must be at least 1")

    @property
    def name(self) -> str:
        return "content-sink"

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"content score of the sink"})

    def build(self, dim: int, heads: int, head_dim: int) -> "ContentSinkPart":
        return ContentSinkPart(dim, self.hidden, heads)


class ContentSinkPart(Part):
    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, heads)

    def bias(self, tokens: Tokens, visible: Tensor) -> Tensor:
        score: Tensor = self.down(gelu(self.up(summary(tokens))))
        return score.transpose(1, 2)[..., None] * tokens.leading(1)


def summary(tokens: Tokens) -> Tensor:
    """Mean of x over real tokens, `[B, L, dim]` up to each query where causal, else `[B, 1, dim]`."""
    x = tokens.x if tokens.real is None else tokens.x.masked_fill(~tokens.real[..., None], 0)
    if tokens.causal:
        return x.cumsum(1) / (tokens.position + 1).clamp(min=1)[..., None]
    if tokens.real is None:
        return x.mean(1, keepdim=True)
    return x.sum(1, keepdim=True) / tokens.real.sum(1).clamp(min=1)[:, None, None]


@dataclass(frozen=True)
class OutputGate(Mechanism):
    """o = g o + (1 - g) baseline, g = sigmoid(W x + b) (Qiu et al., "Gated attention for large language models", 2025).

    b starts at 1 and W small: a new gate passes sigmoid(1) = 73 % and can move either way.

    Args:
        per: one g per head, or one per channel of each head.
        baseline: what a closed gate gives: nothing, or a vector per head that is learned from 0.
    """

    per: Literal["head", "channel"] = "head"
    baseline: Literal["zero", "learned"] = "zero"
    after_weights: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return ("gate" if self.per == "head" else "channel-gate") + ("" if self.baseline == "zero" else "-baseline")

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"output"})

    def build(self, dim: int, heads: int, head_dim: int) -> "OutputGatePart":
        return OutputGatePart(dim, heads, head_dim, self)


class OutputGatePart(Part):
    def __init__(self, dim: int, heads: int, head_dim: int, rule: OutputGate) -> None:
        super().__init__()
        self.channels = 1 if rule.per == "head" else head_dim
        self.gate_proj = nn.Linear(dim, heads * self.channels, bias=False)
        nn.init.normal_(self.gate_proj.weight, std=0.02)
        # Not the linear layer's own: transformers' initialization would put that to 0.
        self.gate_bias = nn.Parameter(torch.ones(heads * self.channels))
        self.baseline = nn.Parameter(torch.zeros(heads, head_dim)) if rule.baseline == "learned" else None

    def gate(self, x: Tensor) -> Tensor:
        """g of each head and query, `[B, H, L, 1 or D]`."""
        gate: Tensor = torch.sigmoid(self.gate_proj(x) + self.gate_bias).unflatten(-1, (-1, self.channels))
        return gate.transpose(1, 2)

    def output(self, heads: Tensor, x: Tensor) -> Tensor:
        if self.baseline is None:
            return self.gate(x) * heads
        closed = self.baseline[:, None]
        return closed + self.gate(x) * (heads - closed)
