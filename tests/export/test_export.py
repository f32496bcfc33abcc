"""`export`: what it measures, which options override the recipe, and what it refuses before any work.

That the files are those of the model quantized in memory is tested in tests/checkpoint/test_streaming.py.
"""

import json
import shutil

import pytest

from quantsink.calibration import Calibration
from quantsink.errors import ModelError, UsageError
from quantsink.export.export import HELDOUT, available_memory, export, read_heldout
from quantsink.models.source import Source


def exported(folder, target, **options):
    return export(str(folder / "model"), folder / "calibration", target, **{"measure": False, **options})


@pytest.fixture
def never_loaded(monkeypatch):
    def refuse(*_, **__):
        pytest.fail("the model was loaded whole")

    monkeypatch.setattr(Source, "model", refuse)


@pytest.mark.usefixtures("never_loaded")
def test_without_memory_nothing_is_measured(calibrated_model, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("quantsink.export.export.available_memory", lambda: 100_000)
    result = exported(calibrated_model, tmp_path / "out", measure=True, say=lines.append)
    assert result.measured is None
    assert lines[0].startswith("not measured: that takes 0.0 GB of memory")
    assert "was not measured" in (tmp_path / "out" / "README.md").read_text()


def test_a_measurement_stands_in_the_model_card(calibrated_model, tmp_path):
    measured = exported(calibrated_model, tmp_path / "out", measure=True).measured
    assert measured.text == HELDOUT
    assert measured.kl > 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| perplexity | {measured.ppl_reference:.3f} | {measured.ppl:.3f} |" in card


def test_text_that_the_calibration_read_is_not_measured_on(calibrated_model, tiny_llama, tokenizer):
    assert read_heldout(tokenizer, Calibration.load(calibrated_model / "calibration")) is not None
    import quantsink

    calibration = quantsink.calibrate(tiny_llama(), tokenizer, HELDOUT, seq_len=64, max_tokens=512)
    assert read_heldout(tokenizer, calibration) is None


@pytest.mark.usefixtures("never_loaded")
def test_options_override_the_recipe(calibrated_model, tmp_path):
    result = exported(calibrated_model, tmp_path / "out", native_heads=3, kv_bits=8)
    assert result.heads["native"] == 3
    recipe = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["recipe"]
    assert recipe["attention"]["native_heads"] == 3
    assert recipe["kv_cache"]["bits"] == 8


def test_a_generation_config_that_transformers_would_not_save_is_refused_first(calibrated_model, tmp_path):
    shutil.copytree(calibrated_model, tmp_path / "work")
    (tmp_path / "work" / "model" / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.5}')
    with pytest.raises(ModelError, match="transformers cannot save its generation config"):
        exported(tmp_path / "work", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["5GiB", "5", "GB", "-1GB"])
def test_shard_sizes_that_the_hub_does_not_read_are_refused(size, calibrated_model, tmp_path):
    with pytest.raises(UsageError, match=f"--max-shard-size {size}"):
        exported(calibrated_model, tmp_path / "out", max_shard_size=size)


def test_available_memory_knows_the_limits_of_the_process():
    assert 10**6 < available_memory() < 10**15
