"""The vision experiment: its pictures, its measures against hand-made weights, and one quick run end to end."""

import dataclasses
import importlib
import json
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from quantsink.errors import QuantSinkError, UsageError
from quantsink.eval.lab import vision
from quantsink.eval.lab.model import border
from quantsink.eval.lab.vision import (
    CONTENT,
    GATE,
    NONE,
    PLACES,
    TOKENS,
    Places,
    Scale,
    Training,
    VisionRun,
    accuracy,
    correlation,
    digits,
    gate_values,
    head_weights,
    model_for,
    patches,
    place_of,
    run_vision,
    split,
    trained,
)

INSIDE = (5, 6, 9, 10)
"""Of 4 x 4 patches, row by row."""


def test_the_split_is_disjoint_complete_and_stratified() -> None:
    given = digits()
    train, test = set(given.train.tolist()), set(given.test.tolist())
    assert not train & test
    assert train | test == set(range(1797))
    for digit in range(10):
        count = int((given.labels == digit).sum())
        assert int((given.labels[given.test] == digit).sum()) == round(0.3 * count)
    assert (len(train), len(test)) == (1258, 539)


def test_the_split_depends_on_its_seed_alone() -> None:
    labels = torch.arange(200) % 4
    torch.manual_seed(1)
    one = split(labels, 0.25, 7)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(one, split(labels, 0.25, 7), strict=True))
    assert not torch.equal(one[1], split(labels, 0.25, 8)[1])


def test_pictures_are_scaled_and_belong_to_their_labels() -> None:
    given, source = digits(), importlib.import_module("sklearn.datasets").load_digits()
    assert given.pixels.shape == (1797, 1, 8, 8)
    assert (float(given.pixels.min()), float(given.pixels.max())) == (0.0, 1.0)
    assert torch.equal(given.pixels[321, 0], torch.tensor(source.images[321] / 16, dtype=torch.float32))
    assert int(given.labels[321]) == source.target[321]


def test_patches_are_cut_row_by_row_and_the_model_reads_the_same() -> None:
    pixels = torch.rand(3, 1, 8, 8)
    found = patches(pixels)
    for row in range(4):
        for column in range(4):
            corner = pixels[:, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(found[:, 4 * row + column], corner.reshape(3, 4))
    model = model_for(NONE)
    with torch.no_grad():
        embedded = model.embedded(pixels)
        torch.testing.assert_close(embedded[:, 1:], model.embed(found) + model.position[1:])
        torch.testing.assert_close(embedded[:, 0], (model.start + model.position[0]).expand(3, -1))


def test_the_border_and_the_kinds_of_places() -> None:
    assert [place for place in range(16) if not border(4)[place]] == list(INSIDE)
    assert [PLACES.index(place_of(place)) for place in range(16)] == [0, 2, 2, 0, 1, 3, 3, 1, 1, 3, 3, 1, 0, 2, 2, 0]


def test_facts_of_places_against_a_picture_made_by_hand() -> None:
    pixels = torch.zeros(2, 1, 8, 8)
    pixels[0, 0, 2:4, 4:6] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    found = Places.of(pixels)
    place = 1 * 4 + 2
    assert found.intensity[place] == 0.25
    assert found.variance[place] == 0.125
    assert found.blank[place] == 0.5
    assert sum(found.intensity) == 0.25
    assert sum(found.blank) == 15.5
    assert found.blank_uniform == 15.5 / 17


def test_weights_made_by_hand() -> None:
    """Head 0: patches give [CLS] 0.4 and each border patch 0.05; the [CLS] query looks at itself. Head 1: uniform."""
    weights = torch.zeros(2, 2, TOKENS, TOKENS)
    weights[:, 0, 1:, 0] = 0.4
    weights[:, 0, 1:, 1:][..., border(4)] = 0.05
    weights[:, 0, 0, 0] = 1
    weights[:, 1] = 1 / TOKENS
    pixels = torch.ones(2, 1, 8, 8)
    pixels[0, 0, :2, :2] = 0  # one blank patch in one of two pictures, and at the border
    first, second = head_weights(weights, pixels, 2)
    assert (first.layer, first.head, second.head) == (2, 0, 1)
    assert first.patches.cls == pytest.approx(0.4)
    assert first.patches.border == pytest.approx(0.6)
    entropy = -(0.4 * math.log(0.4) + 12 * 0.05 * math.log(0.05)) / math.log(17)
    assert first.patches.entropy == pytest.approx(entropy)
    assert dataclasses.astuple(first.cls) == (1.0, 0.0, 0.0)
    assert first.blank == pytest.approx(0.05 * 17)
    assert dataclasses.astuple(second.patches) == pytest.approx((1 / 17, 12 / 17, 1))
    assert second.blank == pytest.approx(1)
    assert dataclasses.astuple(second.intensity) == (0.0, 0.0)


def test_weight_that_follows_ink_does_so_between_places_or_within_them() -> None:
    """Head 0: more weight at inked places, whatever the picture. Head 1: less in those pictures that have the ink."""
    pixels = torch.zeros(2, 1, 8, 8)
    pixels[:, 0, :, 4:] = 0.5
    pixels[0, 0, :2, 4:6] = 1
    ink = patches(pixels).mean(-1)
    weights = torch.zeros(2, 2, TOKENS, TOKENS)
    weights[:, 0, :, 1:] = ink.mean(0)
    weights[:, 1, :, 1:] = 0.5 - 0.3 * (ink - ink.mean(0))[:, None]
    first, second = head_weights(weights, pixels, 0)
    assert first.intensity.places == pytest.approx(1)
    assert first.intensity.within == 0
    assert second.intensity.places == pytest.approx(0, abs=1e-6)
    assert second.intensity.within == pytest.approx(-1)


def test_correlation_is_pearsons() -> None:
    a, b = torch.randn(50).double(), torch.randn(50).double()
    assert correlation(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]))[0, 1]))
    assert correlation(a, torch.ones(50).double()) == 0


