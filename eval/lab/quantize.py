"""Any normalizer's attention in 8 bits: the arithmetic of `quantsink::sink_attention` with the softmax left open.

    scores  = (codes(q) . codes(k - mean)) * their scales + q . mean      q and k per token, the mean over all but sinks
    p       = normalizer(scores)
    output  = p_S V_S  +  sum over blocks of round(127 p_R / unit) / 127 * unit * codes(V_R)

S are the keys kept exact, scores and values of them in native precision: none, or the sinks, or as many others. With
softmax this is the operator's reference, number for number (a test holds it to that); docs/design.md, "Sink-split
attention".
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import ALL_REAL, Inputs, LabAttention, Parts, computing
from quantsink.eval.lab.normalizers import Normalizer
from quantsink.kernels.int8_linear import QMAX, quantize_per_token

FIXED, ROW, BLOCK = "fixed", "row", "block"
"""`unit`: 1, a row's largest weight, a row's largest weight in each block of keys."""
PARTS = ("scores", "weights", "values")


@dataclass(frozen=True)
class Bits:
    """One way to spend 8 bits.

    unit: what 127 stands for among the weights. exact: keys kept out of it; learnable sinks come first, then tokens.
    parts: what is put into 8 bits; leave some out to see where an error comes from.
    """

    unit: str = BLOCK
    block: int = 64
    exact: tuple[int, ...] = ()
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        if self.unit not in (FIXED, ROW, BLOCK):
            raise UsageError(f"weights in 8 bits: unit {self.unit!r} is not one of {FIXED}, {ROW}, {BLOCK}")
        if not set(self.parts) <= set(PARTS):
            raise UsageError(f"in 8 bits: {self.parts} are not among {', '.join(PARTS)}")


def exact_attention(parts: Parts, normalizer: Normalizer) -> Tensor:
    """Head outputs `[B, H, L, D]` in float64."""
    p = normalizer(_scores(parts, parts.query.double() @ parts.key.double().transpose(-1, -2)), parts.visible)
    return p @ parts.value.double()


def quantized_attention(parts: Parts, normalizer: Normalizer, bits: Bits) -> Tensor:
    """Head outputs `[B, H, L, D]` with everything but `bits.exact` in 8 bits; sums in float64.

    Weights above 127 units, which only a fixed unit meets (ReLU's are not bounded), are cut off. The key mean is the
    batch's own, as calibration would have it.
    """
    q, k, v = parts.query.double(), parts.key.double(), parts.value.double()
    keys = k.shape[2]
    exact = torch.zeros(keys, dtype=torch.bool)
    exact[list(bits.exact)] = True
    block = min(bits.block, keys) if bits.unit == BLOCK else keys

    mean = k[:, :, ~exact].mean((0, 2), keepdim=True)
    (q_codes, q_scale), (k_codes, k_scale) = quantize_per_token(q), quantize_per_token(k - mean)
    products = (q_codes.double() @ k_codes.double().transpose(-1, -2)) * q_scale * k_scale.transpose(-1, -2)
    products = products + q @ mean.transpose(-1, -2)
    products = torch.where(exact | ("scores" not in bits.parts), q @ k.transpose(-1, -2), products)
    p = normalizer(_scores(parts, products), parts.visible)

    out = p[..., exact] @ v[:, :, exact]
    rest, v = p.masked_fill(exact, 0), v.masked_fill(exact[:, None], 0)
    beyond = -keys % block
    rest, v = pad(rest, (0, beyond)).unflatten(-1, (-1, block)), pad(v, (0, 0, 0, beyond)).unflatten(2, (-1, block))
    amax = v.abs().amax(3, keepdim=True)
    v_scale = torch.where(amax == 0, 1, amax / QMAX)
    v_codes = v / v_scale
    if "values" in bits.parts:
        v_codes = v_codes.round().clamp(-QMAX, QMAX)
    unit = torch.ones_like(rest[..., :1]) if bits.unit == FIXED else rest.amax(-1, keepdim=True)
    unit = torch.where(unit > 0, unit, 1)
    codes = rest / unit * QMAX
    if "weights" in bits.parts:
        codes = codes.round().clamp(0, QMAX)
    blocks = (codes.transpose(2, 3) @ v_codes) * v_scale
    heads: Tensor = out + (blocks * unit.transpose(2, 3)).sum(2) / QMAX
    return heads


def _scores(parts: Parts, products: Tensor) -> Tensor:
    scores = products * parts.scaling
    return scores if parts.bias is None else scores + parts.bias.double()


def in_8_bits(model: nn.Module, bits: Bits | None) -> AbstractContextManager[None]:
    """All of a laboratory model's attention so, the sums in float64; without bits, exact in float64."""

    def forward(
        module: LabAttention, x: Tensor, inputs: Inputs = ALL_REAL, record: list[Tensor] | None = None
    ) -> Tensor:
        parts, normalizer = module.parts(x, inputs), module.spec.normalizer
        heads = exact_attention(parts, normalizer) if bits is None else quantized_attention(parts, normalizer, bits)
        return module.finish(heads.to(x.dtype), x, inputs)

    return computing(model, forward)
