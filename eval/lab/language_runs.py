"""The language experiments: every variant trained on the same batches, and what each claim asks of it measured."""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.jobs import one_thread, run_jobs
from quantsink.eval.lab.language import (
    LENGTH,
    Activation,
    AtLength,
    Bucket,
    Cache,
    EightBits,
    GradientNoise,
    HeadMass,
    Text,
    Training,
    activations,
    at_length,
    eight_bits,
    gradients,
    head_masses,
    losses,
    model_for,
    step_times,
    streaming,
    text,
    train,
)
from quantsink.eval.lab.measures import FRESH, SINK_HEAD, STRONG, methods
from quantsink.eval.lab.mechanisms import LearnableSinks, OutputGate
from quantsink.eval.lab.model import TokenModel
from quantsink.eval.lab.normalizers import ReLU, Softmax, Softmax1
from quantsink.eval.lab.quantize import BLOCK
from quantsink.eval.lab.seeds import Group, Spread, average
from quantsink.progress import Progress

SOFTMAX = AttentionSpec(Softmax(), rotary=True)
SOFTMAX1 = AttentionSpec(Softmax1(), rotary=True)
LEARNED = AttentionSpec(Softmax(), (LearnableSinks(),), rotary=True)
VARIANTS = (
    SOFTMAX,
    SOFTMAX1,
    AttentionSpec(Softmax(), (OutputGate(),), rotary=True),
    LEARNED,
    AttentionSpec(ReLU(), rotary=True),
)
CLAIMED = "15-20% lower beyond the trained length"
A_TOKEN = 0.85**0.25 - 1
"""What 15 % a token of 4 bytes is a byte; in which unit the claim was made is not known."""
NOISY = (SOFTMAX.name, SOFTMAX1.name)
"""Variants whose gradient's variance is measured."""
LONG = 512
"""Inputs at four times the trained length; 8 bits are measured here."""
STREAM = 1024
KEYS, FIRST = 64, 4
"""Keys that a streaming query sees, all variants but full attention; first tokens among them."""
FULL_CACHE, NEWEST = "full attention", f"newest {KEYS}"
WITH_FIRST = f"newest {KEYS - FIRST} + {FIRST} first"
WITH_FIRST_TEXT = f"newest {KEYS - FIRST} + {FIRST} first, positions of the text"
TUNED_SINK = f"newest {KEYS - 1} + learnable sink, fine-tuned"
TUNED = f"newest {KEYS}, fine-tuned"
CACHES: dict[str, Cache | None] = {
    FULL_CACHE: None,
    NEWEST: Cache(KEYS),
    WITH_FIRST: Cache(KEYS - FIRST, FIRST),
    WITH_FIRST_TEXT: Cache(KEYS - FIRST, FIRST, renumbered=False),
}


@dataclass(frozen=True)
class Scale:
    """How much is run: `quick` is for tests.

    scored: held-out bytes at most. looked: windows of the trained length in which heads and activations are looked at;
    quantized, streamed: windows in 8 bits and in a streaming cache.
    tuned: fine-tuning steps. batches: for the gradient's variance; looks: during training, the end among them.
    cost_steps: timed steps of each variant, in rounds of a fifth.
    """

    seeds: int = 5
    steps: int = 500
    scored: int = 1 << 20
    looked: int = 48
    quantized: int = 4
    streamed: int = 6
    tuned: int = 100
    batches: int = 32
    looks: int = 3
    cost_steps: int = 200


FULL = Scale()
QUICK = Scale(
    seeds=1, steps=40, scored=4096, looked=8, quantized=1, streamed=1, tuned=10, batches=4, looks=2, cost_steps=10
)


@dataclass(frozen=True)
class Job:
    spec: AttentionSpec
    seed: int
    scale: Scale


@dataclass(frozen=True)
class StreamCurve:
    """The softmax model of one seed through one cache; `beyond`: perplexity from `LENGTH` on, the trained length."""

    name: str
    beyond: float
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class LanguageRun:
    """One trained model. `loss`: of the last tenth of the training, in nats per byte. `streaming`: of softmax alone."""

    name: str
    seed: int
    loss: float
    lengths: tuple[AtLength, ...]
    noise: tuple[GradientNoise, ...]
    heads: tuple[HeadMass, ...]
    activations: tuple[Activation, ...]
    eight_bits: tuple[EightBits, ...]
    streaming: tuple[StreamCurve, ...]

    def perplexity(self, length: int) -> float:
        return next(at.perplexity for at in self.lengths if at.length == length)

    @property
    def head_mean(self) -> HeadMass:
        return average(self.heads)

    @property
    def strongest_bos(self) -> float:
        return max(head.bos for head in self.heads)

    @property
    def sink_heads(self) -> dict[str, int]:
        """By least weight, heads that give that much to a sink, the BOS token or learnable ones."""
        return {str(least): sum(h.bos + h.learned >= least for h in self.heads) for least in (SINK_HEAD, STRONG)}

    @property
    def largest_bos(self) -> float:
        """Of the activations behind all blocks, at the BOS token."""
        return max(activation.bos for activation in self.activations)

    @property
    def largest_others(self) -> float:
        return max(activation.others for activation in self.activations)

    @property
    def kl(self) -> dict[str, float]:
        """By method."""
        return {bits.method: bits.kl for bits in self.eight_bits}

    @property
    def ratio(self) -> dict[str, float]:
        """By method, of perplexity in 8 bits."""
        return {bits.method: bits.ratio for bits in self.eight_bits}

    @property
    def closed(self) -> dict[str, float]:
        """By method, the share of `block`'s KL that is gone."""
        return {method: 1 - kl / self.kl[BLOCK] for method, kl in self.kl.items()}


