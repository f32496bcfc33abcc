"""Layers that read one tensor, as q, k and v do, and gate and up, are computed when the first of them is called.

transformers calls them one by one. Which belong together shows in the first pass: one after the other they are given
the very same tensor. From the second on the first one computes all, in one pass over the input, and keeps what the
others will ask for until they do. Results are the same to the bit (docs/decisions/0002-int8-product.md).
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantsink.kernels import quantized_linear, quantized_linears
from quantsink.kernels.dispatch import direct

MISSES = 3
"""So often a layer's followers may not ask for what was computed for them; then it computes only its own."""


class Peers:
    """What a layer knows of others that read its input."""

    followers: tuple[Any, ...] = ()
    known = False
    """The first pass is over, which shows who follows."""
    misses = 0

    def __getstate__(self) -> None:
        """Nothing: a layer is copied and saved without its neighbours, and finds them again."""


class Held(NamedTuple):
    """The tensor that a layer was called with last, and outputs that other layers have not asked for yet."""

    x: "weakref.ref[Tensor]"
    state: tuple[int, bool]
    leader: Any
    outputs: dict[Any, Tensor]
    copy: Tensor | None
    """Of `x`, while the leader learns who follows: they must be given the same numbers."""


class Merging:
    """One for each model, emptied after each forward pass. Replaced as a whole, never changed, but for outputs that are
    taken: threads that share a model spoil each other's merging, not their results."""

    held: Held | None = None

    def clear(self) -> None:
        """A pass was broken off, or is over: keep nothing. A layer that was learning does so again."""
        held, self.held = self.held, None
        if held is not None and held.copy is not None and not held.leader.peers.followers:
            held.leader.peers.known = False

    def finish(self) -> None:
        """A pass is over: what nobody asked for is not computed again."""
        held, self.held = self.held, None
        if held is not None and held.outputs:
            _miss(held.leader.peers)

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
            _follow(held, layer, x)
            return quantized_linear(rows, sink, layer.tensors())
        self.finish()
        peers: Peers = layer.peers
        # What a hook on one does to the input, the others see only if they are called after it.
        followers = () if any(one._forward_pre_hooks for one in peers.followers) else peers.followers
        found = quantized_linears(rows, sink, [one.tensors() for one in (layer, *followers)]) if followers else None
        if found is None:
            found, followers = [quantized_linear(rows, sink, layer.tensors())], ()
        # Tensors without numbers, as a tracer's, cannot be compared.
        copy = None if peers.known or not direct(x) else x.detach().clone()
        peers.known |= copy is not None
        self.held = Held(weakref.ref(x), _state(x), layer, dict(zip(followers, found[1:], strict=True)), copy)
        return found[0]


def _state(x: Tensor) -> tuple[int, bool]:
    """Differs once `x` was changed in place, or where what is computed now has another kind of history. PyTorch does
    not count changes of tensors made in inference mode: code that makes them between two layers shows in the first
    pass (`_follow`), and what does so only later is not noticed."""
    return 0 if x.is_inference() else x._version, torch.is_inference_mode_enabled()


def _same(held: Held, x: Tensor) -> bool:
    return held.x() is x and held.state == _state(x)


def _follow(held: Held, layer: Any, x: Tensor) -> None:
    """From now on the leader computes this layer too, if it was given the same numbers."""
    leader, peers = held.leader, held.leader.peers
    if layer is leader or layer in peers.followers or held.copy is None or leader.kind != layer.kind:
        return
    if torch.equal(_bits(held.copy), _bits(x)):
        peers.followers = (*peers.followers, layer)
    else:
        _miss(peers, MISSES)


def _bits(x: Tensor) -> Tensor:
    """In which NaN equals itself."""
    return x.detach().contiguous().view(torch.uint8)


def _miss(peers: Peers, times: int = 1) -> None:
    """Forget the followers; after some misses for good."""
    peers.misses += times
    peers.followers, peers.known = (), peers.misses >= MISSES
