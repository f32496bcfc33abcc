"""Weights of a mixture's experts in 8 bits. They stay where transformers keeps them and are read as before.

transformers' experts modules index a 3-D parameter by expert. What stands in its place here gives the expert's weight
in the inputs' type, rebuilt from its codes: weights take half the memory, the products are those of the original.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantsink.errors import CheckpointError, QuantSinkError
from quantsink.kernels import quantize_per_channel
from quantsink.layers.replacement import ReadModel, Replacement, Site, register
from quantsink.plan import Outline, Plan


@register
class ExpertWeights(Replacement):
    """`[E, N, K]` weights of E experts; `weights[e]` is one of them.

    Tensors: `weight` int8 `[E, N, K]`, `weight_scale` float32 `[E, N]`, one per expert and output channel.
    """

    FLOAT32 = ("weight_scale",)
    # Read one by one: transformers' batched forms want all weights in one tensor.
    CONFIG: ClassVar[Mapping[str, Any]] = {"_experts_implementation": "eager"}

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
    def planned(cls, plan: Plan, read: ReadModel) -> dict[str, bool]:
        """By place, whether the weights are transposed."""
        unknown = set(plan.experts) - {experts.name for experts in read.architecture.experts}
        if unknown:
            raise QuantSinkError(f"{min(unknown)}: in the plan but no experts of the model; calibrate this model again")
        return _places(plan.experts, read)

    @classmethod
    def stored(cls, outline: Outline, read: ReadModel) -> dict[str, bool]:
        known = {experts.name for experts in read.architecture.experts}
        for name in outline.experts:
            if name not in known:
                raise CheckpointError(
                    f"config.json: {name} is no module of experts in the model it describes; export again"
                )
        return _places(outline.experts, read)

    @classmethod
    def empty(cls, site: Site, transposed: bool) -> "ExpertWeights":
        count, outputs, inputs = site.original.shape
        if transposed:
            outputs, inputs = inputs, outputs
        with site.device:
            return cls((count, outputs, inputs), transposed, site.original.dtype)

    @classmethod
    def of(cls, site: Site, transposed: bool) -> "ExpertWeights":
        """Symmetric INT8 per expert and output channel."""
        new = cls.empty(site, transposed)
        for expert, weight in enumerate(site.original.detach()):
            new.weight[expert], new.weight_scale[expert] = quantize_per_channel(weight.T if transposed else weight)
        return new

    def check(self, name: str, tensor: Tensor) -> bool:
        if name == "weight_scale":
            return bool(((tensor > 0) & tensor.isfinite()).all())
        return super().check(name, tensor)

    def __getitem__(self, expert: Any) -> Tensor:
        """`[N, K]`, or `[K, N]` where the parameter was transposed."""
        weight = (self.weight[expert].float() * self.weight_scale[expert][..., None]).to(self.like.dtype)
        return weight.mT if self.transposed else weight


def _places(names: tuple[str, ...], read: ReadModel) -> dict[str, bool]:
    return {
        f"{experts.name}.{weight}": experts.transposed
        for experts in read.architecture.experts
        if experts.name in names
        for weight in experts.weights
    }


__all__ = ["ExpertWeights"]
