"""`quantsink::int8_linear`: an INT8 x INT8 product with int32 sums, scaled per row and per output channel.

The plain integer product is PyTorch's own `torch._int_mm` (docs/decisions/0002-int8-product.md says why); what is ours
is the fixed quantization rule and the epilogue.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

QMAX = 127
BLOCK = 2**22
"""Weights quantized at a time: their float32 copies must not outweigh them."""


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 codes and scales of each row.

    Args:
        x: `[..., K]`, any floating type.

    Returns:
        codes `[..., K]` int8 in -127..127 and scales `[..., 1]` in float32 (float64 for float64 input), with
        `x ~ codes * scale`. An all-zero row gets zero codes and scale 1; a row with NaN or inf gets a scale that is not
        finite, so the fault stays visible downstream.
    """
    work = x if x.dtype == torch.float64 else x.float()
    amax = work.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / QMAX)
    codes = (work / scale).round_().clamp_(-QMAX, QMAX).to(torch.int8)
    return codes, scale


def quantize_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 codes `[N, K]` and float32 scales `[N]`, one per output channel, of a linear weight `[N, K]`."""
    weight = weight.detach()
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for rows in (slice(first, first + step) for first in range(0, weight.shape[0], step)):
        part, part_scale = quantize_per_token(weight[rows])
        codes[rows], scale[rows] = part, part_scale.squeeze(-1)
    return codes, scale


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """INT8 codes of `x` `[..., K]` under a scale that was fixed beforehand; what lies outside saturates at +-127.

    A fixed scale cannot carry a NaN: unlike `quantize_per_token`, this hides one.
    """
    return (x.float() / scale).round_().clamp_(-QMAX, QMAX).to(torch.int8)


torch.library.define(
    "quantsink::int8_linear", "(Tensor codes, Tensor weight, Tensor scale, Tensor weight_scale) -> Tensor"
)


@torch.library.impl("quantsink::int8_linear", "CompositeExplicitAutograd")
def _reference(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    product = cuda_product if codes.is_cuda else integer_product
    return product(codes, weight).to(scale.dtype).mul_(scale).mul_(weight_scale)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """`codes @ weight.T` in int32, exact up to K = 133,152."""
    return torch._int_mm(codes, weight.t())


def aligned_product(codes: Tensor, weight: Tensor) -> Tensor:
    """`integer_product` under CUDA's rules, more than 16 rows and multiples of 8 for N and K: zeros fill what lacks."""
    (m, k), n = codes.shape, weight.shape[0]
    codes = pad(codes, (0, -k % 8, 0, max(32 - m, 0)))
    weight = pad(weight, (0, -k % 8, 0, -n % 8))
    return integer_product(codes, weight)[:m, :n]


def cuda_product(codes: Tensor, weight: Tensor) -> Tensor:
    """`integer_product` by bitsandbytes, which fills no rows up, where cuBLASLt takes the sizes: multiples of 4."""
    sizes = (codes.numel(), weight.shape[0], weight.shape[1])
    if not all(sizes) or any(size % 4 for size in sizes[1:]) or not bitsandbytes_there():
        return aligned_product(codes, weight)
    product: Tensor = torch.ops.bitsandbytes.int8_linear_matmul(codes.contiguous(), weight.contiguous())
    return product


@functools.cache
def bitsandbytes_there() -> bool:
    """Whether bitsandbytes' operators are registered; importing it does that."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return False
    return True


@torch.library.register_fake("quantsink::int8_linear")
def _fake(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=scale.dtype)


def int8_linear(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    """`(codes @ weight.T) * scale * weight_scale` with exact int32 sums.

    Args:
        codes: activations `[M, K]` int8.
        weight: `[N, K]` int8.
        scale: activation scales, `[M, 1]` (per token) or `[1, 1]` (static), float32.
        weight_scale: `[N]` float32.

    Returns:
        `[M, N]` in the type of `scale`.

    Raises:
        ValueError: codes that are not int8, or shapes that do not fit together.
    """
    if codes.dtype != torch.int8 or weight.dtype != torch.int8:
        raise ValueError(f"int8_linear: codes and weight must be int8, not {codes.dtype} and {weight.dtype}")
    (m, k), (n, weight_k) = codes.shape, weight.shape
    if k != weight_k or tuple(scale.shape) not in ((m, 1), (1, 1)) or tuple(weight_scale.shape) != (n,):
        raise ValueError(
            f"int8_linear: codes [{m}, {k}] need weight [N, {k}], scale [{m}, 1] or [1, 1] and weight_scale [N]; got "
            f"{list(weight.shape)}, {list(scale.shape)} and {list(weight_scale.shape)}"
        )
    result: Tensor = torch.ops.quantsink.int8_linear(codes, weight, scale, weight_scale)
    return result
