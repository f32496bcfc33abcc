"""Normalizers: from attention scores to attention weights, exact, differentiable and masked.

A tensor's way: scores `[..., Lq, Lk]` are filled where a key is invisible, widened to float32 if narrower, normalized
along the keys, and cut to zero where invisible again. So no invisible score, be it inf or NaN, reaches a weight or a
gradient, and a row that sees nothing gives zeros. A visible NaN stays NaN: a model that diverges must show it.

Softmax, sparsemax and entmax are one family, the Tsallis α-entmax, with α = 1, 2 and anything between.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantsink.errors import UsageError

_STEPS = 50
"""Newton steps at most, so that none loops forever; 10 were the most that any scores took in float64."""


class Normalizer(ABC):
    """A function from scores to weights; each is a frozen value that its name gives back (`normalizer`)."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What the command line and the reports call it."""

    def __call__(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Weights `[..., Lq, Lk]` in the scores' type; float16 and bfloat16 are computed in float32.

        Args:
            scores: `[..., Lq, Lk]`, finite where visible.
            visible: boolean, broadcastable to the scores; False gives weight 0 and gradient 0, exactly.
        """
        visible = visible.broadcast_to(scores.shape)
        wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        # The lowest number, not -inf: a row that sees nothing would be NaN before it is cut.
        weights = self._weights(torch.where(visible, wide, torch.finfo(wide.dtype).min), visible)
        return torch.where(visible, weights, 0.0).to(scores.dtype)

    @abstractmethod
    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Weights of scores that are the type's lowest number where invisible; what they are there does not matter."""


@dataclass(frozen=True)
class Softmax(Normalizer):
    """p_i = exp(x_i) / Σ_j exp(x_j) (Vaswani et al., "Attention is all you need", 2017)."""

    @property
    def name(self) -> str:
        return "softmax"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.softmax(dim=-1)


@dataclass(frozen=True)
class Softmax1(Normalizer):
    """p_i = exp(x_i) / (1 + Σ_j exp(x_j)) (Miller, "Attention is off by one", 2023).

    A head may leave weight unspent, as with a learned sink logit that is 0.
    """

    @property
    def name(self) -> str:
        return "softmax1"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return pad(scores, (0, 1)).softmax(dim=-1)[..., :-1]


@dataclass(frozen=True)
class ReLU(Normalizer):
    """p_i = max(x_i, 0) / max(n - 1, 1), n the keys that the row sees, so that BOS does not count.

    The division by the length is that of Wortsman et al., "Replacing softmax with ReLU in Vision Transformers", 2023.
    """

    @property
    def name(self) -> str:
        return "relu"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.relu() / (visible.sum(dim=-1, keepdim=True) - 1).clamp(min=1)


@dataclass(frozen=True)
class ClippedSoftmax(Normalizer):
    """p_i = clip((high - low) softmax(x)_i + low, 0, 1) (Bondarenko et al., "Quantizable Transformers", 2023).

    Weights of 0 and 1 are reached by finite scores; where clipped, the gradient is 0.
    """

    low: float = -0.03
    high: float = 1.03

    def __post_init__(self) -> None:
        if not (self.low <= 0 and self.high >= 1):
            raise UsageError(f"clipped-softmax from {self.low} to {self.high}: low is at most 0 and high at least 1")

    @property
    def name(self) -> str:
        return "clipped-softmax"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return ((self.high - self.low) * scores.softmax(dim=-1) + self.low).clamp(0, 1)


@dataclass(frozen=True)
class Sparsemax(Normalizer):
    """p_i = max(x_i - τ, 0), τ such that Σ p = 1: the Euclidean projection of x on the simplex.

    Martins & Astudillo, "From softmax to sparsemax", 2016.
    """

    @property
    def name(self) -> str:
        return "sparsemax"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return _entmax(scores, 2.0)


@dataclass(frozen=True)
class Entmax(Normalizer):
    """p_i = max((α - 1) x_i - τ, 0)^(1 / (α - 1)), τ such that Σ p = 1; 1 ≤ α ≤ 2.

    α = 1 is softmax, the limit of the formula, and α = 2 sparsemax; 1.5 is solved by sorting, all others by Newton
    steps. Peters, Niculae & Martins, "Sparse sequence-to-sequence models", 2019.
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.alpha <= 2:
            raise UsageError(f"entmax-{self.alpha}: alpha goes from 1 (softmax) to 2 (sparsemax)")

    @property
    def name(self) -> str:
        return f"entmax-{str(self.alpha).removesuffix('.0')}"

    def _weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.softmax(dim=-1) if self.alpha == 1 else _entmax(scores, self.alpha)


_NORMALIZERS = {one.name: one for one in (Softmax(), Softmax1(), ReLU(), ClippedSoftmax(), Sparsemax(), Entmax())}
NAMES: tuple[str, ...] = tuple(_NORMALIZERS)


def normalizer(name: str) -> Normalizer:
    """The normalizer of that name, with its default settings; `entmax-1.25` gives another alpha.

    Raises:
        UsageError: no normalizer has that name, or alpha is out of range.
    """
    if name in _NORMALIZERS:
        return _NORMALIZERS[name]
    if re.fullmatch(r"entmax-[0-9]+(\.[0-9]+)?", name):
        return Entmax(float(name.removeprefix("entmax-")))
    raise UsageError(f"normalizer {name!r}: not one of {', '.join(NAMES)}; entmax takes any alpha from 1 to 2")


def _entmax(scores: Tensor, alpha: float) -> Tensor:
    weights: Tensor = _Entmax.apply(scores, alpha)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    """α-entmax, 1 < α ≤ 2. With s_i = p_i^(2-α) on the support: ∂p_i/∂x_j = s_i δ_ij - s_i s_j / Σ s.

    The backward is made of differentiable steps, so it can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float) -> Tensor:
        below = scores - scores.amax(dim=-1, keepdim=True)
        exact = {1.5: _entmax15, 2: _sparsemax}.get(alpha)
        weights = exact(below) if exact else _entmax_newton(below, alpha)
        # τ is right to its last bit, the sum only to as many bits as there are keys.
        weights = weights / weights.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(weights)
        ctx.alpha = alpha
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        support = weights > 0
        slope = torch.where(support, weights, 1.0).pow(2 - ctx.alpha) * support
        share = slope / slope.sum(dim=-1, keepdim=True)
        return slope * (grad - (share * grad).sum(dim=-1, keepdim=True)), None


