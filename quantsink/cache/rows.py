"""The state of one sequence of a `SinkCache`'s batch."""

from typing import NamedTuple

from quantsink.kernels.coded_attention.codes import BLOCK


class Row(NamedTuple):
    """One sequence in one layer. A row is never changed, only replaced, so copies of a beam may share it.

    With padding on the left a row starts at its own first real token, so its blocks are those that it has alone.
    """

    start: int
    """Column of its first real token."""
    blocks: int
    """Blocks of 64 tokens that became codes, forgotten ones included."""
    counts: tuple[int, ...]
    """Blocks that each bank still holds of it."""
    dropped: int = 0
    """Tokens that a rolling cache has forgotten; its sink keys are turned by as many positions."""

    def length(self, total: int) -> int:
        """Its real tokens where the batch has seen `total` columns."""
        return total - self.start

    def newest(self, total: int, sink_size: int) -> int:
        """Its exact tokens at the end. Until it has a block its sink tokens are among them."""
        return total - self.start - (sink_size + self.blocks * BLOCK if self.blocks else 0)

    @property
    def forgotten(self) -> int:
        """Tokens of the blocks that no bank holds any more."""
        return (self.blocks - max(self.counts)) * BLOCK


__all__ = ["Row"]
