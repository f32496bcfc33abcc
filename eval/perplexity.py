"""From a text spec to evaluation windows in which every text token is scored exactly once.

A window is one input of the model; from `first_scored` on it holds tokens that no earlier window has scored. With a
stride below the window's length the windows overlap, and the overlap is only context. With `context`, so are the first
tokens of every window: the error of a KV cache shows only after its prefill.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantsink.calibration.text import documents, parse_spec
from quantsink.calibration.text import windows as tokenized
from quantsink.errors import DataError, UsageError

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, eq=False)
class EvalWindow:
    """`ids` `[L]` int64. Tokens `first_scored` to `L - 1` are scored, each predicted from all before it."""

    ids: Tensor
    first_scored: int

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first_scored


@dataclass(frozen=True, eq=False)
class EvalText:
    """Evaluation windows of one text, with the counts of what was read.

    scored: tokens that are scored. tokens: sum of the windows' lengths, BOS and overlaps included.
    bos: token id that starts each window, or None. removed_bos: BOS ids of the text itself that were removed.
    context: tokens at the start of each window that are never scored, BOS included.
    complete: False where `max_windows` left text unread.
    fingerprint: sha256 over ids, length, stride, BOS and which tokens are scored.
    """

    windows: tuple[EvalWindow, ...]
    scored: int
    tokens: int
    bos: int | None
    fingerprint: str
    complete: bool
    name: str
    spec: str
    length: int
    stride: int
    removed_bos: int = 0
    context: int = 0


def cut(
    ids: Tensor, *, length: int, stride: int | None = None, bos: int | None = None, context: int = 0
) -> list[EvalWindow]:
    """Cut one document's ids `[T]` (without BOS) into windows of `length` tokens, BOS included where there is one.

    A window starts `stride` text tokens after the one before. The default, length - 1, is the largest stride with which
    every token still has a token before it. Each text token is scored once. Without a BOS the document's first token is
    not scored, for nothing predicts it. Nor are the first `context` tokens of each window, unless an earlier window
    scored them; a window with no other tokens is left out.

    Raises:
        UsageError: length < 2, a stride that leaves tokens unscored, or a context that leaves none to score.
    """
    stride = _check_layout(length, stride, context)
    prefix = [] if bos is None else [bos]
    size = length - len(prefix)
    done = 0 if prefix else 1
    windows = []
    for start in range(0, len(ids), stride):
        end = min(start + size, len(ids))
        if end <= done:
            break
        window = torch.cat([torch.tensor(prefix, dtype=torch.int64), ids[start:end].long()])
        first = max(done - start + len(prefix), context)
        if first >= len(window):  # the remainder of the document is context only
            break
        windows.append(EvalWindow(window, first))
        done = end
    return windows


def read(
    tokenizer: Any,
    spec: str,
    *,
    length: int = 1024,
    stride: int | None = None,
    max_windows: int | None = None,
    bos: bool = True,
    context: int = 0,
) -> EvalText:
    """Read a text spec (docs/cli.md) into windows. No window spans two documents; reading stops as soon as it can.

    Raises:
        UsageError: an invalid layout or spec; `self`, which would measure a model on its own output.
        DataError: text that cannot be read, or gives no token to score.
    """
    source = parse_spec(spec)
    if source.format == "self":
        raise UsageError("--data self: a model's loss on its own output says little; name a text")
    step = _check_layout(length, stride, context)
    if max_windows is not None and max_windows < 1:
        raise UsageError(f"--max-windows {max_windows}: 1 or more")
    start_token = tokenizer.bos_token_id if bos else None
    windows: list[EvalWindow] = []
    removed, complete = 0, True
    for text in documents(source):
        missing = _NO_LIMIT if max_windows is None else max_windows - len(windows)
        ids, dropped = _ids(tokenizer, text, min(missing * step + length + 1, _NO_LIMIT))
        removed += dropped
        for window in cut(ids, length=length, stride=step, bos=start_token, context=context):
            if len(windows) == max_windows:
                complete = False
                break
            windows.append(window)
        if not complete:
            break
    if not windows:
        raise DataError(f"data {spec!r} gives no token to score; name a source with text in it")
    return EvalText(
        windows=tuple(windows),
        scored=sum(window.scored for window in windows),
        tokens=sum(len(window.ids) for window in windows),
        bos=start_token,
        fingerprint=_fingerprint(windows, length, step, start_token),
        complete=complete,
        name=source.name,
        spec=spec,
        length=length,
        stride=step,
        removed_bos=removed,
        context=context,
    )


def _check_layout(length: int, stride: int | None, context: int) -> int:
    if length < 2:
        raise UsageError(f"--length {length}: a window needs at least 2 tokens")
    if not 0 <= context < length:
        raise UsageError(
            f"--length {length}: the first {context} tokens of a window are context only; give more tokens"
        )
    step = length - 1 if stride is None else stride
    if not 1 <= step <= length - 1:
        raise UsageError(f"--stride {step}: from 1 to {length - 1}, so that every token is scored with one before it")
    return step


def _ids(tokenizer: Any, text: str, limit: int) -> tuple[Tensor, int]:
    """At most `limit` ids `[T]` of one document, and how many BOS ids were removed from it."""
    limit = max(limit, 2)
    try:
        window = tokenized(tokenizer, [text], seq_len=limit, max_tokens=limit, bos=False)
    except DataError:  # a document without tokens
        return torch.zeros(0, dtype=torch.int64), 0
    return window.ids[0], window.removed_bos


def _fingerprint(windows: Sequence[EvalWindow], length: int, stride: int, bos: int | None) -> str:
    digest = hashlib.sha256(f"{length} {stride} {bos}".encode())
    for window in windows:
        digest.update(f" {len(window.ids)} {window.first_scored} ".encode())
        digest.update(window.ids.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
