"""What all trainings share: one step of descent, and the loss at the end."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantsink.errors import QuantSinkError
from quantsink.eval.lab.mechanisms import clip_gradients


def descend(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer, schedule: Any) -> Tensor:
    """One step, learnable sinks clipped by their own limit and all gradients to norm 1; the loss, detached."""
    optimizer.zero_grad()
    loss.backward()
    clip_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach()


def final_loss(losses: Sequence[Tensor], name: str, seed: int) -> float:
    """Mean of the last losses of a training.

    Raises:
        QuantSinkError: it is not finite.
    """
    loss = float(torch.stack(list(losses)).mean())
    if not math.isfinite(loss):
        raise QuantSinkError(f"{name}, seed {seed}: the training diverged; give a lower rate")
    return loss
