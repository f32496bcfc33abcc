"""Calibration on trained models whose sink heads are known from their weights: the laboratory's trigger task."""

import copy
from typing import Any

import pytest
import torch

import quantsink
from quantsink.calibration.collect import FIRST_ROW
from quantsink.errors import ArchitectureError, UsageError
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.mechanisms import OutputGate, SinkBias
from quantsink.eval.lab.model import FeatureModel
from quantsink.eval.lab.normalizers import ReLU, Softmax, Softmax1
from quantsink.eval.lab.trigger import Batch, Task, Training, model_for, solved, trained

pytestmark = pytest.mark.real
LENGTH, SEQUENCES = 48, 24
DEEP = {"layers": 4, "heads": 4, "training": Training(400, 5e-3)}
MODELS: dict[str, tuple[AttentionSpec, dict[str, Any]]] = {
    "softmax": (AttentionSpec(), {"training": Training(400)}),
    "softmax1": (AttentionSpec(Softmax1()), {"training": Training(400)}),
    "gate": (AttentionSpec(Softmax(), (OutputGate(),)), {"training": Training(400)}),
    "four layers": (AttentionSpec(), DEEP),
}


@pytest.fixture(scope="module")
def models() -> dict[str, FeatureModel]:
    return {name: trained(Task(), spec, 0, **options) for name, (spec, options) in MODELS.items()}


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Task(LENGTH).batch(SEQUENCES, torch.Generator().manual_seed(5))


def true_mass(model: FeatureModel, x: torch.Tensor) -> dict[tuple[int, int], float]:
    """By (layer, head): mean recorded weight on the first token, in float64, of the rows that calibration counts."""
    record: list[torch.Tensor] = []
    with torch.no_grad():
        copy.deepcopy(model).double().run(x.double(), record=record)
    means = [weights[:, :, FIRST_ROW:, 0].mean((0, 2)) for weights in record]
    return {(layer, head): float(mass) for layer, masses in enumerate(means) for head, mass in enumerate(masses)}


@pytest.mark.parametrize("name", MODELS)
def test_calibration_finds_the_true_sink_heads(models: dict[str, FeatureModel], batch: Batch, name: str) -> None:
    true = true_mass(models[name], batch.features)
    calibration = quantsink.calibrate(models[name], None, batch.features, seq_len=LENGTH, query_rows=None)
    for head in calibration.heads():
        mass = true[head.layer, head.head]
        assert head.bos_mass == pytest.approx(mass, abs=1e-4), (head.layer, head.head)
        assert head.sink == (mass >= 0.3), (head.layer, head.head)
    assert sum(len(stats.heads) for stats in calibration.statistics.values()) == len(models[name].blocks)
    if name == "four layers":
        assert 0 < sum(mass >= 0.3 for mass in true.values()) < len(true), "the model has sink heads and other heads"
    else:
        assert true[0, 0] >= (0.3 if name == "softmax1" else 0.9)


@pytest.mark.parametrize("name", ["softmax", "softmax1", "gate"])
def test_the_quantized_model_still_does_the_task(models: dict[str, FeatureModel], batch: Batch, name: str) -> None:
    model = copy.deepcopy(models[name])
    calibration = quantsink.calibrate(model, None, batch.features, seq_len=LENGTH)
    with torch.no_grad():
        exact = model(batch.features)
        output = quantsink.quantize(model, calibration, recipe="w8a8")(batch.features)
    assert not torch.equal(output, exact)
    assert solved(exact, batch).share >= 0.99
    assert solved(output, batch).share >= 0.99


def test_windows_and_tokens_of_vectors_are_counted(models: dict[str, FeatureModel], batch: Batch) -> None:
    calibration = quantsink.calibrate(models["softmax"], None, batch.features, seq_len=LENGTH)
    (domain,) = calibration.domains
    assert (domain.name, domain.windows, domain.tokens) == ("vectors", SEQUENCES, SEQUENCES * LENGTH)
    again = quantsink.calibrate(models["softmax"], None, batch.features, seq_len=LENGTH)
    assert again.domains[0].fingerprint == domain.fingerprint
    other = quantsink.calibrate(models["softmax"], None, batch.features + 0.01, seq_len=LENGTH)
    assert other.domains[0].fingerprint != domain.fingerprint


@pytest.mark.parametrize("spec", [AttentionSpec(ReLU()), AttentionSpec(Softmax(), (SinkBias(),))])
def test_attention_that_the_interface_cannot_express_is_refused(spec: AttentionSpec, batch: Batch) -> None:
    with pytest.raises(ArchitectureError, match="its attention did not go through transformers' attention interface"):
        quantsink.calibrate(model_for(Task(), spec), None, batch.features, seq_len=LENGTH)


@pytest.mark.parametrize("shape", [(4, 11), (4, 3, 8, 8), (0, 48, 11)])
def test_a_tensor_of_another_kind_is_refused(models: dict[str, FeatureModel], shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"where FeatureModel takes inputs_embeds; give text, \[N, C, H, W\] pictures"):
        quantsink.calibrate(models["softmax"], None, torch.zeros(shape), seq_len=LENGTH)
    with pytest.raises(UsageError, match="FeatureModel takes inputs_embeds; give a tensor of them as data"):
        quantsink.calibrate(models["softmax"], None, "builtin:prose")