@dataclass(frozen=True)
class StepCost:
    """Median processor time of a training step in ms, softmax and softmax1 taking turns, of each round."""

    softmax: tuple[float, ...]
    softmax1: tuple[float, ...]

    @property
    def overhead(self) -> tuple[float, ...]:
        return tuple(b / a - 1 for a, b in zip(self.softmax, self.softmax1, strict=True))


@dataclass(frozen=True)
class TextFacts:
    """Bytes: of training text, cut out of it because the held-out text has them too, and of held-out text."""

    train: int
    cut: int
    heldout: int


PAIRS = 5
Verdict = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True)
class Claim:
    """What was published for softmax1 against softmax, and the change from one to the other here, pair by pair.

    bound: -0.25 claims a change of -25% or beyond, 0.05 one of at most 5%; None: nothing was claimed.
    """

    name: str
    published: str
    bound: float | None
    softmax: Spread
    softmax1: Spread
    changes: tuple[float, ...]

    @property
    def verdict(self) -> Verdict | None:
        """Reproduced: the mean is within the bound, and every pair within it too (a cost) or below 0 (a gain). Not
        reproduced: no pair is within the bound. All else, and fewer than `PAIRS` pairs: undecided."""
        if self.bound is None:
            return None
        bound = self.bound
        if len(self.changes) < PAIRS or any(math.isnan(change) for change in self.changes):
            return "undecided"
        if not any(change <= bound for change in self.changes):
            return "not reproduced"
        if statistics.fmean(self.changes) <= bound and max(self.changes) <= max(bound, 0.0):
            return "reproduced"
        return "undecided"

    @property
    def group(self) -> Group[Any]:
        """Each change with the claim."""
        return Group(self.name, tuple(SimpleNamespace(claim=self, change=change) for change in self.changes))


@dataclass(frozen=True)
class LanguageResult:
    scale: Scale
    text: TextFacts
    runs: tuple[LanguageRun, ...]
    cost: StepCost

    def of(self, name: str) -> list[LanguageRun]:
        """The runs of one variant, seed by seed."""
        return sorted((run for run in self.runs if run.name == name), key=lambda run: run.seed)

    @property
    def caches(self) -> dict[str, list[StreamCurve]]:
        """The softmax models' curves by cache, seed by seed."""
        each = zip(*(run.streaming for run in self.of(SOFTMAX.name)), strict=True)
        return {curves[0].name: list(curves) for curves in each}


STEPS = (
    ("first tokens kept", NEWEST, WITH_FIRST),
    ("fine-tuning alone", NEWEST, TUNED),
    ("fine-tuning with a learnable sink", NEWEST, TUNED_SINK),
    ("the learnable sink, both fine-tuned", TUNED, TUNED_SINK),
    ("learnable sink fine-tuned, against first tokens kept", WITH_FIRST, TUNED_SINK),
)
"""From one cache to another: what each step buys."""


def streaming_steps(result: LanguageResult) -> list[Group[Any]]:
    """Of each step the change of perplexity beyond the trained length, seed by seed."""
    caches, steps = result.caches, []
    for what, before, after in STEPS:
        changes = [b.beyond / a.beyond - 1 for a, b in zip(caches[before], caches[after], strict=True)]
        each = (SimpleNamespace(before=before, after=after, change=change) for change in changes)
        steps.append(Group(what, tuple(each)))
    return steps


def claims(result: LanguageResult) -> list[Claim]:
    """The published claims on softmax1 beside what was measured, seed by seed."""
    plain, one = result.of(SOFTMAX.name), result.of(SOFTMAX1.name)

    def compared(name: str, published: str, bound: float | None, of: Callable[[LanguageRun], float]) -> Claim:
        before, after = [of(run) for run in plain], [of(run) for run in one]
        changes = tuple(b / a - 1 for a, b in zip(before, after, strict=True))
        return Claim(name, published, bound, Spread.of(before), Spread.of(after), changes)

    def at(length: int) -> Callable[[LanguageRun], float]:
        return lambda run: run.perplexity(length)

    cost = result.cost
    return [
        compared(f"perplexity per byte, {LENGTH} bytes (1x)", "-", None, at(LENGTH)),
        compared(f"perplexity per byte, {LONG} bytes ({LONG // LENGTH}x)", CLAIMED, -0.15, at(LONG)),
        compared("the same, if the claim is per token of 4 bytes", f"{-A_TOKEN:.1%} lower per byte", A_TOKEN, at(LONG)),
        compared(f"perplexity per byte from {LENGTH} on, in {LONG}", CLAIMED, -0.15, _beyond),
        compared("the same, if the claim is per token of 4 bytes", f"{-A_TOKEN:.1%} lower per byte", A_TOKEN, _beyond),
        compared("variance of the gradient, trace, last step", "25% lower", -0.25, _trace),
        compared("variance of the gradient, trace / ‖true‖², last step", "25% lower", -0.25, _relative),
        Claim(
            "cost of a training step, ms", "5% more", 0.05, Spread.of(cost.softmax), Spread.of(cost.softmax1),
            cost.overhead,
        ),
    ]  # fmt: skip


