"""A damaged calibration is refused by file and field."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.stored import FACTS, TENSORS
from quantsink.errors import CalibrationError


@pytest.fixture(scope="module")
def saved(tiny_llama, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=1024).save(folder)
    return folder


def damage_facts(folder, change):
    facts = json.loads((folder / FACTS).read_text())
    change(facts)
    (folder / FACTS).write_text(json.dumps(facts))


def damage_tensors(folder, change):
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)


KEY = "builtin:prose/heads/model.layers.0.self_attn/bos_mass"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / FACTS).unlink(), "no calibration.json"),
        (lambda f: (f / FACTS).write_text("{"), "cannot be read"),
        (lambda f: (f / TENSORS).write_bytes(b"x" * 20), "cannot be read"),
        (lambda f: damage_facts(f, lambda d: d.update(schema=9)), "schema 9"),
        (lambda f: damage_facts(f, lambda d: d.pop("layers")), "layers"),
        (lambda f: damage_facts(f, lambda d: d["layers"].pop()), "does not belong"),
        (lambda f: damage_facts(f, lambda d: d["settings"].update(extra=1)), "extra"),
        (lambda f: damage_tensors(f, lambda t: t.pop(KEY)), f"{KEY} is missing"),
        (lambda f: damage_tensors(f, lambda t: t.update({KEY: t[KEY] * torch.nan})), "NaN"),
        (lambda f: damage_tensors(f, lambda t: t.update({KEY: t[KEY][:1].clone()})), r"float64 \[1\]"),
        (lambda f: damage_tensors(f, lambda t: t.update(extra=torch.zeros(1))), "extra does not belong"),
    ],
)
def test_damage_is_named(damage, message, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(tmp_path)
