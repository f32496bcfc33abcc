"""What a cache of some length weighs, worked out from its layout: no model is run and no cache filled."""

from collections.abc import Iterable
from dataclasses import dataclass

from quantsink.cache.bank import banks_of
from quantsink.cache.layout import LayerRule
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


def layer_bytes(rule: LayerRule, length: int, itemsize: int) -> LayerBytes:
    """A layer of codes, `length` tokens seen, numbers of `itemsize` bytes where exact. Memory reserved for blocks to
    come (up to 3 % of the codes) is not counted."""
    token = 2 * rule.kv_heads * rule.head_dim * itemsize
    kept = length if rule.max_length is None else min(length, rule.max_length)
    blocks = max((kept - rule.sinks - rule.residual) // BLOCK, 0)
    newest = kept - (rule.sinks + blocks * BLOCK if blocks else 0)
    exact = token * (newest + (rule.sinks if blocks else 0))
    codes = sum(bank.keep(blocks, newest) * len(bank.heads) * bank.record.nbytes for bank in banks_of(rule))
    return LayerBytes(codes, exact, token * length)


def window_bytes(kv_heads: int, head_dim: int, window: int, length: int, itemsize: int) -> LayerBytes:
    """A sliding layer, which keeps the last `window - 1` tokens exact, as transformers does."""
    size = 2 * kv_heads * head_dim * itemsize * min(length, window - 1)
    return LayerBytes(0, size, size)


def total(parts: Iterable[LayerBytes]) -> LayerBytes:
    found = list(parts)
    return LayerBytes(sum(p.codes for p in found), sum(p.exact for p in found), sum(p.full for p in found))


__all__ = ["LayerBytes", "layer_bytes", "total", "window_bytes"]
