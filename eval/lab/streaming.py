"""What a streaming cache must keep: perplexity with all keys, the newest only, or the newest and a few first tokens.

After StreamingLLM (Xiao et al., 2024). Each variant is an attention mask, computed over blocks of query rows and only
the keys that they see, so that its cost grows with L times the budget. Rotary positions are the original ones:
attention sees queries and keys behind the rotation, so keys are not numbered anew inside the cache, as StreamingLLM
does; up to the length that a model was trained for this changes distances to the sinks only.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from quantsink.errors import ArchitectureError, DataError, QuantSinkError, UsageError
from quantsink.eval.lab.profile_weights import (
    QUERY_BLOCK,
    Passes,
    Text,
    attend_all,
    check_seen,
    pass_key,
    read_decoder,
    read_text,
)
from quantsink.models.architecture import Architecture
from quantsink.models.head_layout import AttentionLayer
from quantsink.models.inputs import input_device
from quantsink.models.native_attention import exact_attention
from quantsink.models.observe import Attend, intercepting
from quantsink.models.source import check_length, check_vocabulary
from quantsink.progress import Progress

TOKENS, WINDOW, SINKS = 4096, 256, 4
CONTROL = range(16, 64)
"""Where the control's kept positions are drawn from: early, and no sink."""
LOGITS = 1 << 24
"""Logits held at once: 64 MiB in float32."""
SCORED_LOGITS = 1 << 27
"""Logits computed a variant; a larger vocabulary is scored in fewer, evenly spread rows."""


@dataclass(frozen=True)
class Variant:
    """Which keys a query sees: the `newest` ones, its own among them, and those of `kept` that precede it.

    newest: None means all.
    """

    name: str
    newest: int | None = None
    kept: tuple[int, ...] = ()

    @property
    def budget(self) -> int | None:
        """Keys held at most."""
        return None if self.newest is None else self.newest + len(self.kept)

    def sees(self, rows: Tensor, columns: Tensor) -> Tensor:
        """`[Q, K]` boolean."""
        age = rows[:, None] - columns
        if self.newest is None:
            return age >= 0
        kept = torch.isin(columns, torch.tensor(self.kept, dtype=columns.dtype, device=columns.device))
        return (age >= 0) & ((age < self.newest) | kept)


@dataclass(frozen=True)
class Bucket:
    """Query positions `start` to `end - 1`; the successors of `scored` of them have `nll` nats in all."""

    start: int
    end: int
    scored: int
    nll: float

    @property
    def ppl(self) -> float:
        return math.exp(min(self.nll / self.scored, 700.0)) if self.scored else math.nan


@dataclass(frozen=True)
class StreamCurve:
    """One variant along the text."""

    variant: Variant
    buckets: tuple[Bucket, ...]

    def ppl(self, start: int = 0) -> float:
        """Perplexity of all scored rows in buckets from position `start` on."""
        later = [bucket for bucket in self.buckets if bucket.start >= start]
        return Bucket(start, 0, sum(b.scored for b in later), math.fsum(b.nll for b in later)).ppl


@dataclass(frozen=True)
class Streaming:
    """The experiment on one model and text. `restricted` layers obey the variants, `own` sliding ones see what they
    always do. `budget`: keys of every variant but the full one. `past`: where the first row lies that no variant sees
    whole."""

    model: str
    text: str
    text_fingerprint: str
    bos: int | None
    tokens: int
    window: int
    sinks: int
    budget: int
    seed: int
    scored: int
    restricted: int
    own: int
    curves: tuple[StreamCurve, ...]

    @property
    def past(self) -> int:
        """Start of the first bucket in which every row has lost keys."""
        starts = [bucket.start for bucket in self.curves[0].buckets]
        return next((start for start in starts if start >= self.budget), starts[-1])

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for written, curve in zip(data["curves"], self.curves, strict=True):
            written["ppl"], written["ppl_past"] = curve.ppl(), curve.ppl(self.past)
            for each, bucket in zip(written["buckets"], curve.buckets, strict=True):
                each["ppl"] = bucket.ppl
        return {**data, "past": self.past}


