"""One call of `quantsink::sink_attention`, as every implementation takes it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantsink.kernels.attention import check_limits

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor routes, Tensor key_mean, Tensor? sink_start,"
    " Tensor? clip_row, Tensor? clip_absolute, Tensor? s_aux, float scaling, int sink_size, bool causal,"
    " str weight_scale, int block, float softcap) -> Tensor"
)
WEIGHT_SCALES = ("block", "row", "fixed")
DEFAULTS: dict[str, Any] = {
    "mask": None,
    "sink_start": None,
    "clip_row": None,
    "clip_absolute": None,
    "s_aux": None,
    "sink_size": 1,
    "causal": True,
    "weight_scale": "block",
    "block": 64,
    "softcap": 0.0,
}


class Call(NamedTuple):
    """The operator's arguments in the order of `SCHEMA`; `sink_attention` says what they mean."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    routes: Tensor
    key_mean: Tensor
    sink_start: Tensor | None
    clip_row: Tensor | None
    clip_absolute: Tensor | None
    s_aux: Tensor | None
    scaling: float
    sink_size: int
    causal: bool
    weight_scale: str
    block: int
    softcap: float

    @classmethod
    def of(cls, **arguments: Any) -> "Call":
        """From the arguments by name; those left out have the public function's defaults."""
        return cls(**{**DEFAULTS, **arguments})

    def check(self) -> None:
        """Refuse shapes and options that do not fit together."""
        for name, tensor in (("query", self.query), ("key", self.key), ("value", self.value)):
            if tensor.dim() != 4:
                raise ValueError(f"sink_attention: {name} must be [B, heads, L, D], not {list(tensor.shape)}")
        batch, heads, queries, head_dim = self.query.shape
        kv_heads, keys = self.key.shape[1:3]
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"sink_attention: {heads} query heads cannot share {kv_heads} KV heads evenly")
        if keys == 0:
            raise ValueError("sink_attention: there are no keys")
        _expect("key", self.key, (batch, kv_heads, keys, head_dim))
        _expect("value", self.value, (batch, kv_heads, keys, self.value.shape[3]))
        _expect("routes", self.routes, (heads,))
        _expect("key_mean", self.key_mean, (kv_heads, head_dim))
        if self.sink_start is not None:
            _expect("sink_start", self.sink_start, (batch,))
        if self.mask is not None:
            if self.mask.dtype != torch.bool:
                raise ValueError(f"sink_attention: the mask must be boolean (true = visible), not {self.mask.dtype}")
            _expect("mask", self.mask, (1 if self.mask.shape[0] == 1 else batch, 1, queries, keys))
        check_limits("sink_attention", self)
        if self.weight_scale not in WEIGHT_SCALES:
            raise ValueError(
                f"sink_attention: weight_scale {self.weight_scale!r} is not one of {', '.join(WEIGHT_SCALES)}"
            )
        if self.block < 1 or self.sink_size < 0:
            raise ValueError(
                f"sink_attention: block {self.block} must be at least 1 and sink_size {self.sink_size} not negative"
            )


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"sink_attention: {name} must be {list(shape)}, not {list(tensor.shape)}")