def _sparsemax(below: Tensor) -> Tensor:
    """Sparsemax of scores whose maximum is 0. τ of the k largest rises up to the support's size, then falls."""
    ordered = below.sort(dim=-1, descending=True).values
    tau = ((ordered.cumsum(dim=-1) - 1) / _ranks(ordered)).amax(dim=-1, keepdim=True)
    return (below - tau).relu()


def _entmax15(below: Tensor) -> Tensor:
    """1.5-entmax of scores whose maximum is 0. The k largest z = x / 2 have τ = mean - √(1/k - variance)."""
    half = below / 2
    # Below -1 there is no weight; the squares of what is invisible would overflow.
    ordered = half.clamp(min=-2).sort(dim=-1, descending=True).values
    ranks = _ranks(ordered)
    mean = ordered.cumsum(dim=-1) / ranks
    variance = ordered.square().cumsum(dim=-1) / ranks - mean.square()
    tau = mean - (1 / ranks - variance).clamp(min=0).sqrt()
    size = (tau < ordered).sum(dim=-1, keepdim=True).clamp(min=1)
    return (half - tau.gather(-1, size - 1)).relu().square()


def _entmax_newton(below: Tensor, alpha: float) -> Tensor:
    """α-entmax of scores whose maximum is 0, 1 < α < 2: p_i = (1 + (α - 1)(x_i - t))^(1 / (α - 1)).

    The α-norm of what is raised is convex in t and at least 1 at t = 0, so Newton steps towards norm 1 only ever rise.
    Written with log1p and expm1 no digit is lost near α = 1, where the first step is t = log Σ exp(x).
    """
    order = alpha - 1
    shift = torch.zeros_like(below[..., :1])
    for _ in range(_STEPS):
        base = ((below - shift) * order).clamp(min=-1)
        slope = (base.log1p() * ((2 - alpha) / order)).exp()
        weights = slope * (1 + base)
        total = weights.sum(dim=-1, keepdim=True)
        step = -total * torch.expm1(-order * total.log()) / (order * slope.sum(dim=-1, keepdim=True))
        if not (step > 4 * torch.finfo(step.dtype).eps).any():
            break
        shift = shift + step.clamp(min=0)
    return weights


def _ranks(ordered: Tensor) -> Tensor:
    return torch.arange(1, ordered.shape[-1] + 1, dtype=ordered.dtype, device=ordered.device)
