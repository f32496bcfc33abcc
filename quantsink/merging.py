"""Layers that read one tensor, as q, k and v do, and gate and up, are computed when the first of them is called.

transformers calls them one by one. Which belong together shows in the first pass: one after the other they are given
the very same tensor. From the second on the first one computes all, in one pass over the input, and keeps what the
others will ask for until they do. Results are the same to the bit (docs/decisions/0002-int8-product.md).
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from quantsink.kernels import quantized_linear, quantized_linears


class Held(NamedTuple):
    """One tensor that a layer was called with, and outputs that other layers have not asked for yet."""

    x: "weakref.ref[Tensor]"
    version: int
    leader: Any
    outputs: dict[Any, Tensor]


class Merging:
    """One for each model, emptied after each forward pass. Replaced as a whole, never changed, but for outputs that are
    taken: threads that share a model spoil each other's merging, not their results."""

    held: Held | None = None

    def clear(self) -> None:
        self.held = None

    def __getstate__(self) -> None:
        """A copy of the model, or its file, has no pass under way."""

    def take(self, layer: Any, x: Tensor) -> Tensor | None:
        """`[M, N]`: the layer's output where it was computed with another's, for this very `x`."""
        held = self.held
        return held.outputs.pop(layer, None) if held is not None and _same(held, x) else None

    def compute(self, layer: Any, x: Tensor, rows: Tensor, sink: Tensor | None) -> Tensor:
        """`[M, N]`: the layer's output for `x`, of which `rows` `[M, K]` is a view; `sink` as in `quantized_linear`."""
        held = self.held
        if held is not None and _same(held, x):
            _follow(held.leader, layer)
            return quantized_linear(rows, sink, layer.tensors())
        if held is not None and held.outputs:
            held.leader.followers, held.leader.apart = (), True
        followers = layer.followers
        found = quantized_linears(rows, sink, [one.tensors() for one in (layer, *followers)]) if followers else None
        if found is None:
            found, followers = [quantized_linear(rows, sink, layer.tensors())], ()
        self.held = Held(weakref.ref(x), _version(x), layer, dict(zip(followers, found[1:], strict=True)))
        return found[0]


def _version(x: Tensor) -> int:
    """Counts changes in place; PyTorch does not count those of tensors made in inference mode."""
    return 0 if x.is_inference() else x._version


def _same(held: Held, x: Tensor) -> bool:
    return held.x() is x and held.version == _version(x)


def _follow(leader: Any, layer: Any) -> None:
    """From now on the leader computes this layer too."""
    if layer is leader or layer in leader.followers or leader.apart or leader.kind != layer.kind:
        return
    leader.followers = (*leader.followers, layer)
