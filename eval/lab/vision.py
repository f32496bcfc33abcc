"""The vision experiment: where a small vision transformer's weight goes, with a content gate and without.

scikit-learn's digits (1,797 pictures of 8 x 8, no network), cut into 16 patches of 2 x 2 behind a [CLS] token. Every
model is trained here, and looked at, put into 8 bits and given to quantsink's calibration on pictures it never saw.
"""

import functools
import importlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec, LabAttention
from quantsink.eval.lab.jobs import run_jobs
from quantsink.eval.lab.measures import (
    METHODS,
    SINK_HEAD,
    STRONG,
    calibrated,
    methods,
    outputs_in_8_bits,
    relative_error,
    sink_heads,
    weight_by_head,
)
from quantsink.eval.lab.mechanisms import ContentSink, OutputGate, OutputGatePart
from quantsink.eval.lab.model import LabConfig, PictureModel, border
from quantsink.eval.lab.normalizers import Softmax
from quantsink.eval.lab.quantize import BLOCK
from quantsink.eval.lab.seeds import average
from quantsink.eval.lab.training import descend, final_loss
from quantsink.progress import Progress

SIDE = 4
"""Patches along a picture's side."""
PATCHES = SIDE * SIDE
TOKENS = 1 + PATCHES
BORDER = int(border(SIDE).sum())
"""Patches at the border."""
LAYERS, HEADS = 3, 4
NONE = AttentionSpec(Softmax(), causal=False)
GATE = AttentionSpec(Softmax(), (OutputGate(),), causal=False)
CONTENT = AttentionSpec(Softmax(), (ContentSink(),), causal=False)
VARIANTS = (NONE, GATE, CONTENT)
BORDER_HEAD = 0.9
"""Mean weight on border patches of a head that prefers them: uniform attention gives them 12/17 = 0.706."""
BLANK_HEAD = 1.5
"""Weight on blank patches, times what uniform attention gives them, of a head that prefers them."""
PLACES = ("corners", "left and right edge", "top and bottom edge", "inside")
TEST = 0.3
"""Share of each digit's pictures that no training sees."""
SPLIT_SEED = 0
"""One split for all models: figures of different seeds differ by training alone."""
CALIBRATED = 64
"""Training pictures that calibration reads."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """`pixels` `[N, 1, 8, 8]` in 0..1, 0 is blank; `labels` `[N]`; `train`, `test`: which pictures are whose."""

    pixels: Tensor
    labels: Tensor
    train: Tensor
    test: Tensor


@functools.cache
def digits() -> Pictures:
    """All of them, split once.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise UsageError("scikit-learn, which has the digits, is missing; pip install 'quantsink[lab]'") from error
    source = datasets.load_digits()
    pixels = torch.tensor(source.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(source.target, dtype=torch.long)
    return Pictures(pixels, labels, *split(labels, TEST, SPLIT_SEED))


def split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and for test, `share` of each class: disjoint, everything, each in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    train, test = [], []
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        members = members[torch.randperm(len(members), generator=generator)]
        count = round(share * len(members))
        test.append(members[:count])
        train.append(members[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def patches(pixels: Tensor) -> Tensor:
    """`[B, 16, 4]`: what the model reads of each patch, row by row."""
    size = pixels.shape[-1] // SIDE
    return pixels[:, 0].unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)


def place_of(patch: int) -> str:
    """Of a patch, by its number row by row."""
    row, column = divmod(patch, SIDE)
    ends = (0, SIDE - 1)
    if column in ends:
        return PLACES[0] if row in ends else PLACES[1]
    return PLACES[2] if row in ends else PLACES[3]


@dataclass(frozen=True)
class Places:
    """The 16 patches over the test pictures, row by row. `blank`: share of pictures in which all four pixels are 0;
    `intensity`, `variance`: mean over pictures of the mean and the variance of its pixels.
    """

    intensity: tuple[float, ...]
    variance: tuple[float, ...]
    blank: tuple[float, ...]

    @classmethod
    def of(cls, pixels: Tensor) -> "Places":
        each = patches(pixels).double()
        facts = each.mean(-1), each.var(-1, correction=0), (each == 0).all(-1).double()
        return cls(*(tuple(fact.mean(0).tolist()) for fact in facts))

    @property
    def blank_uniform(self) -> float:
        """What uniform attention gives blank patches, together."""
        return sum(self.blank) / TOKENS


@dataclass(frozen=True)
class Training:
    """How long and how fast: AdamW, one cycle of the learning rate up to `rate`, gradients clipped to norm 1."""

    epochs: int = 25
    rate: float = 5e-3
    pictures: int = 64


def model_for(spec: AttentionSpec) -> PictureModel:
    config = LabConfig(
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=8,
        outputs=10,
        residual=True,
        norm=True,
        mlp=64,
        image_size=8,
        patch_size=8 // SIDE,
    )
    return PictureModel(config, spec)


@torch.enable_grad()
def train(model: PictureModel, pictures: Pictures, training: Training, seed: int) -> float:
    """Fit `model` in place to the training pictures, no augmentation; the last epoch's mean loss.

    Raises:
        QuantSinkError: the training diverged.
    """
    generator = torch.Generator().manual_seed(seed)
    each = len(pictures.train) // training.pictures
    optimizer = torch.optim.AdamW(model.parameters(), training.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, each * training.epochs, pct_start=0.1)
    losses = []
    model.train()
    for _ in range(training.epochs):
        order = pictures.train[torch.randperm(len(pictures.train), generator=generator)]
        for batch in order[: each * training.pictures].split(training.pictures):
            loss = cross_entropy(model(pictures.pixels[batch]).logits, pictures.labels[batch])
            losses.append(descend(model, loss, optimizer, schedule))
    model.train(False)
    return final_loss(losses[-each:], model.specs[0].name, seed)


def trained(spec: AttentionSpec, seed: int, training: Training, pictures: Pictures) -> tuple[PictureModel, float]:
    """A new model, fitted, and its loss; the same numbers for the same arguments. All variants of a seed start from the
    same weights, but for those that only they have.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain, model = model_for(NONE), model_for(spec)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model, train(model, pictures, training, seed)


@dataclass(frozen=True)
class Rows:
    """Means over pictures and query tokens: weight on [CLS], on the 12 border patches, entropy over log(17)."""

    cls: float
    border: float
    entropy: float


@dataclass(frozen=True)
class Follows:
    """Pearson correlation of a property of a patch with the weight that patches' queries give it; 0 where one of the
    two does not vary. `places`: of the 16 places' means. `within`: over all pictures, each place's mean taken off.
    """

    places: float
    within: float


@dataclass(frozen=True)
class HeadWeights:
    """What one head does with its weight: `patches`, the patches' queries; `cls`, the [CLS] query.

    blank: patches' queries' weight on blank patches, times what uniform attention gives them.
    """

    layer: int
    head: int
    patches: Rows
    cls: Rows
    blank: float
    intensity: Follows
    variance: Follows


@dataclass(frozen=True)
class GateValues:
    """A layer's gates over test pictures, heads and tokens: mean of the patches', of the [CLS] token's; `spread`: mean
    over heads of the patches' standard deviation. A gate that no content moves has none.
    """

    layer: int
    patches: float
    cls: float
    spread: float


@dataclass(frozen=True)
class Calibrated:
    """What quantsink's own calibration, on training pictures, and `w8a8` make of a model. Heads are (layer, head).

    found: those it calls sink heads. true, last: those whose recorded weights, every query's, give 0.3 or more to
    [CLS], and to the last patch: calibration looks at an encoder's both ends.
    error: of the quantized model's logits on test pictures, relative to the exact ones' norm.
    """

    found: tuple[tuple[int, int], ...]
    true: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]
    largest_difference: float
    """Between calibration's BOS mass of a head and the recorded weights'."""
    error: float
    accuracy: float

    @property
    def agrees(self) -> bool:
        return set(self.found) == {*self.true, *self.last}

    @property
    def sinks(self) -> int:
        return len(self.true)

    @property
    def sinks_at_the_end(self) -> int:
        return len(self.last)


@dataclass(frozen=True)
class InEightBits:
    """Attention in 8 bits by one method: error of the logits, test accuracy, and the error over `block`'s."""

    method: str
    error: float | None
    accuracy: float
    ratio: float | None


@dataclass(frozen=True)
class VisionRun:
    """One trained model. All but `loss` is of test pictures.

    received: by layer, weight that each of the 16 patches gets from patches' queries, mean of the heads;
    received_from_cls: from the [CLS] query. errors, accuracy_8_bits: by method, of the logits with attention in 8 bits
    relative to float64's norm, and of the digits; accuracy_exact: in float64.
    """

    name: str
    seed: int
    pictures: int
    steps: int
    loss: float
    accuracy: float
    places: Places
    heads: tuple[HeadWeights, ...]
    received: tuple[tuple[float, ...], ...]
    received_from_cls: tuple[tuple[float, ...], ...]
    gates: tuple[GateValues, ...]
    errors: dict[str, float]
    accuracy_8_bits: dict[str, float]
    accuracy_exact: float
    calibrated: Calibrated | None
    """None: an attention that transformers' interface cannot express, which calibration refuses."""

    @property
    def head_mean(self) -> HeadWeights:
        return average(self.heads)

    @property
    def layer_means(self) -> list[HeadWeights]:
        return [average([head for head in self.heads if head.layer == layer]) for layer in range(LAYERS)]

    @property
    def strongest(self) -> float:
        """Of all heads, the largest mean weight on [CLS]."""
        return max(head.patches.cls for head in self.heads)

    @property
    def preferring(self) -> dict[str, int]:
        """Heads that prefer a place."""
        return {
            "cls": sum(head.patches.cls >= SINK_HEAD for head in self.heads),
            "cls strongly": sum(head.patches.cls >= STRONG for head in self.heads),
            "cls itself": sum(head.cls.cls >= SINK_HEAD for head in self.heads),
            "border": sum(head.patches.border > BORDER_HEAD for head in self.heads),
            "blank": sum(head.blank > BLANK_HEAD for head in self.heads),
        }

    @property
    def eight_bits(self) -> list[InEightBits]:
        """Exact first."""
        block = self.errors[BLOCK]
        methods = (InEightBits(m, self.errors[m], self.accuracy_8_bits[m], self.errors[m] / block) for m in METHODS)
        return [InEightBits("exact", None, self.accuracy_exact, None), *methods]


@dataclass(frozen=True)
class Job:
    spec: AttentionSpec
    seed: int
    training: Training


@torch.no_grad()
def run_one(job: Job) -> VisionRun:
    pictures = digits()
    model, loss = trained(job.spec, job.seed, job.training, pictures)
    pixels, labels = pictures.pixels[pictures.test], pictures.labels[pictures.test]
    record: list[Tensor] = []
    logits = model.run(pixels, record=record)[:, 0]
    exact, outputs = outputs_in_8_bits(model, pixels, methods(1, TOKENS, job.seed))
    return VisionRun(
        name=job.spec.name,
        seed=job.seed,
        pictures=len(pixels),
        steps=len(pictures.train) // job.training.pictures * job.training.epochs,
        loss=loss,
        accuracy=accuracy(logits, labels),
        places=Places.of(pixels),
        heads=tuple(head for layer, w in enumerate(record) for head in head_weights(w, pixels, layer)),
        received=tuple(_received(w[:, :, 1:]) for w in record),
        received_from_cls=tuple(_received(w[:, :, :1]) for w in record),
        gates=gate_values(model, pixels),
        errors={method: relative_error(output[:, 0], exact[:, 0]) for method, output in outputs.items()},
        accuracy_8_bits={method: accuracy(output[:, 0], labels) for method, output in outputs.items()},
        accuracy_exact=accuracy(exact[:, 0], labels),
        calibrated=calibrate_and_quantize(model, pictures) if job.spec.expressible else None,
    )


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


def head_weights(weights: Tensor, pixels: Tensor, layer: int) -> list[HeadWeights]:
    """Of one layer's weights `[B, H, 17, 17]` over the pictures `[B, 1, 8, 8]`."""
    each = patches(pixels).double()
    blank = (each == 0).all(-1)
    uniform = float(blank.double().sum(-1).mean()) / TOKENS
    heads = []
    for head in range(weights.shape[1]):
        rows = weights[:, head].double()
        received = rows[:, 1:, 1:].mean(1)
        heads.append(
            HeadWeights(
                layer,
                head,
                _rows(rows[:, 1:]),
                _rows(rows[:, :1]),
                float((received * blank).sum(-1).mean()) / uniform if uniform else 0.0,
                _follows(each.mean(-1), received),
                _follows(each.var(-1, correction=0), received),
            )
        )
    return heads


def _rows(weights: Tensor) -> Rows:
    entropy = -torch.xlogy(weights, weights).sum(-1).mean() / math.log(TOKENS)
    return Rows(
        float(weights[..., 0].mean()), float(weights[..., 1:][..., border(SIDE)].sum(-1).mean()), float(entropy)
    )


def _follows(fact: Tensor, received: Tensor) -> Follows:
    """Of a property of each patch and the weight that it gets, `[B, 16]` each."""
    return Follows(
        correlation(fact.mean(0), received.mean(0)),
        correlation((fact - fact.mean(0)).flatten(), (received - received.mean(0)).flatten()),
    )


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-12 else 0.0


def _received(weights: Tensor) -> tuple[float, ...]:
    return tuple(weights[..., 1:].double().mean((0, 1, 2)).tolist())


def gate_values(model: PictureModel, pixels: Tensor) -> tuple[GateValues, ...]:
    """Of each layer that has a gate."""
    seen: dict[LabAttention, Tensor] = {}
    layers = [module for module in model.modules() if isinstance(module, LabAttention)]
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: seen.__setitem__(module, inputs[0])) for layer in layers
    ]
    try:
        model.run(pixels)
    finally:
        for handle in handles:
            handle.remove()
    gates = []
    for index, layer in enumerate(layers):
        for part in layer.mechanisms:
            if isinstance(part, OutputGatePart):
                gate = part.gate(seen[layer]).double()
                patch_gates = gate[:, :, 1:]
                spread = float(patch_gates.std((0, 2, 3), correction=0).mean())
                gates.append(GateValues(index, float(patch_gates.mean()), float(gate[:, :, 0].mean()), spread))
    return tuple(gates)