def test_gate_values_of_a_gate_made_by_hand() -> None:
    model: Any = model_for(GATE)
    parts = [block.attention.mechanisms[0] for block in model.blocks]
    with torch.no_grad():
        for part in parts:
            part.gate_proj.weight.zero_()
        parts[1].gate_bias.fill_(-2.0)
        found = gate_values(model, torch.rand(5, 1, 8, 8))
    assert [gate.layer for gate in found] == [0, 1, 2]
    expected = [1 / (1 + math.exp(-x)) for x in (1, -2, 1)]
    assert [gate.patches for gate in found] == pytest.approx(expected)
    assert [gate.cls for gate in found] == pytest.approx(expected)
    assert [gate.spread for gate in found] == pytest.approx([0, 0, 0], abs=1e-6)
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert gate_values(model_for(NONE), torch.rand(1, 1, 8, 8)) == ()


def test_the_spread_is_of_tokens_and_not_of_heads() -> None:
    """Between heads gates differ; that is no answer to content."""
    model: Any = model_for(GATE)
    part = model.blocks[0].attention.mechanisms[0]
    with torch.no_grad():
        part.gate_proj.weight.zero_()
        part.gate_bias.copy_(torch.tensor([-3.0, -1.0, 1.0, 3.0]))
        still = gate_values(model, torch.rand(4, 1, 8, 8))[0].spread
        part.gate_proj.weight.normal_()
        moved = gate_values(model, torch.rand(4, 1, 8, 8))[0].spread
    assert still < 1e-6 < 1e-2 < moved


def test_a_training_depends_on_its_seed_alone() -> None:
    def parameters(seed: int, outer: int) -> Tensor:
        torch.manual_seed(outer)
        before = torch.random.get_rng_state()
        model, _ = trained(GATE, seed, Training(1, 1e-2, 256), digits())
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([own.detach().flatten() for own in model.parameters()])

    one = parameters(3, 0)
    assert torch.equal(one, parameters(3, 1))
    assert not torch.equal(one, parameters(4, 0))


def test_digits_are_learned_and_no_test_picture_is_read() -> None:
    given = digits()
    pixels = given.pixels.clone()
    pixels[given.test] = torch.nan
    model, loss = trained(NONE, 0, Training(6), dataclasses.replace(given, pixels=pixels))
    with torch.no_grad():
        logits = model(given.pixels[given.test]).logits
    assert loss < 1.8
    assert accuracy(logits, given.labels[given.test]) > 0.4, "guesses would have 0.1"


def test_a_diverged_training_names_variant_and_seed() -> None:
    given = digits()
    broken = dataclasses.replace(given, pixels=given.pixels * torch.nan)
    with pytest.raises(QuantSinkError, match=r"softmax \+ gate, seed 5: the training diverged; give a lower rate"):
        trained(GATE, 5, Training(1, 1e-2, 256), broken)


def test_missing_scikit_learn_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "digits", digits.__wrapped__)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'quantsink\[lab\]'") as caught:
        run_vision(Scale(1, 1))
    assert "\n" not in str(caught.value)


def test_a_quick_run(vision_runs: list[VisionRun]) -> None:
    assert [run.name for run in vision_runs] == [NONE.name, GATE.name, CONTENT.name]
    for run in vision_runs:
        assert run.pictures == 539
        assert run.steps == 1258 // 64
        assert len(run.heads) == 12
        assert run.errors["block"] == run.errors["row"]
        assert 0 < run.errors["block"] < 0.1
        assert len({run.errors[name] for name in ("fixed", "block", "sink", "random")}) == 4, "each does something else"
        assert run.accuracy_exact == pytest.approx(run.accuracy, abs=2.5 / 539)
        for layer, received in enumerate(run.received):
            own = [head.patches.cls for head in run.heads if head.layer == layer]
            assert sum(received) + sum(own) / 4 == pytest.approx(1, abs=1e-5)
        assert any(abs(a - b) > 1e-4 for a, b in zip(run.received[0], run.received_from_cls[0], strict=True))
    assert [len(run.gates) for run in vision_runs] == [0, 3, 0]
    json.dumps([dataclasses.asdict(run) for run in vision_runs], allow_nan=False)


def test_calibrations_mass_on_cls_is_the_recorded_weights(vision_runs: list[VisionRun]) -> None:
    for run in vision_runs[:2]:
        found = run.calibrated
        assert found is not None
        assert found.largest_difference < 1e-6
        assert set(found.found) == {*found.true, *found.last}
        assert 0 < found.error < 0.1
        assert abs(found.accuracy - run.accuracy) < 0.05
    assert vision_runs[2].calibrated is None


@torch.no_grad()
def test_a_sink_head_is_found_by_calibration() -> None:
    """A head whose every query meets [CLS] alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = model_for(NONE).train(False)
    model.embed.weight.mul_(0.1)
    model.embed.bias.zero_()[0] = 1
    model.start.zero_()[1] = 1
    attention = model.blocks[0].attention
    attention.q_proj.weight[8, :2] = 4
    attention.k_proj.weight[8] = 0
    attention.k_proj.weight[8, 1] = 4
    found = vision.calibrate_and_quantize(model, digits())
    assert (0, 1) in found.true
    assert set(found.found) == {*found.true, *found.last}
    assert found.largest_difference < 1e-6
