"""Byte-level language models small enough to train in seconds, and what is measured of them.

A window is a BOS id and bytes. Of `length` inputs, BOS included, each predicts the byte after it, so `length` bytes are
scored. The models train on Python's help topics and are measured on the topics that `builtin:heldout` keeps apart,
after every passage that the two have in common has been cut out of the training text.
"""

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from quantsink.calibration.collect import FIRST_ROW
from quantsink.calibration.text import documents, parse_spec
from quantsink.errors import DataError, UsageError
from quantsink.eval.lab.attention import (
    ALL_REAL,
    ROTARY_BASE,
    AttentionSpec,
    Inputs,
    LabAttention,
    Parts,
    computing,
    turned,
)
from quantsink.eval.lab.model import LabConfig, TokenModel
from quantsink.eval.lab.normalizers import Softmax
from quantsink.eval.lab.quantize import Bits, in_8_bits
from quantsink.eval.lab.training import descend, final_loss

BOS = 256
IDS = 257
LENGTH = 128
"""Inputs of a training window, BOS included."""
COMMON = 32
"""Bytes; as long a run that stands in the held-out text too is cut out of the training text."""
WIDTH, LAYERS, HEADS = 64, 3, 4
CHUNK = 4096
"""Inputs a forward when measuring."""


@dataclass(frozen=True, eq=False)
class Text:
    """`train` and `heldout`: bytes as int64. A window of training text starts at one of `starts` and lies in one piece
    of it; `cut` bytes were taken out."""

    train: Tensor
    starts: Tensor
    heldout: Tensor
    cut: int

    def batch(self, count: int, generator: torch.Generator) -> Tensor:
        """`[count, 1 + LENGTH]`: BOS and bytes of random places."""
        start = self.starts[torch.randint(len(self.starts), (count,), generator=generator)]
        return with_bos(self.train[start[:, None] + torch.arange(LENGTH)])

    def windows(self, length: int, count: int | None = None) -> Tensor:
        """`[N, 1 + length]`: the held-out text in order, as whole windows; `count` of them evenly spread."""
        every = self.heldout[: len(self.heldout) // length * length].view(-1, length)
        if not len(every):
            raise DataError(
                f"{len(self.heldout)} bytes of held-out text make no window of {length}; score shorter ones"
            )
        if count is not None and count < len(every):
            every = every[torch.arange(count) * len(every) // count]
        return with_bos(every)


def with_bos(rows: Tensor) -> Tensor:
    return torch.cat([rows.new_full((len(rows), 1), BOS), rows], 1)


@functools.cache
def text() -> Text:
    """Training text of `builtin:prose`, free of what `builtin:heldout` holds; it depends on the Python in use."""
    heldout = "".join(documents(parse_spec("builtin:heldout"))).encode()
    return prepared([document.encode() for document in documents(parse_spec("builtin:prose"))], heldout)


def prepared(training: Sequence[bytes], heldout: bytes) -> Text:
    """No `COMMON` bytes in a row of what trains stand in the held-out text, and no window spans a cut."""
    known = {heldout[i : i + COMMON] for i in range(len(heldout) - COMMON + 1)}
    kept = [piece for document in training for piece in _pieces(document, known) if len(piece) >= LENGTH]
    if not kept:
        raise DataError(f"the training text holds no {LENGTH} bytes that are not held out; name another")
    starts, before = [], 0
    for piece in kept:
        starts.append(torch.arange(len(piece) - LENGTH + 1) + before)
        before += len(piece)
    cut = sum(map(len, training)) - before
    return Text(_ids(b"".join(kept)), torch.cat(starts), _ids(heldout), cut)


def _pieces(document: bytes, known: set[bytes]) -> Iterator[bytes]:
    """What is left between the passages that are known."""
    begin = 0
    for i in range(len(document) - COMMON + 1):
        if document[i : i + COMMON] in known:
            if i > begin:
                yield document[begin:i]
            begin = i + COMMON
    yield document[begin:]


def _ids(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.int64)


@dataclass(frozen=True)
class Training:
    """AdamW, gradients clipped to norm 1; the learning rate climbs to `rate` in a tenth of the steps, then falls as a
    cosine.

    attention_rate: times `rate` for what makes the scores, q_proj, k_proj and learnable keys. At 1, a softmax model of
        this size grows no sink head in so few steps; at 4 it may, and its perplexity is higher for it.
    """

    steps: int = 500
    rate: float = 1e-2
    attention_rate: float = 4.0
    decay: float = 0.1
    sequences: int = 4

    def factor(self, step: int) -> float:
        """Of the rate, in that 0-based step."""
        climb = max(self.steps // 10, 1)
        if step < climb:
            return (step + 1) / climb
        return 0.5 + 0.5 * math.cos(math.pi * (step - climb) / max(self.steps - climb, 1))


SCORES = ("q_proj.weight", "k_proj.weight", ".key")


def model_for(spec: AttentionSpec, seed: int) -> TokenModel:
    """A new model; all variants of one seed start from the same weights, but for those that only they have."""
    config = LabConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=WIDTH // HEADS,
        outputs=IDS,
        residual=True,
        norm=True,
        mlp=4 * WIDTH,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = TokenModel(config, AttentionSpec(Softmax(), rotary=True))
        model = TokenModel(config, spec)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model


class Fitting:
    """A model on its way: one `step` at a time, so that two can take turns."""

    def __init__(self, model: TokenModel, training: Training) -> None:
        self.model = model
        fast = [p for name, p in model.named_parameters() if name.endswith(SCORES)]
        others = [p for name, p in model.named_parameters() if not name.endswith(SCORES)]
        groups: list[dict[str, Any]] = [
            {"params": others},
            {"params": fast, "lr": training.rate * training.attention_rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=training.rate, betas=(0.9, 0.95), weight_decay=training.decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, training.factor)

    @torch.enable_grad()
    def step(self, windows: Tensor) -> Tensor:
        return descend(self.model, mean_loss(self.model, windows), self.optimizer, self.schedule)


def mean_loss(model: TokenModel, windows: Tensor) -> Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(
    model: TokenModel, text: Text, training: Training, seed: int, after: Callable[[int], None] | None = None
) -> float:
    """Fit `model` in place; the mean loss of the last tenth of the steps. `after` is called with the steps done.

    Raises:
        QuantSinkError: the loss is not finite any more.
    """
    generator = torch.Generator().manual_seed(seed)
    fitting = Fitting(model, training)
    losses = []
    model.train()
    for step in range(training.steps):
        losses.append(fitting.step(text.batch(training.sequences, generator)))
        if after is not None:
            after(step + 1)
    model.train(False)
    return final_loss(losses[-max(training.steps // 10, 1) :], model.specs[0].name, seed)


@torch.no_grad()
def losses(model: TokenModel, windows: Tensor) -> Tensor:
    """`[N, length]` nats in float64, of each byte."""
    return torch.cat([_nats(model.run(part[:, :-1]), part[:, 1:]) for part in chunks(windows)])


def chunks(windows: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = windows.split(max(CHUNK // windows.shape[1], 1))
    return parts


def _nats(logits: Tensor, bytes_: Tensor) -> Tensor:
    return cross_entropy(logits.double().transpose(1, 2), bytes_, reduction="none")


@dataclass(frozen=True)
class Bucket:
    """Perplexity per byte of the positions `start` to `end` - 1 in every window."""

    start: int
    end: int
    perplexity: float


@dataclass(frozen=True)
class AtLength:
    """Held-out text in windows of `length` inputs, all `scored` bytes of them."""

    length: int
    scored: int
    perplexity: float
    buckets: tuple[Bucket, ...]


def at_length(nats: Tensor, bucket: int) -> AtLength:
    """Of nats `[N, length]`."""
    length = nats.shape[1]
    buckets = (
        Bucket(start, min(start + bucket, length), perplexity(nats[:, start : start + bucket]))
        for start in range(0, length, bucket)
    )
    return AtLength(length, nats.numel(), perplexity(nats), tuple(buckets))


def perplexity(nats: Tensor) -> float:
    return math.exp(min(float(nats.mean()), 700.0))


@dataclass(frozen=True)
class GradientNoise:
    """How much the gradients g_1 ... g_K of K batches differ at fixed weights; all parameters together, unclipped.

    trace: of their sample covariance, sum |g_k - mean|² / (K - 1). mean_square: |mean g|², which holds trace / K of
    noise besides the squared norm of the true gradient. relative: the trace over that squared norm, the noise taken
    off; NaN where nothing is left of it.
    """

    step: int
    batches: int
    trace: float
    mean_square: float

    @property
    def relative(self) -> float:
        true = self.mean_square - self.trace / self.batches
        return self.trace / true if true > 0 else math.nan

    @classmethod
    def of(cls, step: int, gradients: Iterator[Tensor]) -> "GradientNoise":
        """Welford's recurrence: one pass, no difference of large sums."""
        count, mean, spread = 0, torch.zeros(()), 0.0
        for gradient in gradients:
            gradient = gradient.double()
            count += 1
            off = gradient - mean
            mean = mean + off / count
            spread += float((off * (gradient - mean)).sum())
        if count < 2:
            raise UsageError(f"gradient variance of {count} batches; give at least 2")
        return cls(step, count, spread / (count - 1), float(mean.square().sum()))


@torch.enable_grad()
def gradients(model: TokenModel, batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """The flat gradient of each batch; the model's own `.grad` stays as it is."""
    parameters = list(model.parameters())
    for windows in batches:
        each = torch.autograd.grad(mean_loss(model, windows), parameters, materialize_grads=True)
        yield torch.cat([gradient.flatten() for gradient in each])


@dataclass(frozen=True)
class HeadMass:
    """Mean weight that queries from `FIRST_ROW` on give to the BOS token, to learnable sinks, and in all."""

    layer: int
    head: int
    bos: float
    learned: float
    total: float


@dataclass(frozen=True)
class Activation:
    """Behind one block, the largest |number| of the residual stream at the BOS token and at all others."""

    layer: int
    bos: float
    others: float


@torch.no_grad()
def head_masses(model: TokenModel, windows: Tensor) -> tuple[HeadMass, ...]:
    record: list[Tensor] = []
    model.run(windows[:, :-1], record=record)
    masses = []
    for layer, weights in enumerate(record):
        sinks = weights.shape[-1] - weights.shape[-2]
        rows = weights[:, :, FIRST_ROW:].double()
        bos, learned, total = (
            part.mean((0, 2)).tolist() for part in (rows[..., sinks], rows[..., :sinks].sum(-1), rows.sum(-1))
        )
        masses += [HeadMass(layer, head, *each) for head, each in enumerate(zip(bos, learned, total, strict=True))]
    return tuple(masses)


@torch.no_grad()
def activations(model: TokenModel, windows: Tensor) -> tuple[Activation, ...]:
    largest_by_block: list[Activation] = []

    def keep(_: nn.Module, __: object, x: Tensor) -> None:
        largest = x.abs().amax((0, 2))
        largest_by_block.append(Activation(len(largest_by_block), float(largest[0]), float(largest[1:].max())))

    hooks = [block.register_forward_hook(keep) for block in model.blocks]
    try:
        model.run(windows[:, :-1])
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(largest_by_block)


@dataclass(frozen=True)
class EightBits:
    """Attention in 8 bits by one method against the model in float64: KL in nats per byte, and perplexity over its."""

    method: str
    kl: float
    ratio: float


@torch.no_grad()
def eight_bits(model: TokenModel, windows: Tensor, methods: dict[str, Bits | None]) -> tuple[EightBits, ...]:
    """The model's own weights stay as they are: a copy is made double. Without bits: float64 once more."""
    model = copy.deepcopy(model).double()
    kl = dict.fromkeys(methods, 0.0)
    more = dict.fromkeys(methods, 0.0)
    for part in chunks(windows):
        with in_8_bits(model, None):
            exact = model.run(part[:, :-1]).log_softmax(-1)
        nats = _nats(exact, part[:, 1:]).sum()
        for name, bits in methods.items():
            with in_8_bits(model, bits):
                quantized = model.run(part[:, :-1]).log_softmax(-1)
            kl[name] += float((exact.exp() * (exact - quantized)).sum())
            more[name] += float(_nats(quantized, part[:, 1:]).sum() - nats)
    scored = windows[:, 1:].numel()
    return tuple(EightBits(name, kl[name] / scored, math.exp(more[name] / scored)) for name in methods)


@dataclass(frozen=True)
class Cache:
    """Which keys a streaming query sees: the `newest`, its own among them, the `first` tokens, and learnable sinks.

    renumbered: as StreamingLLM has it, positions are counted inside the cache, so that no query is ever farther from
        the first keys than a full cache is long; else they stay those of the text. Distances within the window are the
        same either way.
    """

    newest: int
    first: int = 0
    renumbered: bool = True

    def seen(self, length: int, sinks: int) -> Tensor:
        """`[L, S + L]` bool, S learnable sinks first; causality is not its affair."""
        row, column = torch.arange(length)[:, None], torch.arange(-sinks, length)
        return (row - column < self.newest) | (column < self.first)

    def scores(self, parts: Parts) -> Tensor:
        scores = parts.scores()
        far = parts.sinks + self.first
        if not (self.renumbered and far):
            return scores
        row = torch.arange(parts.query.shape[2])
        inside = row.clamp(max=self.newest + far - 1)
        key = parts.key[:, :, :far].transpose(-1, -2)
        near = (moved(parts.query, inside - row) @ key) * parts.scaling
        if parts.bias is not None:
            near = near + parts.bias[..., :far]
        return torch.cat([near, scores[..., far:]], -1)


def moved(states: Tensor, by: Tensor) -> Tensor:
    """`[B, H, L, D]` moved on by `by` `[L]` rotary positions."""
    half = states.shape[-1] // 2
    angle = by[:, None].double() * ROTARY_BASE ** (torch.arange(half, dtype=torch.float64) / -half)
    return turned(states, angle.cos().to(states.dtype), angle.sin().to(states.dtype))


def streaming(model: TokenModel, cache: Cache | None) -> AbstractContextManager[None]:
    """All attention through such a cache, also in training; without one, as it is."""
    return computing(model, None if cache is None else functools.partial(_through, cache))


def _through(
    cache: Cache, module: LabAttention, x: Tensor, inputs: Inputs = ALL_REAL, record: list[Tensor] | None = None
) -> Tensor:
    parts = module.parts(x, inputs)
    visible = parts.visible & cache.seen(x.shape[1], parts.sinks)
    weights = module.spec.normalizer(cache.scores(parts), visible)
    if record is not None:
        record.append(weights)
    return module.finish(weights @ parts.value, x, inputs)


def step_times(specs: Sequence[AttentionSpec], text: Text, training: Training, seed: int) -> list[list[float]]:
    """Of each variant, the processor time of every training step in ms; they take turns, each with the same batches.

    Processor time and not the clock's: other processes on the machine then matter less.
    """
    fittings = [Fitting(model_for(spec, seed), training) for spec in specs]
    times: list[list[float]] = [[] for _ in specs]
    generator = torch.Generator().manual_seed(seed)
    for step in range(training.steps):
        windows = text.batch(training.sequences, generator)
        # Whoever is first meets cold caches.
        for index in range(len(specs)) if step % 2 else reversed(range(len(specs))):
            start = time.process_time()
            fittings[index].step(windows)
            times[index].append(1e3 * (time.process_time() - start))
    return times
