"""The size of a cache of some length, worked out from its layout: no model is run and no cache filled."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantsink.cache.bank import banks_of
from quantsink.cache.layout import LayerPolicy
from quantsink.kernels.coded_attention.codes import BLOCK


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one sequence in one layer: `codes`, `exact` (sinks and the newest tokens, or a sliding window), and
    `full`, those of an unquantized cache."""

    codes: int
    exact: int
    full: int

    @property
    def all(self) -> int:
        return self.codes + self.exact


def layer_bytes(policy: LayerPolicy, length: int) -> LayerBytes:
    """A layer that has seen `length` tokens. Memory reserved for blocks to come (up to 3 % of the codes) is not
    counted. A sliding layer keeps the last `window - 1` tokens exact, as transformers does."""
    token = 2 * policy.kv_heads * policy.head_dim * policy.itemsize
    if policy.kind == "window":
        size = token * min(length, policy.windows[0] - 1)
        return LayerBytes(0, size, size)
    sinks, residual, limit = policy.sink_size, policy.options.residual, policy.options.max_length
    kept = length if limit is None else min(length, limit)
    blocks = max((kept - sinks - residual) // BLOCK, 0)
    newest = kept - (sinks + blocks * BLOCK if blocks else 0)
    exact = token * (newest + (sinks if blocks else 0))
    codes = sum(bank.keep(blocks, newest) * len(bank.heads) * bank.record.nbytes for bank in banks_of(policy))
    return LayerBytes(codes, exact, token * length)


def total(sizes: Iterable[LayerBytes]) -> LayerBytes:
    layers = list(sizes)
    return LayerBytes(*(sum(getattr(size, part) for size in layers) for part in ("codes", "exact", "full")))


__all__ = ["LayerBytes", "layer_bytes", "total"]
