"""`quantsink::sink_attention` on CUDA by the Triton kernels. Triton itself is imported with the first call there."""

import functools
import logging
from types import ModuleType

import torch
from torch import Tensor

from quantsink.kernels.sink_attention.call import Call


@functools.cache
def library() -> ModuleType | None:
    """The launching module; None, with one warning, where Triton is missing: the PyTorch reference then runs."""
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


def attend(call: Call) -> Tensor | None:
    """Attention output `[B, H, Lq, Dv]`; None for a call that the reference has to compute."""
    kernels = library()
    if kernels is None or not kernels.serves(call):
        return None
    # Autocast would round integer sums to 16 bits.
    with torch.autocast("cuda", enabled=False), torch.cuda.device_of(call.query):
        result: Tensor = kernels.attention(call)
    return result
