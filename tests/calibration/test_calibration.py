"""A calibration: saved and loaded, its means per head, and the models it belongs to."""

import dataclasses
import json
import math

import pytest
import torch

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.calibration import head_means
from quantsink.calibration.statistics import add, empty_heads, measure_window
from quantsink.calibration.stored import FACTS
from quantsink.errors import CalibrationError
from quantsink.models.architecture import Architecture
from quantsink.models.fingerprint import model_fingerprint


@pytest.fixture(scope="module")
def calibration(tiny_llama, tokenizer):
    return calibrate(tiny_llama(), tokenizer, ["builtin:prose", "builtin:code"], seq_len=64, max_tokens=1024)


def test_a_saved_calibration_loads_to_the_same_bits(calibration, tmp_path, same_tensors):
    calibration.save(tmp_path)
    again = Calibration.load(tmp_path)
    assert same_tensors(calibration, again)
    assert again.heads() == calibration.heads()
    assert again.kv_heads() == calibration.kv_heads()
    assert (again.settings, again.domains, again.layers) == (
        calibration.settings,
        calibration.domains,
        calibration.layers,
    )
    facts = json.loads((tmp_path / FACTS).read_text())
    assert len(facts["heads"]) == 8
    assert {"layer", "head", "kv_head", "bos_mass", "sink_mass", "entropy", "sink", "route"} <= facts["heads"][0].keys()


def test_total_is_the_sum_of_the_domains(calibration):
    name = "model.layers.1.self_attn"
    prose, code = (statistics.heads[name] for statistics in calibration.statistics.values())
    total = calibration.total.heads[name]
    assert torch.equal(total["rows"], prose["rows"] + code["rows"])
    assert torch.equal(total["logit_max"], torch.maximum(prose["logit_max"], code["logit_max"]))


def test_a_head_is_a_sink_by_mass_and_entropy(calibration):
    heads = calibration.heads(sink_threshold=0.0)
    assert all(head.sink and head.route == "sink" for head in heads)
    highest = max(max(head.bos_mass, head.sink_mass) for head in heads)
    assert not any(head.sink for head in calibration.heads(sink_threshold=highest + 1e-6))
    assert not any(head.sink for head in calibration.heads(sink_threshold=0.0, entropy_threshold=0.0))
    assert set(heads[0].domains) == {"builtin:prose", "builtin:code"}


def test_means_spreads_and_relative_errors(calibration):
    fields = empty_heads(calibration.layers[0])
    for mass in (0.2, 0.6):
        rows = {"rows": torch.full((4,), 10.0), "bos_mass": torch.full((4,), 10 * mass), "entropy": torch.ones(4)}
        add(fields, rows | measure_window(rows))
    means = head_means(fields)
    assert means["bos_mass"].tolist() == pytest.approx([0.4] * 4)
    assert means["bos_mass_std"].tolist() == pytest.approx([0.2] * 4)
    assert bool(means["error_int8"].isnan().all()), "no row was measured with errors"
    add(fields, {"output_energy": torch.full((4,), 4.0), "error_int8": torch.tensor([0.0, 1.0, 4.0, 16.0])})
    assert head_means(fields)["error_int8"].tolist() == [0, 0.5, 1, 2]


def test_a_model_with_other_weights_or_layers_is_refused(calibration, tiny_llama):
    def check(model):
        calibration.check_model(model_fingerprint(model), Architecture.of(model), "here")

    check(tiny_llama())
    with pytest.raises(CalibrationError, match="here: its weights are not those of the calibrated"):
        check(tiny_llama(seed=1))
    with pytest.raises(CalibrationError, match=r"here: its layers are not those in calibration\.json"):
        check(tiny_llama(num_hidden_layers=3))


def test_experts_without_tokens_are_named(calibration):
    name = "model.layers.0.mlp.experts"
    statistics = {
        domain: dataclasses.replace(part, experts={name: {"tokens": torch.tensor(tokens, dtype=torch.float64)}})
        for (domain, part), tokens in zip(calibration.statistics.items(), ([3, 0, 0], [1, 0, 2]), strict=True)
    }
    assert dataclasses.replace(calibration, statistics=statistics).unused_experts() == [f"{name}.1"]


def test_without_measured_errors_a_head_has_none(tiny_llama, tokenizer):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=128, error_windows=0)
    head = calibration.heads()[0]
    assert (head.error_int8, head.error_sink) == (None, None)
    assert math.isfinite(head.bos_mass)
