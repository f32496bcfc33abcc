"""What all trainings share."""

import pytest
import torch
from torch import nn

from quantsink.errors import QuantSinkError
from quantsink.eval.lab.training import descend, final_loss


def test_a_step_clips_the_gradient_to_norm_1_and_moves_the_schedule() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    loss = descend(model, model(torch.tensor([[30.0, 40.0]])).sum(), optimizer, schedule)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.3, 0.4]]))
    assert not loss.requires_grad
    assert schedule.get_last_lr() == pytest.approx([0.05])


def test_a_loss_that_is_not_finite_names_variant_and_seed() -> None:
    assert final_loss([torch.tensor(1.0), torch.tensor(3.0)], "softmax", 7) == 2
    with pytest.raises(QuantSinkError, match=r"^softmax, seed 7: the training diverged; give a lower rate$"):
        final_loss([torch.tensor(1.0), torch.tensor(torch.nan)], "softmax", 7)
