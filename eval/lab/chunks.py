"""Long sequences in chunks: each keeps the sequence's BOS, and a memory vector passes on what came before."""

import torch
from torch import Tensor, nn

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import ALL_REAL, Inputs


class Chunked(nn.Module):
    """Runs `block` over chunks `[BOS, memory, tokens of the chunk, memory]`, `[B, L, dim]` -> `[B, L, dim]`.

    Read at the front and written at the end, so that a causal block can do both: the tokens see the memory before
    them, the memory behind them sees the tokens, and what the block makes of it is the next chunk's memory (Bulatov et
    al., "Recurrent memory transformer", 2022). The first chunk reads a vector that is learned. BOS is x of the first
    token; it stands at the front of the first chunk too, before the token itself.

    With marked segments (`Inputs.marked`) the memory is marked, so that no window hides it.

    Args:
        block: takes (x, inputs), e.g. a `LabAttention`.
        chunk: tokens in each chunk; the last one may be shorter.
        carry: False cuts the memory: every chunk reads the learned vector.
    """

    def __init__(self, block: nn.Module, dim: int, chunk: int, carry: bool = True) -> None:
        super().__init__()
        if chunk < 1:
            raise UsageError(f"chunks: chunk {chunk} must be at least 1 token")
        self.block, self.chunk, self.carry = block, chunk, carry
        self.memory = nn.Parameter(0.02 * torch.randn(dim))

    def forward(self, x: Tensor, inputs: Inputs = ALL_REAL) -> Tensor:
        """
        Raises:
            UsageError: padding, which would cut the rows of a batch at different tokens.
        """
        if inputs.real is not None and not bool(inputs.real.all()):
            raise UsageError("chunks: padding is not supported; give rows of one length, or one row at a time")
        bos, start = x[:, :1], self.memory.expand(len(x), 1, -1)
        memory, outputs = start, []
        for first in range(0, x.shape[1], self.chunk):
            tokens = x[:, first : first + self.chunk]
            output = self.block(torch.cat([bos, memory, tokens, memory], 1), self._inputs(inputs.marked, first))
            outputs.append(output[:, 2:-1])
            memory = output[:, -1:] if self.carry else start
        return torch.cat(outputs, 1)

    def _inputs(self, marked: Tensor | None, first: int) -> Inputs:
        if marked is None:
            return ALL_REAL
        memory = marked.new_ones(len(marked), 1)
        return Inputs(marked=torch.cat([marked[:, :1], memory, marked[:, first : first + self.chunk], memory], 1))


__all__ = ["Chunked"]
