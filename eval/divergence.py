"""Loss and divergence of a model from its reference, summed per window.

The reference runs once. A temporary memory-mapped file keeps its log-probabilities (float32, T x V x 4 bytes for T
scored tokens and V vocabulary entries), so that two models are never in memory together. Rows are read a few at a time:
beside the model's logits scoring needs a few tensors of 64 MiB, also with a vocabulary of 262k.

A KV cache is measured as in generation: each window fills a fresh one, `PREFILL` tokens first, then `CHUNK` at a time.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from quantsink.errors import OutputError, QuantSinkError
from quantsink.eval.perplexity import EvalWindow
from quantsink.models.finite import all_finite
from quantsink.models.inputs import cache_argument
from quantsink.progress import Progress

CHUNK_ELEMENTS = 1 << 24
"""Log-probabilities held at once: 64 MiB in float32."""

PREFILL, CHUNK = 128, 32
"""Tokens that a model with a KV cache is fed first, and at a time after that."""

MakeCache = Callable[[], Any]
"""Makes an empty transformers cache."""
SeeCache = Callable[[EvalWindow, Any], None]
"""Called with each window and the cache that it filled."""


@dataclass(frozen=True)
class WindowSums:
    """Sums over the scored tokens of one window: negative log-likelihood and KL(reference || model) in nats, tokens
    whose most likely successor is the reference's, tokens."""

    nll: float
    kl: float
    top1: int
    count: int


class LogProbs:
    """The reference's log-probabilities `[T, V]` float32 on disk, in the order in which they were written.

    The file has no name, or loses it on closing, so nothing is left after a crash.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._rows, self._map = file, 0, np.empty((0, 0), dtype=np.float32)
        self.vocabulary = 0

    def append(self, rows: Tensor) -> None:
        """Rows `[R, V]`. Written, not mapped: a full disk is then an error, not a killed process."""
        self.vocabulary = rows.shape[1]
        try:
            self._file.write(rows.cpu().contiguous().numpy().tobytes())
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"{tempfile.gettempdir()}: no room for the reference's log-probabilities ({error.strerror}); free some "
                "space, set TMPDIR, or measure fewer windows"
            ) from error
        self._rows += len(rows)

    def rows(self, first: int, count: int) -> Tensor:
        if self._map.shape != (self._rows, self.vocabulary):
            shape = (self._rows, self.vocabulary)
            self._map = np.memmap(self._file, dtype=np.float32, mode="r", shape=shape)
        return torch.from_numpy(np.array(self._map[first : first + count]))


@contextlib.contextmanager
def log_probs() -> Iterator[LogProbs]:
    """An empty store; its file is deleted when the block ends."""
    with tempfile.TemporaryFile(prefix="quantsink-") as file:
        yield LogProbs(file)


def score_reference(
    model: Any, windows: Sequence[EvalWindow], store: LogProbs, *, progress: Progress | None = None
) -> tuple[WindowSums, ...]:
    """Score the reference and fill `store`. By definition its divergence is 0 and its top-1 agreement complete.

    Raises:
        QuantSinkError: logits that are not finite.
        OutputError: no room for the temporary file.
    """
    sums = []
    for number, window in enumerate(windows, 1):
        nll = 0.0
        for _, rows, targets in _scored(model, window, "reference"):
            nll += _nll(rows, targets)
            store.append(rows)
        sums.append(WindowSums(nll, 0.0, window.scored, window.scored))
        if progress is not None:
            progress("reference", number, len(windows))
    return tuple(sums)


def score(
    model: Any,
    windows: Sequence[EvalWindow],
    store: LogProbs,
    *,
    name: str,
    progress: Progress | None = None,
    cache: MakeCache | None = None,
    see: SeeCache | None = None,
) -> tuple[WindowSums, ...]:
    """Score a model against the reference's log-probabilities on the same windows.

    Args:
        cache: makes the KV cache that each window is read through; None = one pass without a cache.
        see: called with each window's cache once it is full.

    Raises:
        QuantSinkError: logits that are not finite, or of another vocabulary; the message names the method.
    """
    sums, first_row = [], 0
    for number, window in enumerate(windows, 1):
        nll, kl, top1 = 0.0, 0.0, 0
        filled = None if cache is None else cache()
        for first, rows, targets in _scored(model, window, name, filled):
            if rows.shape[1] != store.vocabulary:
                raise QuantSinkError(f"{name}: {rows.shape[1]} logits per token, the reference has {store.vocabulary}")
            reference = store.rows(first_row + first, len(rows)).to(rows.device)
            nll += _nll(rows, targets)
            kl += float(divergence(reference, rows).sum())
            top1 += int((reference.argmax(-1) == rows.argmax(-1)).sum())
        if see is not None and filled is not None:
            see(window, filled)
        first_row += window.scored
        sums.append(WindowSums(nll, kl, top1, window.scored))
        if progress is not None:
            progress(name, number, len(windows))
    return tuple(sums)


def divergence(reference: Tensor, model: Tensor) -> Tensor:
    """KL(reference || model) in nats of each row, from log-probabilities `[R, V]`; `[R]` float64."""
    return (reference.exp() * (reference - model)).sum(-1, dtype=torch.float64)


def _nll(rows: Tensor, targets: Tensor) -> float:
    return -float(rows.gather(1, targets[:, None]).sum(dtype=torch.float64))


@torch.no_grad()
def _scored(
    model: Any, window: EvalWindow, name: str, cache: Any | None = None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first row, log-probabilities `[R, V]` float32, targets `[R]`) over the scored tokens of one window."""
    device = next(model.parameters()).device
    with evaluating(model):
        logits = _logits(model, window.ids.to(device), cache)
    logits = logits[window.first_scored - 1 : -1]
    targets = window.ids[window.first_scored :].to(device)
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for first in range(0, len(targets), step):
        chunk = logits[first : first + step].float()
        if not all_finite(chunk):
            raise QuantSinkError(
                f"{name}: its logits contain NaN or inf, so nothing can be measured; check the model and its --dtype"
            )
        yield first, chunk.log_softmax(-1), targets[first : first + step]


def _logits(model: Any, ids: Tensor, cache: Any | None) -> Tensor:
    """`[L, V]` of a sequence `[L]`: in one pass, or through a cache part by part."""
    if cache is None:
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
        return logits
    argument = {cache_argument(model): cache}
    parts = [ids[:PREFILL], *ids[PREFILL:].split(CHUNK)] if len(ids) > PREFILL else [ids]
    return torch.cat([model(input_ids=part[None], use_cache=True, **argument).logits[0] for part in parts])


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for the block; afterwards each module has its earlier mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
