"""One long text through a rolling cache, sinks kept or dropped: perplexity and memory along the way.

In StreamingLLM (Xiao et al., 2024, section 3.1) a rolling cache fails from the moment the first tokens leave it. Here
both caches hold at most the same number of tokens at the same bits; they differ in whether the sinks are among them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from quantsink.calibration.calibration import Calibration
from quantsink.calibration.text import parse_spec
from quantsink.calibration.text import windows as tokenized
from quantsink.errors import QuantSinkError, UsageError
from quantsink.eval.bootstrap import perplexity
from quantsink.eval.divergence import CHUNK_ELEMENTS, WindowSums, evaluating
from quantsink.models.inputs import cache_argument
from quantsink.models.source import check_length
from quantsink.plan import CachePlan
from quantsink.progress import Progress
from quantsink.recipe import LEAST_SINKS, KVCache

CHUNK = 256
"""Tokens fed at a time."""
POINTS = 16
"""Stretches of equal length of a stream, each a point of a curve."""
KEPT, DROPPED = "sinks kept", "sinks dropped"


@dataclass(frozen=True, eq=False)
class Stream:
    """What both caches read. `ids` `[N + 1]` int64: N tokens are fed; all are scored but those of the first chunk.

    bits: of the cache. max_length: tokens that it may hold, sinks included.
    """

    ids: Tensor
    bits: int
    max_length: int

    @property
    def tokens(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True)
class RollingPoint:
    """One stretch. `tokens`: fed up to its end; `scored` of the stretch's own have `nll` nats in all and perplexity
    `ppl`. `cache_bytes` at its end. `peak_bytes`: largest resident memory of the process so far in this curve, None
    where the system does not say."""

    tokens: int
    scored: int
    nll: float
    ppl: float
    cache_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class RollingCurve:
    """A stream through one cache. `bits_kv`: real bits of a coded number. `max_length`: tokens that the cache may hold.
    `trained_length`: what the model was made for, None where its config does not say."""

    method: str
    description: str
    bits_kv: float
    sinks: int
    max_length: int
    trained_length: int | None
    points: tuple[RollingPoint, ...]

    @property
    def tokens(self) -> int:
        return self.points[-1].tokens

    @property
    def sums(self) -> tuple[WindowSums, ...]:
        """Its stretches as windows, for the bootstrap."""
        return tuple(WindowSums(point.nll, 0.0, 0, point.scored) for point in self.points)


def check_tokens(tokens: int) -> None:
    """Refuse a stream whose points would not end with a chunk, or whose first would score nothing."""
    step = CHUNK * POINTS
    if tokens < 2 * step or tokens % step:
        raise UsageError(
            f"--rolling {tokens}: a multiple of {step}, {2 * step} or more ({POINTS} points of whole chunks)"
        )


def read_stream(
    tokenizer: Any, spec: str, *, tokens: int, bits: int = 8, max_length: int = 2048, bos: bool = True
) -> Stream:
    """One BOS and the first `tokens` tokens of a text spec, its documents one after the other.

    Without a BOS one more token of the text is read; the first is fed and not scored.

    Raises:
        UsageError: an invalid number of tokens, or more than the text has.
    """
    check_tokens(tokens)
    source = parse_spec(spec)
    prefix = [tokenizer.bos_token_id] if bos and tokenizer.bos_token_id is not None else []
    length = tokens + 1 - len(prefix)
    limit = length + 2  # reading stops where fewer than two tokens are left
    ids = torch.cat(tokenized(tokenizer, source, seq_len=limit, max_tokens=limit, bos=False).ids)[:length]
    if len(ids) < length:
        raise UsageError(
            f"--rolling {tokens}: {source.name} has {len(ids):,} tokens; give fewer, or a longer text with --data"
        )
    return Stream(torch.cat([torch.tensor(prefix, dtype=torch.int64), ids]), bits, max_length)


def check_rolling(model: Any, stream: Stream) -> None:
    """Whether `model` takes rolling caches of this size at all; needs no calibration.

    Raises:
        UsageError: more tokens than the model was made for, or too few for a chunk. ArchitectureError: as `SinkCache`.
    """
    from quantsink.hf.sink_cache import SinkCache
    from quantsink.models.architecture import attention_layers

    check_length(model, stream.max_length, "--rolling-length")
    # A length below a chunk is refused at the end, whatever it is.
    length = max(stream.max_length, CHUNK)
    options = KVCache(sink_size=LEAST_SINKS, rounding="nearest", max_length=length)
    bits = {layer.name: (stream.bits,) * layer.kv_heads for layer in attention_layers(model)}
    with _attention_restored(model):
        cache = SinkCache(model, CachePlan(options, bits))
    least = max((policy.max_exact for policy in cache.policies if policy.kind == "codes"), default=0) + CHUNK
    if stream.max_length < least:
        raise UsageError(
            f"--rolling-length {stream.max_length}: at least {least}: sinks, the newest tokens and {CHUNK} more"
        )


def plan_rolling(model: Any, calibration: Calibration, stream: Stream) -> dict[str, CachePlan]:
    """The plans of both curves, each tried on the model.

    Raises:
        CalibrationError, RecipeError, ArchitectureError: as `SinkCache.from_calibration`.
    """
    from quantsink.hf.sink_cache import SinkCache

    options = KVCache(bits=stream.bits, max_length=stream.max_length)
    plans = {
        KEPT: calibration.cache_plan(model, options),
        DROPPED: calibration.cache_plan(model, dataclasses.replace(options, sink_size=0)),
    }
    with _attention_restored(model):
        for plan in plans.values():
            SinkCache(model, plan)
    return plans


def measure_rolling(
    model: Any, plans: dict[str, CachePlan], stream: Stream, progress: Progress | None = None
) -> tuple[RollingCurve, ...]:
    """Both curves. `model` stays as it is.

    Raises:
        QuantSinkError: logits that are not finite; the message names the curve and the place.
    """
    from quantsink.hf.sink_cache import SinkCache

    trained = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    curves = []
    with _attention_restored(model):
        for method, plan in plans.items():
            cache = SinkCache(model, plan)
            sinks = plan.sink_size
            description = f"{sinks} first tokens exact for good" if sinks else "no token stays, the oldest goes"
            points = _run(model, cache, stream, f"rolling, {method}", progress)
            curves.append(
                RollingCurve(method, description, cache.bits_per_number, sinks, stream.max_length, trained, points)
            )
    return tuple(curves)


@torch.no_grad()
def _run(model: Any, cache: Any, stream: Stream, name: str, progress: Progress | None) -> tuple[RollingPoint, ...]:
    ids = stream.ids.to(next(model.parameters()).device)
    inputs, targets = ids[:-1].split(CHUNK), ids[1:].split(CHUNK)
    argument = {cache_argument(model): cache}
    points, nll, scored = [], 0.0, 0
    _restart_peak()
    with evaluating(model):
        for number, (part, target) in enumerate(zip(inputs, targets, strict=True), 1):
            logits = model(input_ids=part[None], use_cache=True, **argument).logits[0]
            if number > 1:
                nll += _nll(logits, target, f"{name}: token {number * CHUNK:,}")
                scored += len(target)
            del logits
            if number % (len(inputs) // POINTS) == 0:
                ppl = perplexity([WindowSums(nll, 0.0, 0, scored)])
                points.append(RollingPoint(number * CHUNK, scored, nll, ppl, cache.nbytes(), _peak()))
                nll, scored = 0.0, 0
            if progress is not None:
                progress(name, number, len(inputs))
    return tuple(points)


def _nll(logits: Tensor, targets: Tensor, place: str) -> float:
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = zip(logits.split(step), targets.split(step), strict=True)
    losses = torch.cat([cross_entropy(rows.float(), target, reduction="none") for rows, target in parts])
    if not bool(torch.isfinite(losses).all()):
        raise QuantSinkError(f"{place}: its logits contain NaN or inf; no figure can be given for it")
    return float(losses.sum(dtype=torch.float64))


@contextlib.contextmanager
def _attention_restored(model: Any) -> Iterator[None]:
    """Give the model its own attention back, which a `SinkCache` replaces."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


_PROC = Path("/proc/self")


def _restart_peak() -> None:
    """Reset Linux's count of the largest resident memory, so that a curve does not include loading the model."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def _peak() -> int | None:
    """Largest resident memory of this process in bytes; None where there is no /proc."""
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
