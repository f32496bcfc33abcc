"""Loss and divergence of a model from its reference, summed per window.

The reference runs once; its log-probabilities wait in a temporary memory-mapped file (float32, T x V x 4 bytes for T
scored tokens and V vocabulary entries), so no model needs a second one beside it. Rows are taken a few at a time: what
scoring adds to the model's own logits is some 64 MiB tensors, also with 262k entries.

A KV cache is measured as it is used: each window fills a fresh one, `PREFILL` tokens first, then `CHUNK` at a time.
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
from quantsink.models.inputs import cache_argument
from quantsink.progress import Progress

CHUNK_ELEMENTS = 1 << 24
"""Log-probabilities held at once: 64 MiB in float32."""

PREFILL, CHUNK = 128, 32
"""Tokens fed to a model with a KV cache at first, and at a time from then on."""

MakeCache = Callable[[], Any]
"""Gives a fresh transformers cache."""
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

    The file has no name from the start (or loses it on closing), so nothing is left after a crash.
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
    """An empty store whose file is gone when the block ends."""
    with tempfile.TemporaryFile(prefix="quantsink-") as file:
        yield LogProbs(file)


def score_reference(
    model: Any, windows: Sequence[EvalWindow], store: LogProbs, *, progress: Progress | None = None
) -> tuple[WindowSums, ...]:
    """Score the reference and fill `store`. Its divergence is 0 and its agreement complete by definition.

    Raises:
        QuantSinkError: logits that are not finite.
        OutputError: no room for the temporary file.
    """
    found = []
    for number, window in enumerate(windows, 1):
        nll = 0.0
        for _, rows, targets in _scored(model, window, "reference"):
            nll += _nll(rows, targets)
            store.append(rows)
        found.append(WindowSums(nll, 0.0, window.scored, window.scored))
        if progress is not None:
            progress("reference", number, len(windows))
    return tuple(found)


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
    found, base = [], 0
    for number, window in enumerate(windows, 1):
        nll, kl, top1 = 0.0, 0.0, 0
        filled = None if cache is None else cache()
        for first, rows, targets in _scored(model, window, name, filled):
            if rows.shape[1] != store.vocabulary:
                raise QuantSinkError(f"{name}: {rows.shape[1]} logits a token, the reference has {store.vocabulary}")
            wanted = store.rows(base + first, len(rows)).to(rows.device)
            nll += _nll(rows, targets)
            kl += float(divergence(wanted, rows).sum())
            top1 += int((wanted.argmax(-1) == rows.argmax(-1)).sum())
        if see is not None and filled is not None:
            see(window, filled)
        base += window.scored
        found.append(WindowSums(nll, kl, top1, window.scored))
        if progress is not None:
            progress(name, number, len(windows))
    return tuple(found)


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
        if not bool(torch.isfinite(chunk).all()):
            raise QuantSinkError(f"{name}: its logits contain NaN or inf; no figure can be given for it")
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
    """Evaluation mode for the block; each module's own mode comes back afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