def variants(window: int = WINDOW, sinks: int = SINKS, seed: int = 0) -> tuple[Variant, ...]:
    """Full attention and, at equal budgets of `window + sinks` keys: the newest only, with `sinks` first tokens, with
    one, and the control, which keeps as many seeded positions among 16 to 63 instead."""
    if not 1 <= sinks <= CONTROL.start or window < CONTROL.stop:
        raise UsageError(
            f"window {window}, {sinks} sinks: at least {CONTROL.stop} tokens and 1 to {CONTROL.start} sinks, so that "
            "the control's positions lie behind the sinks"
        )
    order = torch.randperm(len(CONTROL), generator=torch.Generator().manual_seed(seed))[:sinks]
    control = tuple(sorted(CONTROL[i] for i in order.tolist()))
    budget = window + sinks
    each = [
        Variant("full attention"),
        Variant(f"newest {budget}", budget),
        Variant(f"newest {window} + {sinks} first", window, tuple(range(sinks))),
        Variant(f"newest {budget - 1} + 1 first", budget - 1, (0,)),
        Variant(f"newest {window} + {sinks} of {CONTROL.start}-{CONTROL.stop - 1}", window, control),
    ]
    return tuple(v for i, v in enumerate(each) if i != 3 or sinks > 1)


def measure_streaming(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    text: str = "builtin:prose",
    tokens: int | None = None,
    window: int = WINDOW,
    sinks: int = SINKS,
    bucket: int | None = None,
    seed: int = 0,
    passes: Passes | None = None,
    progress: Progress | None = None,
) -> Streaming:
    """Perplexity by position of one text of `tokens` tokens under each variant; `model` stays as it is.

    Args:
        tokens: BOS included; None: 4,096, or as many as the model was made for.
        bucket: positions in a bucket; None: `window`.
        passes: of `measure_profile` on the same model; where this text is among them, full attention does not run anew.

    Raises:
        ArchitectureError: an encoder, or a model of which no layer sees the whole text.
        UsageError, DataError: sizes that mean nothing, text that cannot be read or is too short.
    """
    chosen = variants(window, sinks, seed)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = tokens if tokens is not None else min(TOKENS, limit) if isinstance(limit, int) else TOKENS
    if tokens < 2 * (window + sinks):
        raise UsageError(
            f"streaming over {tokens} tokens: a window of {window} and {sinks} sinks needs {2 * (window + sinks)} or "
            "more; give more tokens or a smaller window"
        )
    check_length(model, tokens, "streaming tokens")
    architecture = read_decoder(model)
    read = read_text(tokenizer, text, tokens + 1)
    ids = stream_ids(read, tokens)
    rows = scored_rows(tokens, _vocabulary(model))
    restricted = [layer for layer in architecture.attentions if _restricted(layer, tokens)]
    curves = []
    for variant in chosen:
        nll = stream_losses(model, architecture, ids, variant, rows, passes)
        curves.append(StreamCurve(variant, to_buckets(nll, rows, tokens, bucket or window)))
        if progress is not None:
            progress(f"streaming, {variant.name}", len(curves), len(chosen))
    return Streaming(
        model=name,
        text=read.name,
        text_fingerprint=read.fingerprint,
        bos=read.bos,
        tokens=tokens,
        window=window,
        sinks=sinks,
        budget=window + sinks,
        seed=seed,
        scored=len(rows),
        restricted=len(restricted),
        own=len(architecture.attentions) - len(restricted),
        curves=tuple(curves),
    )


def stream_ids(text: Text, tokens: int) -> Tensor:
    """`[tokens + 1]`: the text behind its BOS, and the last row's successor.

    Raises:
        DataError: a text that is too short.
    """
    return text.cut(tokens + 1, 1)[0]


