"""The vision experiment: where a small vision transformer's weight goes, with a content gate and without.

scikit-learn's digits (1,797 pictures of 8 x 8, no network), cut into 16 patches of 2 x 2 behind a [CLS] token. Every
model is trained here, and looked at, put into 8 bits and given to quantsink's calibration on pictures it never saw.
"""

import copy
import functools
import importlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from quantsink.calibration.calibrate import calibrate
from quantsink.calibration.routing import plan
from quantsink.errors import QuantSinkError, UsageError
from quantsink.eval.lab.attention import AttentionSpec, LabAttention
from quantsink.eval.lab.jobs import Progress, run_jobs
from quantsink.eval.lab.mechanisms import ContentSink, OutputGate, OutputGatePart
from quantsink.eval.lab.model import LabConfig, PictureModel, border
from quantsink.eval.lab.normalizers import Softmax
from quantsink.eval.lab.quantize import Bits, in_8_bits
from quantsink.eval.lab.trigger_runs import methods, relative
from quantsink.hf.convert import apply

SIDE = 4
"""Patches along a picture's side."""
PATCHES = SIDE * SIDE
TOKENS = 1 + PATCHES
LAYERS, HEADS = 3, 4
NONE = AttentionSpec(Softmax(), causal=False)
GATE = AttentionSpec(Softmax(), (OutputGate(),), causal=False)
CONTENT = AttentionSpec(Softmax(), (ContentSink(),), causal=False)
VARIANTS = (NONE, GATE, CONTENT)
SINK_HEAD, STRONG = 0.3, 0.8
"""Mean weight on [CLS] of a sink head, and of a strong one."""
BORDER_HEAD = 0.9
"""Mean weight on border patches of a head that prefers them: uniform attention gives them 12/17 = 0.706."""
BLANK_HEAD = 1.5
"""Weight on blank patches, times what uniform attention gives them, of a head that prefers them."""
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
        raise UsageError("the digits come with scikit-learn, which is missing; pip install 'quantsink[lab]'") from error
    found = datasets.load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target, dtype=torch.long)
    return Pictures(pixels, labels, *split(labels, TEST, SPLIT_SEED))


