"""The trigger experiments: every variant trained, looked at, put into 8 bits, and given to quantsink's calibration."""

import copy
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.collect import FIRST_ROW
from quantsink.calibration.routing import plan
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.jobs import Progress, run_jobs
from quantsink.eval.lab.mechanisms import LearnableSinks, OutputGate, SinkBias
from quantsink.eval.lab.model import FeatureModel
from quantsink.eval.lab.normalizers import ClippedSoftmax, Entmax, ReLU, Softmax, Softmax1, Sparsemax
from quantsink.eval.lab.quantize import BLOCK, FIXED, PARTS, ROW, Bits, in_8_bits
from quantsink.eval.lab.trigger import (
    Batch,
    HeadWeights,
    Solved,
    Task,
    Training,
    head_weights,
    solved,
    strong_heads,
    trained,
)
from quantsink.hf.convert import apply

VARIANTS = (
    AttentionSpec(Softmax()),
    AttentionSpec(ReLU()),
    AttentionSpec(Softmax1()),
    AttentionSpec(Sparsemax()),
    AttentionSpec(Entmax(1.5)),
    AttentionSpec(ClippedSoftmax()),
    AttentionSpec(Softmax(), (OutputGate(),)),
    AttentionSpec(Softmax(), (SinkBias(),)),
    AttentionSpec(Softmax(), (LearnableSinks(),)),
)
"""One layer, one head each."""
LAYERS, HEADS = 4, 4
DEEP = (AttentionSpec(Softmax()), AttentionSpec(ReLU()))
"""Four layers of four heads each."""
SINK_HEAD, STRONG = 0.3, 0.8
FRESH = 10**6
"""Added to a seed: sequences that no training saw."""
LONG = 256
"""Tokens in which 8 bits are measured: four blocks of keys."""
CALIBRATED = 64
"""Tokens a sequence, and sequences, that calibration reads."""
SINK, RANDOM = "sink", "random"
METHODS = (FIXED, ROW, BLOCK, SINK, RANDOM)


@dataclass(frozen=True)
class Job:
    spec: AttentionSpec
    seed: int
    task: Task
    training: Training
    layers: int = 1
    heads: int = 1
    measured: int = 4096
    """Sequences of the task's own length."""


@dataclass(frozen=True)
class Calibrated:
    """What quantsink's own calibration and `w8a8` make of a model. Heads are (layer, head).

    found: those it calls sink heads. true: those whose recorded weights give the BOS token 0.3 or more.
    error: of the quantized model's output, relative to the exact one's norm.
    """

    found: tuple[tuple[int, int], ...]
    true: tuple[tuple[int, int], ...]
    largest_difference: float
    """Between calibration's BOS mass of a head and the recorded weights'."""
    error: float
    solved: float


@dataclass(frozen=True)
class TriggerRun:
    """One trained model. `errors`: by method, of the output in 8 bits at `LONG` tokens relative to float64's norm;
    `parts`: the same with `block` and only some things in 8 bits. `solved_long`: float64 at that length.
    """

    name: str
    seed: int
    layers: int
    length: int
    own: bool
    steps: int
    solved: Solved
    heads: tuple[HeadWeights, ...]
    strong: tuple[float, ...]
    """By layer: mean number a sequence of heads with 0.8 of their weight on the BOS token."""
    solved_long: float
    long_sequences: int
    errors: dict[str, float]
    parts: dict[str, float]
    solved_8_bits: dict[str, float]
    calibrated: Calibrated | None
    """None: an attention that transformers' interface cannot express, which calibration refuses."""


