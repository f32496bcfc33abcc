"""`quantsink::sink_attention` on CUDA: the Triton kernels where they apply, the reference elsewhere.

Importing this registers the operator for CUDA; Triton itself is imported with the first call there.
"""

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from quantsink.kernels.sink_attention.reference import Rule, reference


@functools.cache
def library() -> ModuleType | None:
    """The launching module, or None with one warning: the reference then computes the same, many times slower."""
    try:
        from quantsink.kernels.sink_attention import triton_launch
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "Triton cannot be imported (%s): CUDA attention runs the slower PyTorch reference. PyTorch's CUDA wheels "
            "bring Triton; otherwise pip install triton",
            error,
        )
        return None
    return triton_launch


@torch.library.impl("quantsink::sink_attention", "CUDA")
def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    key_mean: Tensor,
    sink_start: Tensor | None,
    clip_row: Tensor | None,
    clip_absolute: Tensor | None,
    s_aux: Tensor | None,
    *,
    scaling: float,
    sink_size: int,
    causal: bool,
    weight_scale: str,
    block: int,
    softcap: float,
) -> Tensor:
    rule = Rule(scaling, sink_size, causal, weight_scale, block, softcap, clip_row, clip_absolute, s_aux)
    # Autocast would round integer sums to 16 bits.
    with torch.autocast("cuda", enabled=False):
        return attend(query, key, value, mask, routes, key_mean, sink_start, rule)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    routes: Tensor,
    key_mean: Tensor,
    sink_start: Tensor | None,
    rule: Rule,
) -> Tensor:
    """As `reference`, whose arguments these are."""
    kernels = library()
    if kernels is None or not kernels.serves(query, key, value, rule):
        return reference(query, key, value, mask, routes, key_mean, sink_start, rule)
    with torch.cuda.device_of(query):
        result: Tensor = kernels.attention(query, key, value, mask, routes, key_mean, sink_start, rule)
    return result