def split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices for training and for test, `share` of each class: disjoint, everything, each in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    train, test = [], []
    for label in labels.unique():
        own = (labels == label).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator)]
        count = round(share * len(own))
        test.append(own[:count])
        train.append(own[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def patches(pixels: Tensor) -> Tensor:
    """`[B, 16, 4]`: what the model reads of each patch, row by row."""
    size = pixels.shape[-1] // SIDE
    return pixels[:, 0].unfold(1, size, size).unfold(2, size, size).flatten(3).flatten(1, 2)


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
        means = each.mean(-1), each.var(-1, correction=0), (each == 0).all(-1).double()
        return cls(*(tuple(found.mean(0).tolist()) for found in means))

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
def train(model: PictureModel, given: Pictures, training: Training, seed: int) -> float:
    """Fit `model` in place to the training pictures, no augmentation; the last epoch's mean loss.

    Raises:
        QuantSinkError: the training diverged.
    """
    generator = torch.Generator().manual_seed(seed)
    each = len(given.train) // training.pictures
    optimizer = torch.optim.AdamW(model.parameters(), training.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, each * training.epochs, pct_start=0.1)
    losses = []
    model.train()
    for _ in range(training.epochs):
        order = given.train[torch.randperm(len(given.train), generator=generator)]
        for batch in order[: each * training.pictures].split(training.pictures):
            loss = cross_entropy(model(given.pixels[batch]).logits, given.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    model.train(False)
    found = float(torch.stack(losses[-each:]).mean())
    if not math.isfinite(found):
        raise QuantSinkError(f"{model.specs[0].name}, seed {seed}: the training diverged; give a lower rate")
    return found


def trained(spec: AttentionSpec, seed: int, training: Training, given: Pictures) -> tuple[PictureModel, float]:
    """A new model, fitted, and its loss; the same numbers for the same arguments. All variants of a seed start from the
    same weights, but for those that only they have.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain, model = model_for(NONE), model_for(spec)
    model.load_state_dict(plain.state_dict(), strict=False)
    return model, train(model, given, training, seed)


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


@dataclass(frozen=True)
class Job:
    spec: AttentionSpec
    seed: int
    training: Training


@torch.no_grad()
def run_one(job: Job) -> VisionRun:
    given = digits()
    model, loss = trained(job.spec, job.seed, job.training, given)
    pixels, labels = given.pixels[given.test], given.labels[given.test]
    record: list[Tensor] = []
    logits = model.run(pixels, record=record)[:, 0]
    errors, right, exact = _in_8_bits(model, pixels, labels, job.seed)
    return VisionRun(
        name=job.spec.name,
        seed=job.seed,
        pictures=len(pixels),
        steps=len(given.train) // job.training.pictures * job.training.epochs,
        loss=loss,
        accuracy=accuracy(logits, labels),
        places=Places.of(pixels),
        heads=tuple(found for layer, w in enumerate(record) for found in head_weights(w, pixels, layer)),
        received=tuple(_received(w[:, :, 1:]) for w in record),
        received_from_cls=tuple(_received(w[:, :, :1]) for w in record),
        gates=gate_values(model, pixels),
        errors=errors,
        accuracy_8_bits=right,
        accuracy_exact=exact,
        calibrated=_calibrated(model, given) if job.spec.expressible else None,
    )


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


def head_weights(weights: Tensor, pixels: Tensor, layer: int) -> list[HeadWeights]:
    """Of one layer's weights `[B, H, 17, 17]` over the pictures `[B, 1, 8, 8]`."""
    each = patches(pixels).double()
    blank = (each == 0).all(-1)
    uniform = float(blank.double().sum(-1).mean()) / TOKENS
    found = []
    for head in range(weights.shape[1]):
        own = weights[:, head].double()
        received = own[:, 1:, 1:].mean(1)
        found.append(
            HeadWeights(
                layer,
                head,
                _rows(own[:, 1:]),
                _rows(own[:, :1]),
                float((received * blank).sum(-1).mean()) / uniform if uniform else 0.0,
                _follows(each.mean(-1), received),
                _follows(each.var(-1, correction=0), received),
            )
        )
    return found


def _rows(weights: Tensor) -> Rows:
    entropy = -torch.xlogy(weights, weights).sum(-1).mean() / math.log(TOKENS)
    return Rows(
        float(weights[..., 0].mean()), float(weights[..., 1:][..., border(SIDE)].sum(-1).mean()), float(entropy)
    )


def _follows(own: Tensor, received: Tensor) -> Follows:
    """Of `[B, 16]` each."""
    return Follows(
        correlation(own.mean(0), received.mean(0)),
        correlation((own - own.mean(0)).flatten(), (received - received.mean(0)).flatten()),
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
        layer.register_forward_pre_hook(lambda module, given: seen.__setitem__(module, given[0])) for layer in layers
    ]
    try:
        model.run(pixels)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for index, layer in enumerate(layers):
        for part in layer.mechanisms:
            if isinstance(part, OutputGatePart):
                gate = part.gate(seen[layer]).double()
                own = gate[:, :, 1:]
                spread = float(own.std((0, 2, 3), correction=0).mean())
                found.append(GateValues(index, float(own.mean()), float(gate[:, :, 0].mean()), spread))
    return tuple(found)


def _in_8_bits(
    model: PictureModel, pixels: Tensor, labels: Tensor, seed: int
) -> tuple[dict[str, float], dict[str, float], float]:
    """Error and accuracy by method, accuracy in float64."""
    model, x = copy.deepcopy(model).double(), pixels.double()

    def logits(bits: Bits | None) -> Tensor:
        with in_8_bits(model, bits):
            return model.run(x)[:, 0]

    exact = logits(None)
    found = {name: logits(bits) for name, bits in methods(1, TOKENS, seed).items()}
    errors = {name: relative(own, exact) for name, own in found.items()}
    return errors, {name: accuracy(own, labels) for name, own in found.items()}, accuracy(exact, labels)


def _calibrated(model: PictureModel, given: Pictures) -> Calibrated:
    pixels = given.pixels[given.train[:: len(given.train) // CALIBRATED][:CALIBRATED]]
    record: list[Tensor] = []
    model.run(pixels, record=record)
    calibration = calibrate(model, None, pixels, seq_len=TOKENS, query_rows=None)
    true, last = _by_head(record, 0), _by_head(record, -1)
    found = {(head.layer, head.head): head for head in calibration.heads()}
    quantized = copy.deepcopy(model)
    apply(quantized, plan(calibration, "w8a8"))
    test = given.pixels[given.test]
    exact, logits = model(test).logits, quantized(test).logits
    return Calibrated(
        tuple(key for key, head in found.items() if head.sink),
        tuple(key for key, mass in true.items() if mass >= SINK_HEAD),
        tuple(key for key, mass in last.items() if mass >= SINK_HEAD),
        max(abs(found[key].bos_mass - mass) for key, mass in true.items()),
        relative(logits, exact),
        accuracy(logits, given.labels[given.test]),
    )


def _by_head(record: list[Tensor], key: int) -> dict[tuple[int, int], float]:
    """Mean weight on one key of all queries, the [CLS] query among them, as calibration counts an encoder's."""
    means = [weights[..., key].double().mean((0, 2)).tolist() for weights in record]
    return {(layer, head): mean for layer, own in enumerate(means) for head, mean in enumerate(own)}


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
