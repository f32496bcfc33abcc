"""The trigger task: a head that must stay silent until a trigger comes, and what it does with its weight until then.

A sequence is a BOS token, plain tokens and one trigger. Each token carries three flags (BOS, trigger, plain) and a
content vector from a standard normal distribution; the BOS token's is zero. At the trigger the model must output the
mean of the non-BOS tokens that it has seen by then, at every other token zero. Softmax can only output zero by giving
its weight to a token whose value is zero (Ran-Milo, "Attention sinks are provably necessary in softmax transformers",
arXiv 2603.11487, 2026).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.model import FeatureModel, LabConfig
from quantsink.eval.lab.training import descend, final_loss

BOS, TRIGGER, PLAIN = range(3)
FLAGS = 3
TOLERANCE = 0.1
"""Largest error of any number of an output that counts as right; a content's numbers have variance 1."""


@dataclass(frozen=True, eq=False)
class Batch:
    """`features` `[B, L, 3 + size]`, `targets` `[B, L, size]`, `trigger` `[B]`: where each sequence's trigger is."""

    features: Tensor
    targets: Tensor
    trigger: Tensor

    @property
    def plain(self) -> Tensor:
        """`[B, L]`: neither BOS nor trigger."""
        return self.features[..., PLAIN] == 1


@dataclass(frozen=True)
class Task:
    """Sequences of `length` tokens, contents of `size` numbers.

    own: the trigger's own content belongs to the mean, so that as many tokens count as its query sees besides the BOS
        (the number that ReLU attention divides by). False: only the tokens before it.
    """

    length: int = 16
    size: int = 8
    own: bool = True

    def batch(self, count: int, generator: torch.Generator) -> Batch:
        content = torch.randn(count, self.length, self.size, generator=generator)
        content[:, 0] = 0
        trigger = torch.randint(1 if self.own else 2, self.length, (count,), generator=generator)
        row = torch.arange(count)
        flags = torch.zeros(count, self.length, FLAGS)
        flags[:, 0, BOS] = 1
        flags[:, 1:, PLAIN] = 1
        flags[row, trigger] = torch.eye(FLAGS)[TRIGGER]
        last = trigger if self.own else trigger - 1
        targets = torch.zeros_like(content)
        targets[row, trigger] = content.cumsum(1)[row, last] / last[:, None]
        return Batch(torch.cat([flags, content], -1), targets, trigger)


@dataclass(frozen=True)
class Training:
    """How long and how fast: Adam, one cycle of the learning rate up to `rate`, gradients clipped to norm 1."""

    steps: int = 800
    rate: float = 1e-2
    sequences: int = 128


def model_for(
    task: Task, spec: AttentionSpec | tuple[AttentionSpec, ...], layers: int = 1, heads: int = 1
) -> FeatureModel:
    """One layer is attention alone; more add to a residual. No MLP, no norm, no positions: none is needed."""
    config = LabConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=16 if heads == 1 else 8,
        inputs=FLAGS + task.size,
        outputs=task.size,
        residual=layers > 1,
    )
    return FeatureModel(config, spec)


@torch.enable_grad()
def train(model: FeatureModel, task: Task, training: Training, seed: int) -> float:
    """Fit `model` in place on fresh sequences; the mean loss of the last tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), training.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, training.steps, pct_start=0.1)
    losses = []
    model.train()
    for _ in range(training.steps):
        batch = task.batch(training.sequences, generator)
        loss = (model(batch.features) - batch.targets).square().sum(-1).mean()
        losses.append(descend(model, loss, optimizer, schedule))
    model.train(False)
    return final_loss(losses[-max(training.steps // 10, 1) :], model.specs[0].name, seed)


def trained(
    task: Task,
    spec: AttentionSpec | tuple[AttentionSpec, ...],
    seed: int,
    training: Training = Training(),
    layers: int = 1,
    heads: int = 1,
) -> FeatureModel:
    """A new model, fitted; the same numbers for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_for(task, spec, layers, heads)
    train(model, task, training, seed)
    return model


@dataclass(frozen=True)
class Solved:
    """How well the task is done. `trigger`, `elsewhere`: shares of positions whose error is within the tolerance."""

    trigger: float
    elsewhere: float
    error: float
    """Mean over positions of the largest error among an output's numbers."""
    error_trigger: float

    @property
    def share(self) -> float:
        """The worse of the two: an output of zeros would be right nearly everywhere."""
        return min(self.trigger, self.elsewhere)


def solved(output: Tensor, batch: Batch) -> Solved:
    error = (output - batch.targets).abs().amax(-1).double()
    right = (error <= TOLERANCE).double()
    at = torch.zeros_like(batch.plain)
    at[torch.arange(len(at)), batch.trigger] = True
    return Solved(float(right[at].mean()), float(right[~at].mean()), float(error.mean()), float(error[at].mean()))


@dataclass(frozen=True)
class HeadWeights:
    """What one head does with its weight at plain tokens; means over rows unless said otherwise.

    bos: on the BOS token. learned: on learnable sinks. total: the whole row, 1 with softmax.
    entropy: of the row divided by its sum, over log(keys seen); None where no row has weight.
    largest, smallest: a row's largest and smallest weight on a key that it sees.
    """

    layer: int
    head: int
    bos: float
    learned: float
    total: float
    entropy: float | None
    largest: float
    smallest: float


def head_weights(weights: Tensor, batch: Batch, layer: int) -> list[HeadWeights]:
    """Of `[B, H, L, S + L]`, S learnable sinks before the tokens."""
    sinks = weights.shape[-1] - weights.shape[-2]
    length = weights.shape[-2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = torch.cat([seen.new_ones(length, sinks), seen], 1)
    heads = []
    for head in range(weights.shape[1]):
        rows = weights[:, head].double()[batch.plain]
        visible = seen.expand(len(weights), -1, -1)[batch.plain]
        total = rows.sum(-1)
        awake = total > 0
        p = rows[awake] / total[awake, None]
        entropy = -torch.xlogy(p, p).sum(-1) / visible[awake].sum(-1).log()
        smallest = rows.masked_fill(~visible, torch.inf).amin(-1)
        heads.append(
            HeadWeights(
                layer,
                head,
                bos=float(rows[:, sinks].mean()),
                learned=float(rows[:, :sinks].sum(-1).mean()),
                total=float(total.mean()),
                entropy=float(entropy.mean()) if bool(awake.any()) else None,
                largest=float(rows.amax(-1).mean()),
                smallest=float(smallest.mean()),
            )
        )
    return heads


def strong_heads(weights: Tensor, batch: Batch, strong: float = 0.8) -> float:
    """Mean number a sequence of one layer's heads whose plain tokens give the BOS token `strong` of their weight."""
    sinks = weights.shape[-1] - weights.shape[-2]
    bos = weights[..., sinks].double() * batch.plain[:, None]
    mean = bos.sum(-1) / batch.plain.sum(-1)[:, None]
    return float((mean >= strong).double().sum(1).mean())