def _beyond(run: LanguageRun) -> float:
    """Perplexity of the positions beyond the trained length, which are whole buckets of equal size."""
    beyond = [bucket for bucket in run.lengths[-1].buckets if bucket.start >= LENGTH]
    return math.exp(statistics.fmean(math.log(bucket.perplexity) for bucket in beyond))


def _trace(run: LanguageRun) -> float:
    return run.noise[-1].trace


def _relative(run: LanguageRun) -> float:
    return run.noise[-1].relative


def run_one(job: Job) -> LanguageRun:
    scale, seed, data = job.scale, job.seed, text()
    model = model_for(job.spec, seed)
    noise: list[GradientNoise] = []
    looks = {scale.steps * (look + 1) // scale.looks for look in range(scale.looks)}

    def look(step: int) -> None:
        if step in looks and job.spec.name in NOISY:
            generator = torch.Generator().manual_seed(FRESH + seed)
            batches = [data.batch(Training().sequences, generator) for _ in range(scale.batches)]
            noise.append(GradientNoise.of(step, gradients(model, batches)))

    loss = train(model, data, Training(scale.steps), seed, look)
    lengths = tuple(
        at_length(losses(model, data.windows(length, scale.scored // length)), length // 8) for length in (LENGTH, LONG)
    )
    looked = data.windows(LENGTH, scale.looked)
    heads = head_masses(model, looked)
    sinks = 1 + sum(one.count for one in job.spec.mechanisms if isinstance(one, LearnableSinks))
    long = data.windows(LONG, scale.quantized)
    return LanguageRun(
        name=job.spec.name,
        seed=seed,
        loss=loss,
        lengths=lengths,
        noise=tuple(noise),
        heads=heads,
        activations=activations(model, looked),
        eight_bits=eight_bits(model, long, dict(methods(sinks, LONG + sinks - 1, seed))),
        streaming=stream(model, data, scale, seed) if job.spec == SOFTMAX else (),
    )


def stream(model: TokenModel, data: Text, scale: Scale, seed: int) -> tuple[StreamCurve, ...]:
    """A softmax model through every cache, then fine-tuned to a window with a learnable sink and without one."""
    windows = data.windows(STREAM, scale.streamed)
    curves = [_curve(name, model, cache, windows) for name, cache in CACHES.items()]
    for name, spec, cache in ((TUNED_SINK, LEARNED, Cache(KEYS - 1)), (TUNED, SOFTMAX, Cache(KEYS))):
        tuned = fine_tuned(model, spec, cache, data, scale.tuned, seed)
        curves.append(_curve(name, tuned, cache, windows))
    return tuple(curves)


def _curve(name: str, model: TokenModel, cache: Cache | None, windows: torch.Tensor) -> StreamCurve:
    with streaming(model, cache):
        nats = losses(model, windows)
    return StreamCurve(name, at_length(nats[:, LENGTH:], LENGTH).perplexity, at_length(nats, KEYS).buckets)


def fine_tuned(model: TokenModel, spec: AttentionSpec, cache: Cache, data: Text, steps: int, seed: int) -> TokenModel:
    """A copy of `model` with what `spec` adds, all weights trained on through `cache` at a tenth of the rate."""
    tuned = model_for(spec, seed)
    tuned.load_state_dict(copy.deepcopy(model.state_dict()), strict=False)
    with streaming(tuned, cache):
        train(tuned, data, Training(steps, Training().rate / 10), FRESH + seed)
    return tuned


def jobs(scale: Scale) -> list[Job]:
    """The longest first: softmax streams too."""
    return [Job(spec, seed, scale) for spec in VARIANTS for seed in range(scale.seeds)]


def step_cost(scale: Scale) -> StepCost:
    with one_thread():
        times = step_times((SOFTMAX, SOFTMAX1), text(), Training(max(scale.cost_steps, 10)), 0)
    rounds = [[steps[i::5] for i in range(5)] for steps in times]
    softmax, softmax1 = (tuple(map(statistics.median, parts)) for parts in rounds)
    return StepCost(softmax, softmax1)


def run_language(scale: Scale = FULL, progress: Progress | None = None, workers: int | None = None) -> LanguageResult:
    """All of it; each seed's batches, training and figures depend on the seed alone, the cost on the machine."""
    runs = run_jobs(run_one, jobs(scale), name="language models", progress=progress, workers=workers)
    data = text()
    facts = TextFacts(len(data.train), data.cut, len(data.heldout))
    return LanguageResult(scale, facts, tuple(runs), step_cost(scale))