def scored_rows(tokens: int, vocabulary: int) -> Tensor:
    """Rows whose successor is scored: all, or as many as the vocabulary allows, evenly spread; never fewer than 256."""
    count = max(256, SCORED_LOGITS // vocabulary)
    if count >= tokens:
        return torch.arange(tokens)
    step = math.ceil(tokens / count)
    return torch.arange(step - 1, tokens, step)


@torch.no_grad()
def stream_losses(
    model: Any,
    architecture: Architecture,
    ids: Tensor,
    variant: Variant,
    rows: Tensor,
    passes: Passes | None = None,
) -> Tensor:
    """Negative log-likelihood `[R]` (float64, nats) of the successors of `rows` in `ids` `[N + 1]` under a variant.

    `passes`: as `measure_streaming`.

    Raises:
        ArchitectureError: no layer sees the whole text, or attention that bypasses transformers' interface.
        QuantSinkError: logits that are not finite.
    """
    check_vocabulary(model, int(ids.max()))
    tokens = len(ids) - 1
    restricted = [layer for layer in architecture.attentions if _restricted(layer, tokens)]
    if not restricted:
        raise ArchitectureError(
            f"{architecture.model_type}: no layer sees all of {tokens} tokens, so there is nothing to restrict; take "
            "fewer tokens"
        )
    seen: set[str] = set()
    modules = dict(model.named_modules())
    attend = {
        modules[layer.name]: _attending(layer, variant if layer in restricted else None, seen)
        for layer in architecture.attentions
    }
    ids = ids.to(input_device(model))
    decoder = model.get_decoder()
    with intercepting(model, attend):
        output = (passes or {}).get(pass_key(ids[:-1])) if variant.newest is None else None
        if output is None:
            output = decoder(input_ids=ids[None, :-1], use_cache=False)
            check_seen(architecture, seen)
        hidden = output.last_hidden_state
        losses = []
        for block in rows.split(max(1, LOGITS // _vocabulary(model))):
            chosen = block.to(hidden.device)
            with _replaying(decoder, output, hidden[:, chosen]):
                logits = model(input_ids=ids[None, chosen.to(ids.device)], use_cache=False).logits[0].float()
            if not bool(logits.amax().isfinite() & logits.amin().isfinite()):
                raise QuantSinkError(f"{variant.name}: its logits contain NaN or inf; load it with another dtype")
            successors = ids[(block + 1).to(ids.device)].to(logits.device)
            losses.append(cross_entropy(logits, successors, reduction="none").double().cpu())
    return torch.cat(losses)


def to_buckets(nll: Tensor, rows: Tensor, tokens: int, size: int) -> tuple[Bucket, ...]:
    """Sums of losses `[R]` at `rows` `[R]` by position."""
    if size < 1:
        raise UsageError(f"buckets of {size} positions: 1 or more")
    buckets = []
    for start in range(0, tokens, size):
        inside = nll[(rows >= start) & (rows < start + size)]
        buckets.append(Bucket(start, min(start + size, tokens), len(inside), float(inside.sum(dtype=torch.float64))))
    if any(not bucket.scored for bucket in buckets):
        raise DataError(f"buckets of {size} positions: some hold no scored row; take larger ones")
    return tuple(buckets)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`[B, H, L, Dv]` for query `[B, H, L, D]` and key, value `[B, KVH, L, D]`, each block over the keys it sees."""
    length = query.shape[2]
    kept = torch.tensor(variant.kept, dtype=torch.int64, device=query.device)
    parts = []
    for start in range(0, length, QUERY_BLOCK):
        rows = torch.arange(start, min(start + QUERY_BLOCK, length), device=query.device)
        low = 0 if variant.newest is None else max(0, start + 1 - variant.newest)
        columns = torch.cat([kept[kept < low], torch.arange(low, int(rows[-1]) + 1, device=query.device)])
        mask = variant.sees(rows, columns)[None, None]
        states = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        if softcap is None and s_aux is None:
            grouped = query.shape[1] != key.shape[1]
            parts.append(scaled_dot_product_attention(*states, attn_mask=mask, scale=scaling, enable_gqa=grouped))
        else:
            exact = exact_attention(*states, mask, causal=False, scaling=scaling, softcap=softcap, s_aux=s_aux)
            parts.append(exact)
    return torch.cat(parts, 2)


def _attending(layer: AttentionLayer, variant: Variant | None, seen: set[str]) -> Attend:
    """The variant's attention; None or full attention: the layer's own."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        seen.add(layer.name)
        if variant is None or variant.newest is None:
            return attend_all(module, layer, query, key, value, mask, **options)
        if mask is not None and layer.window is None:
            raise ArchitectureError(f"{layer.name}: it has a mask of its own, which streaming cannot combine with")
        rule = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
        return attend_blocks(query, key, value, variant, *rule).transpose(1, 2).contiguous(), None

    return attend


def _restricted(layer: AttentionLayer, tokens: int) -> bool:
    """Whether the layer sees the whole text, so that a variant takes something from it."""
    return layer.window is None or layer.window >= tokens


@contextlib.contextmanager
def _replaying(decoder: Any, output: Any, hidden: Tensor) -> Iterator[None]:
    """Let the decoder answer with some of the rows that it gave: the model then does to them whatever it does to make
    logits, and never to all rows at once."""
    before = decoder.__dict__.get("forward")
    replayed = dataclasses.replace(output, last_hidden_state=hidden)
    decoder.forward = lambda *_, **__: replayed
    try:
        yield
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)
