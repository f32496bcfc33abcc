"""The trigger task: what is asked, how answers are judged, how weights are read, and that it can be learned."""

import math

import pytest
import torch

from quantsink.errors import QuantSinkError
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.normalizers import ReLU
from quantsink.eval.lab.trigger import (
    BOS,
    PLAIN,
    TRIGGER,
    Batch,
    Task,
    Training,
    head_weights,
    model_for,
    solved,
    strong_heads,
    train,
    trained,
)


@pytest.fixture
def batch() -> Batch:
    return Task(12).batch(64, torch.Generator().manual_seed(3))


def test_a_sequence_is_a_bos_plain_tokens_and_one_trigger(batch: Batch) -> None:
    flags = batch.features[..., :3]
    assert torch.equal(flags.sum(-1), torch.ones(64, 12))
    assert torch.equal(flags[..., BOS].sum(1), flags[:, 0, BOS]), "the BOS comes first and only there"
    assert torch.equal(flags[..., TRIGGER].argmax(1), batch.trigger)
    assert torch.equal(flags[..., TRIGGER].sum(1), torch.ones(64))
    assert batch.trigger.min() == 1
    assert batch.trigger.max() == 11
    assert not bool(batch.features[:, 0, 3:].any())
    assert abs(float(batch.features[:, 1:, 3:].std()) - 1) < 0.05


@pytest.mark.parametrize("own", [True, False])
def test_the_target_is_the_mean_of_the_non_bos_tokens_so_far_and_else_zero(own: bool) -> None:
    batch = Task(9, 3, own).batch(40, torch.Generator().manual_seed(0))
    for row in range(40):
        at = int(batch.trigger[row])
        tokens = batch.features[row, 1 : at + own, 3:]
        expected = torch.zeros(9, 3)
        expected[at] = tokens.mean(0)
        torch.testing.assert_close(batch.targets[row], expected)


def test_without_its_own_content_the_trigger_is_never_the_first_token() -> None:
    assert Task(9, 3, False).batch(400, torch.Generator().manual_seed(0)).trigger.min() == 2


def test_answering_zero_everywhere_does_not_count_as_solved(batch: Batch) -> None:
    found = solved(torch.zeros_like(batch.targets), batch)
    assert found.elsewhere == 1
    assert found.share == found.trigger < 0.1
    assert solved(batch.targets, batch).share == 1


def test_one_number_beyond_the_tolerance_makes_a_position_wrong(batch: Batch) -> None:
    output = batch.targets.clone()
    output[0, 1, 5] += 0.11
    found = solved(output, batch)
    wrong = 1 - found.trigger if int(batch.trigger[0]) == 1 else 1 - found.elsewhere
    assert wrong == pytest.approx(1 / 64 if int(batch.trigger[0]) == 1 else 1 / (64 * 11))


@pytest.mark.parametrize("sinks", [0, 2])
def test_weights_are_read_at_plain_tokens_only(batch: Batch, sinks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(64, 2, 12, sinks + 12, generator=generator, dtype=torch.float64)
    weights[..., sinks:].tril_()
    for found in head_weights(weights, batch, 7):
        values: dict[str, list[float]] = {"bos": [], "learned": [], "total": [], "entropy": [], "largest": []}
        smallest = []
        for row in range(64):
            for query in range(12):
                if not bool(batch.features[row, query, PLAIN]):
                    continue
                own = weights[row, found.head, query, : sinks + query + 1].tolist()
                p = [w / sum(own) for w in own]
                values["bos"].append(own[sinks])
                values["learned"].append(sum(own[:sinks]))
                values["total"].append(sum(own))
                values["entropy"].append(-sum(x * math.log(x) for x in p) / math.log(len(p)))
                values["largest"].append(max(own))
                smallest.append(min(own))
        assert found.layer == 7
        for name, each in values.items():
            assert getattr(found, name) == pytest.approx(sum(each) / len(each)), name
        assert found.smallest == pytest.approx(sum(smallest) / len(smallest))


def test_a_head_without_any_weight_has_no_entropy(batch: Batch) -> None:
    (found,) = head_weights(torch.zeros(64, 1, 12, 12), batch, 0)
    assert found.entropy is None
    assert found.total == found.largest == 0


def test_strong_heads_are_counted_sequence_by_sequence(batch: Batch) -> None:
    weights = torch.zeros(64, 3, 12, 12)
    weights[:, 0, :, 0] = 1
    weights[:16, 1, :, 0] = 0.81
    weights[:, 2, :, 0] = 0.79
    assert strong_heads(weights, batch) == pytest.approx(1.25)


def test_training_depends_on_its_arguments_alone() -> None:
    task, spec = Task(8), AttentionSpec()
    first = trained(task, spec, 3, Training(5))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = trained(task, spec, 3, Training(5))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
    other = trained(task, spec, 4, Training(5))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_a_training_that_diverges_is_an_error() -> None:
    task = Task(8)
    model = model_for(task, AttentionSpec(ReLU()))
    with pytest.raises(QuantSinkError, match=r"^relu, seed 0: the training diverged; give a lower rate$"):
        train(model, task, Training(30, 1e30), 0)
