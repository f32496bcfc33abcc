"""The trigger experiments: every variant trained, looked at, put into 8 bits, and given to quantsink's calibration."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.calibration.collect import FIRST_ROW
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.jobs import run_jobs
from quantsink.eval.lab.measures import (
    FRESH,
    METHODS,
    STRONG,
    calibrated,
    methods,
    outputs_in_8_bits,
    relative_error,
    single_parts,
    sink_heads,
    weight_by_head,
)
from quantsink.eval.lab.mechanisms import LearnableSinks, OutputGate, SinkBias
from quantsink.eval.lab.model import FeatureModel
from quantsink.eval.lab.normalizers import ClippedSoftmax, Entmax, ReLU, Softmax, Softmax1, Sparsemax
from quantsink.eval.lab.quantize import BLOCK
from quantsink.eval.lab.trigger import HeadWeights, Solved, Task, Training, head_weights, solved, strong_heads, trained
from quantsink.progress import Progress

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
LONG = 256
"""Tokens in which 8 bits are measured: four blocks of keys."""
CALIBRATED = 64
"""Tokens a sequence, and sequences, that calibration reads."""


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

    @property
    def agrees(self) -> bool:
        return self.found == self.true


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

    @property
    def strong_in_all(self) -> float:
        """Of all layers."""
        return sum(self.strong)

    @property
    def learned(self) -> float | None:
        """Weight of the first head on learnable sinks; None where there are none."""
        return self.heads[0].learned or None

    @property
    def with_learned(self) -> float | None:
        """The same together with the weight on BOS."""
        return None if self.learned is None else self.heads[0].bos + self.learned

    @property
    def closed(self) -> dict[str, float]:
        """By method, the share of `block`'s error that is gone."""
        return {method: 1 - error / self.errors[BLOCK] for method, error in self.errors.items()}


@torch.no_grad()
def run_one(job: Job) -> TriggerRun:
    model = trained(job.task, job.spec, job.seed, job.training, job.layers, job.heads)
    generator = torch.Generator().manual_seed(FRESH + job.seed)
    batch = job.task.batch(job.measured, generator)
    record: list[Tensor] = []
    output = model.run(batch.features, record=record)
    long = dataclasses.replace(job.task, length=LONG).batch(max(job.measured // 256, 8), generator)
    calibration = calibrate_and_quantize(model, job.task, generator) if job.spec.expressible else None
    sinks = 1 + record[0].shape[-1] - record[0].shape[-2]
    ways, parts = methods(sinks, LONG + sinks - 1, job.seed), single_parts(sinks)
    exact, outputs = outputs_in_8_bits(model, long.features, ways | parts)
    return TriggerRun(
        name=job.spec.name,
        seed=job.seed,
        layers=job.layers,
        length=job.task.length,
        own=job.task.own,
        steps=job.training.steps,
        solved=solved(output, batch),
        heads=tuple(head for layer, w in enumerate(record) for head in head_weights(w, batch, layer)),
        strong=tuple(strong_heads(w, batch, STRONG) for w in record),
        solved_long=solved(exact, long).share,
        long_sequences=len(long.features),
        errors={method: relative_error(outputs[method], exact) for method in METHODS},
        parts={part: relative_error(outputs[part], exact) for part in parts},
        solved_8_bits={method: solved(outputs[method], long).share for method in METHODS},
        calibrated=calibration,
    )


def calibrate_and_quantize(model: FeatureModel, task: Task, generator: torch.Generator) -> Calibrated:
    batch = dataclasses.replace(task, length=CALIBRATED).batch(CALIBRATED, generator)
    record: list[Tensor] = []
    exact = model.run(batch.features, record=record)
    mass = weight_by_head(record, 0, FIRST_ROW)
    quantized, named, difference = calibrated(model, batch.features, CALIBRATED, mass)
    output = quantized(batch.features)
    return Calibrated(named, sink_heads(mass), difference, relative_error(output, exact), solved(output, batch).share)


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
    every = []
    for seed in range(scale.seeds):
        every += [Job(spec, seed, task, deep, LAYERS, HEADS, scale.measured) for spec in DEEP]
    for seed in range(scale.seeds):
        every += [Job(spec, seed, task, training, measured=scale.measured) for spec in VARIANTS]
        every += [Job(spec, seed, strict, training, measured=scale.measured) for spec in DEEP]
    return every


def run_trigger(scale: Scale = FULL, progress: Progress | None = None, workers: int | None = None) -> list[TriggerRun]:
    """All of it; each seed's training, sequences and figures depend on the seed alone."""
    return run_jobs(run_one, jobs(scale), name="trigger task", progress=progress, workers=workers)