@torch.no_grad()
def run_one(job: Job) -> TriggerRun:
    model = trained(job.task, job.spec, job.seed, job.training, job.layers, job.heads)
    generator = torch.Generator().manual_seed(FRESH + job.seed)
    batch = job.task.batch(job.measured, generator)
    record: list[Tensor] = []
    output = model.run(batch.features, record=record)
    heads = tuple(found for layer, w in enumerate(record) for found in head_weights(w, batch, layer))
    long = dataclasses.replace(job.task, length=LONG).batch(max(job.measured // 256, 8), generator)
    calibrated = _calibrated(model, job.task, generator) if job.spec.expressible else None
    sinks = 1 + record[0].shape[-1] - record[0].shape[-2]
    exact, errors, parts, right = _in_8_bits(model, long, sinks, job.seed)
    return TriggerRun(
        name=job.spec.name,
        seed=job.seed,
        layers=job.layers,
        length=job.task.length,
        own=job.task.own,
        steps=job.training.steps,
        solved=solved(output, batch),
        heads=heads,
        strong=tuple(strong_heads(w, batch, STRONG) for w in record),
        solved_long=exact,
        long_sequences=len(long.features),
        errors=errors,
        parts=parts,
        solved_8_bits=right,
        calibrated=calibrated,
    )


def methods(sinks: int, keys: int, seed: int) -> dict[str, Bits]:
    """The ways to spend 8 bits; `random` keeps as many keys exact as `sink` does, none of them a sink."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(keys - sinks, generator=generator)[:sinks] + sinks
    return {
        FIXED: Bits(FIXED),
        ROW: Bits(ROW),
        BLOCK: Bits(BLOCK),
        SINK: Bits(BLOCK, exact=tuple(range(sinks))),
        RANDOM: Bits(BLOCK, exact=tuple(int(key) for key in others)),
    }


def alone(sinks: int) -> dict[str, Bits]:
    """Some things in 8 bits, the others exact."""
    both = ("scores", "weights")
    return {
        **{part: Bits(BLOCK, parts=(part,)) for part in PARTS},
        "scores and weights": Bits(BLOCK, parts=both),
        "scores and weights, sinks exact": Bits(BLOCK, exact=tuple(range(sinks)), parts=both),
    }


def _in_8_bits(
    model: FeatureModel, batch: Batch, sinks: int, seed: int
) -> tuple[float, dict[str, float], dict[str, float], dict[str, float]]:
    """Solved in float64, error by method, error by part, solved by method; `sinks` keys are exact at most."""
    model = model.double()
    x = batch.features.double()
    with in_8_bits(model, None):
        exact = model.run(x)
    errors, right, parts = {}, {}, {}
    for name, bits in methods(sinks, x.shape[1] + sinks - 1, seed).items():
        with in_8_bits(model, bits):
            output = model.run(x)
        errors[name], right[name] = relative(output, exact), solved(output, batch).share
    for part, bits in alone(sinks).items():
        with in_8_bits(model, bits):
            parts[part] = relative(model.run(x), exact)
    return solved(exact, batch).share, errors, parts, right


def _calibrated(model: FeatureModel, task: Task, generator: torch.Generator) -> Calibrated:
    batch = dataclasses.replace(task, length=CALIBRATED).batch(CALIBRATED, generator)
    record: list[Tensor] = []
    exact = model.run(batch.features, record=record)
    calibration = calibrate(model, None, batch.features, seq_len=CALIBRATED, query_rows=None)
    true = {
        (layer, head): float(bos[head])
        for layer, w in enumerate(record)
        for bos in [_bos(w)]
        for head in range(w.shape[1])
    }
    found = {(head.layer, head.head): head for head in calibration.heads()}
    quantized = copy.deepcopy(model)
    apply(quantized, plan(calibration, "w8a8"))
    output = quantized(batch.features)
    return Calibrated(
        tuple(key for key, head in found.items() if head.sink),
        tuple(key for key, mass in true.items() if mass >= SINK_HEAD),
        max(abs(found[key].bos_mass - mass) for key, mass in true.items()),
        relative(output, exact),
        solved(output, batch).share,
    )


def _bos(weights: Tensor) -> Tensor:
    """`[H]`: mean weight on the first token, of the rows that calibration counts."""
    return weights[:, :, FIRST_ROW:, 0].double().mean((0, 2))


def relative(output: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    return float((output.double() - exact.double()).norm() / exact.double().norm())


@dataclass(frozen=True)
class Scale:
    """How much is run: `quick` is for tests."""

    seeds: int = 5
    steps: int = 800
    deep_steps: int = 1000
    measured: int = 4096


FULL, QUICK = Scale(), Scale(1, 400, 300, 512)


def jobs(scale: Scale) -> list[Job]:
    """The longest first. Softmax and ReLU also do the task that leaves the trigger's own content out."""
    task, strict = Task(), Task(own=False)
    training, deep = Training(scale.steps, 1e-2), Training(scale.deep_steps, 5e-3)
    found = []
    for seed in range(scale.seeds):
        found += [Job(spec, seed, task, deep, LAYERS, HEADS, scale.measured) for spec in DEEP]
    for seed in range(scale.seeds):
        found += [Job(spec, seed, task, training, measured=scale.measured) for spec in VARIANTS]
        found += [Job(spec, seed, strict, training, measured=scale.measured) for spec in DEEP]
    return found


def run_trigger(scale: Scale = FULL, progress: Progress | None = None, workers: int | None = None) -> list[TriggerRun]:
    """All of it; each seed's training, sequences and figures depend on the seed alone."""
    return run_jobs(run_one, jobs(scale), name="trigger task", progress=progress, workers=workers)
