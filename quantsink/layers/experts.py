"""Weights of a mixture's experts in 8 bits. They stay where transformers keeps them and are read as before.

transformers' experts modules index a 3-D parameter by expert. What stands in its place here gives the expert's weight
in the inputs' type, rebuilt from its codes: weights take half the memory, the products are those of the original.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.kernels import quantize_per_channel
from quantsink.layers.buffers import keep_float32
from quantsink.models.architecture import Experts


class ExpertWeights(nn.Module):
    """`[E, N, K]` weights of E experts; `weights[e]` is one of them.

    Tensors: `weight` int8 `[E, N, K]`, `weight_scale` float32 `[E, N]`, one per expert and output channel.
    """

    weight: Tensor
    weight_scale: Tensor
    like: Tensor

    def __init__(self, shape: tuple[int, int, int], transposed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.transposed = transposed
        self.register_buffer("weight", torch.empty(shape, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.empty(shape[:2], dtype=torch.float32))
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)  # follows `.to(dtype)`

    @classmethod
    def empty(cls, parameter: Tensor, transposed: bool) -> "ExpertWeights":
        """In place of a parameter, on its device, with tensors that hold nothing yet."""
        count, outputs, inputs = parameter.shape
        if transposed:
            outputs, inputs = inputs, outputs
        with parameter.device:
            return cls((count, outputs, inputs), transposed, parameter.dtype)

    @classmethod
    def of(cls, parameter: Tensor, transposed: bool) -> "ExpertWeights":
        """Symmetric INT8 per expert and output channel."""
        new = cls.empty(parameter, transposed)
        for expert, weight in enumerate(parameter.detach()):
            new.weight[expert], new.weight_scale[expert] = quantize_per_channel(weight.T if transposed else weight)
        return new

    def __getitem__(self, expert: Any) -> Tensor:
        """`[N, K]`, or `[K, N]` where the parameter was transposed."""
        found = (self.weight[expert].float() * self.weight_scale[expert][..., None]).to(self.like.dtype)
        return found.mT if self.transposed else found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return keep_float32(self, fn, ("weight_scale",), super()._apply, recurse)


def put(module: nn.Module, experts: Experts, make: Callable[[Tensor, bool], ExpertWeights]) -> None:
    """Exchange the 3-D parameters of one experts module; `make` is `ExpertWeights.of` or `.empty`."""
    for name in experts.weights:
        parameter = module._parameters.pop(name)
        assert parameter is not None
        module.add_module(name, make(parameter, experts.transposed))


def index_experts(model: Any) -> None:
    """Let the experts be read one by one: transformers' batched forms want all weights in one tensor."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


__all__ = ["ExpertWeights", "index_experts", "put"]
