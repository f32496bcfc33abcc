"""What the attention operators share: the routes of heads, and checks of a call."""

from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor


class Route(IntEnum):
    """How one query head is computed."""

    INT8 = 0
    """Standard 8-bit: q and k per token, weights per (row, block), v per (block, channel)."""
    SINK = 1
    """8-bit with the sink tokens split off and kept exact."""
    NATIVE = 2
    """In the checkpoint's own type."""


class Limits(Protocol):
    """What limits the scores of a call; H query heads."""

    @property
    def query(self) -> Tensor:
        """`[B, H, Lq, D]`."""

    @property
    def softcap(self) -> float:
        """Scores become `tanh(s / softcap) * softcap`; 0 = off."""

    @property
    def clip_row(self) -> Tensor | None:
        """`[H]`: a score further than this below its row's maximum gets weight 0."""

    @property
    def clip_absolute(self) -> Tensor | None:
        """`[H]`: scores are clamped to +- this."""

    @property
    def s_aux(self) -> Tensor | None:
        """`[H]`: learned sink logits."""


def check_limits(operator: str, call: Limits) -> None:
    """Refuse limits of another number of heads, and a negative soft-cap."""
    heads = call.query.shape[1]
    for name, tensor in (("clip_row", call.clip_row), ("clip_absolute", call.clip_absolute), ("s_aux", call.s_aux)):
        if tensor is not None and tuple(tensor.shape) != (heads,):
            raise ValueError(f"{operator}: {name} must be {[heads]}, not {list(tensor.shape)}")
    if call.softcap < 0:
        raise ValueError(f"{operator}: softcap {call.softcap} must not be negative")


def check_gradient(operator: str, *tensors: Tensor | None) -> None:
    """Codes have no gradient, and a backward pass that leaves one out would go unnoticed."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(f"{operator}: it has no gradient; call it under torch.no_grad() or on detached tensors")


def finite(x: Tensor) -> Tensor:
    """`x` with 0 for -inf, so that exp(-inf - x) is 0 in a row or block without visible keys."""
    return x.masked_fill(x == -torch.inf, 0)