def calibrate_and_quantize(model: PictureModel, pictures: Pictures) -> Calibrated:
    """[CLS] is the first token of an encoder's sequence, so its weight is what calibration calls BOS mass."""
    pixels = pictures.pixels[pictures.train[:: len(pictures.train) // CALIBRATED][:CALIBRATED]]
    record: list[Tensor] = []
    model.run(pixels, record=record)
    mass = weight_by_head(record, 0)
    quantized, named, difference = calibrated(model, pixels, TOKENS, mass)
    test = pictures.pixels[pictures.test]
    logits = quantized(test).logits
    return Calibrated(
        named,
        sink_heads(mass),
        sink_heads(weight_by_head(record, -1)),
        difference,
        relative_error(logits, model(test).logits),
        accuracy(logits, pictures.labels[pictures.test]),
    )


@dataclass(frozen=True)
class Scale:
    """How much is run: `QUICK` is for tests."""

    seeds: int = 5
    epochs: int = 25


FULL, QUICK = Scale(), Scale(1, 3)


def jobs(scale: Scale) -> list[Job]:
    return [Job(spec, seed, Training(scale.epochs)) for seed in range(scale.seeds) for spec in VARIANTS]


def run_vision(scale: Scale = FULL, progress: Progress | None = None, workers: int | None = None) -> list[VisionRun]:
    """All of it; each seed's training and figures depend on the seed alone.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    digits()
    return run_jobs(run_one, jobs(scale), name="vision", progress=progress, workers=workers)
