"""Regression tests of faults that test_damage.py found, and of some that it cannot find."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantsink.calibration import Calibration
from quantsink.checkpoint.save_load import load
from quantsink.cli.inspect import describe
from quantsink.errors import CalibrationError, CheckpointError, QuantSinkError, RecipeError
from quantsink.hf.config import QuantSinkConfig
from quantsink.models.source import shard_names
from quantsink.recipe import Recipe

DEEP = "[" * 100_000 + "]" * 100_000


def edit(file: Path, change: Any) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def one_line(message: str) -> bool:
    return message.isprintable() and len(message) < 800


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"kv_cache": {"bits": 4, "stream": "²"}}), "kv_cache.stream"),  # str.isdigit, but no int
        (json.dumps({"kv_cache": {"bits": 4, "stream": "9" * 5000}}), "kv_cache.stream"),
        (json.dumps({"weights": "x" * 100_000}), "weights"),
        (json.dumps({"x" * 100_000: 1}), "unknown key"),
        (json.dumps({"sink_threshold": 2}), "mine.json: sink_threshold"),
        (DEEP, "nested deeper"),
    ],
)
def test_recipes_are_refused_briefly_and_by_file(text, message, tmp_path):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(RecipeError) as error:
        Recipe.load(tmp_path / "mine.json")
    assert message in str(error.value)
    assert "mine.json" in str(error.value)
    assert one_line(str(error.value))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "."])
def test_names_that_no_recipe_file_can_have(name):
    with pytest.raises(RecipeError, match="neither a preset"):
        Recipe.load(name)


CALIBRATION_FAULTS = {
    "heads and KV heads exchanged": lambda d: d["layers"][0].update(heads=2, kv_heads=4),
    "slices exchanged": lambda d: d["layers"][0]["q"]["starts"].reverse(),
    "slices overlap": lambda d: d["layers"][0]["k"].update(starts=[0, 8]),
    "slices leave channels out": lambda d: d["layers"][0]["k"].update(starts=[0, 32]),
    "slices out of range": lambda d: d["layers"][0]["o"].update(starts=[0, 16, 32, 2**40]),
    "a negative slice": lambda d: d["layers"][0]["v"].update(starts=[-16, 0]),
    "slices of another size": lambda d: d["layers"][0]["q"].update(size=8),
    "a head size of 2^62": lambda d: d["layers"][0].update(head_dim=2**62),
    "a slice without its size": lambda d: d["layers"][0]["q"].pop("size"),
    "window dropped": lambda d: d["layers"][0].pop("window"),
    "another index": lambda d: d["layers"][1].update(index=7),
    "layers exchanged": lambda d: d["layers"].reverse(),
    "a domain twice": lambda d: d["domains"].append(d["domains"][0]),
    "no domain": lambda d: d.update(domains=[]),
    "no layer": lambda d: d.update(layers=[]),
    "counts as text": lambda d: d["domains"][0].update(tokens="many"),
    "a fingerprint of two letters": lambda d: d["fingerprint"].update(model="ab"),
    "sink_size 0": lambda d: d["settings"].update(sink_size=0),
    "sink_size true": lambda d: d["settings"].update(sink_size=True),
    "schema 3.0": lambda d: d.update(schema=3.0),
    "an unknown key": lambda d: d.update(more=1),
    "no heads": lambda d: d.pop("heads"),
    "heads that contradict the tensors": lambda d: d["heads"][0].update(bos_mass=0.99),
    "a small error that contradicts the tensors": lambda d: d["heads"][0].update(
        error_sink=d["heads"][0]["error_sink"] * 1.01
    ),
    "a route that contradicts the tensors": lambda d: d["heads"][0].update(route="sink"),
    "KV heads that contradict the tensors": lambda d: d["kv_heads"].pop(),
    "experts that are not there": lambda d: d["unused_experts"].append("model.layers.0.mlp.3"),
}


@pytest.mark.parametrize("fault", CALIBRATION_FAULTS)
def test_calibration_facts(fault, subjects, copied):
    folder = copied(subjects.calibration)
    edit(folder / "calibration.json", CALIBRATION_FAULTS[fault])
    with pytest.raises(CalibrationError, match=r"calibration\.(json|safetensors).*calibrate again") as error:
        Calibration.load(folder)
    assert one_line(str(error.value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heads/model.layers.0.self_attn/key_sum", -torch.inf),
        ("heads/model.layers.0.self_attn/key_sum", torch.nan),
        ("heads/model.layers.0.self_attn/query_gram", -torch.inf),
        ("heads/model.layers.0.self_attn/key_count", -1.0),
        ("heads/model.layers.0.self_attn/gap_mass", -1.0),
        ("heads/model.layers.0.self_attn/rows", 0.0),
        ("heads/model.layers.0.self_attn/bos_mass", 1e300),
        ("linears/model.layers.0.mlp.up_proj/input_amax", torch.inf),
        ("linears/model.layers.0.mlp.up_proj/input_peak", -torch.inf),
    ],
)
def test_calibration_values(field, value, subjects, copied):
    folder = copied(subjects.calibration)
    tensors = load_file(folder / "calibration.safetensors")
    tensors[f"builtin:code/{field}"].view(-1)[0] = value
    save_file(tensors, folder / "calibration.safetensors")
    with pytest.raises(CalibrationError, match=r"calibration\.(json|safetensors).*calibrate again"):
        Calibration.load(folder)


@pytest.mark.parametrize("every_domain", [True, False])
def test_a_calibration_without_one_linear_layer(every_domain, subjects, copied):
    folder = copied(subjects.calibration)
    gone = "linears/model.layers.0.self_attn.o_proj/"
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "calibration.safetensors").items()
        if gone not in name or not (every_domain or name.startswith("builtin:prose"))
    }
    save_file(tensors, folder / "calibration.safetensors")
    with pytest.raises(CalibrationError, match="o_proj"):
        Calibration.load(folder)


CONFIG_FAULTS = {
    "a cache that the recipe does not ask for": lambda c: c["recipe"]["kv_cache"].update(bits=None),
    "no cache where the recipe asks for one": lambda c: c.update(kv_cache=None),
    "another residual than the recipe's": lambda c: c["kv_cache"].update(residual=0),
    "another rounding than the recipe's": lambda c: c["kv_cache"].update(rounding="nearest"),
    "another sink_size than the recipe's": lambda c: c["recipe"].update(sink_size=3),
    "fewer exact sinks than sink tokens": lambda c: c.update(sink_size=5),
    "format 1.0": lambda c: c.update(format_version=1.0),
    "another quant_method": lambda c: c.update(quant_method="gptq"),
    "a key named self": lambda c: c.update(self=1),
    "an unknown key of 100,000 letters": lambda c: c.update({"x" * 100_000: 1}),
    "a module's name with a line break": lambda c: c["linears"].update({"a\nb": [0, 0]}),
    "a recipe out of range": lambda c: c["recipe"].update(sink_threshold=2),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_quantization_config(fault, subjects):
    config = json.loads((subjects.checkpoint / "config.json").read_text())["quantization_config"]
    CONFIG_FAULTS[fault](config)
    with pytest.raises(CheckpointError, match=r"config\.json.*(again|update)") as error:
        QuantSinkConfig(**config)
    assert one_line(str(error.value))


def test_a_model_of_2_to_the_31_layers_is_not_built(subjects, copied, ends_well):
    folder = copied(subjects.checkpoint)
    edit(folder / "config.json", lambda d: d.update(num_hidden_layers=2**31))
    assert ends_well("found", "layers", lambda: load(folder), ("num_hidden_layers",)) is None


def test_a_model_without_layers_is_refused_with_a_remedy(subjects, copied):
    folder = copied(subjects.checkpoint)
    edit(folder / "config.json", lambda d: d.update(num_hidden_layers=0))
    with pytest.raises(CheckpointError, match=r"config\.json.*export again"):
        load(folder)


def shard_with(folder: Path, name: str) -> Path:
    return next(file for file in folder.glob("*.safetensors") if name in load_file(file))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite(name, value, subjects, copied):
    folder = copied(subjects.checkpoint)
    file = shard_with(folder, name)
    tensors = load_file(file)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or inf"):
        load(folder)


@pytest.mark.parametrize("name", ["a\nb", "x" * 100_000])
def test_a_surplus_tensor_with_a_bad_name(name, subjects, copied):
    folder = copied(subjects.checkpoint)
    file = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(file) | {name: torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="does not belong to this model") as error:
        load(folder)
    assert one_line(str(error.value))


@pytest.mark.parametrize("routes", [torch.zeros(0), torch.tensor(1), torch.tensor([0.5, 1, 0, 0])])
def test_inspect_of_routes_that_are_none(routes, subjects, copied):
    folder = copied(subjects.checkpoint)
    name = "model.layers.0.self_attn.quantsink_table.routes"
    file = shard_with(folder, name)
    save_file(load_file(file) | {name: routes}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"routes.* in .* invalid values"):
        describe(folder)


def test_a_header_that_claims_2_to_the_62_numbers(subjects, copied):
    folder = copied(subjects.checkpoint)
    file = sorted(folder.glob("*.safetensors"))[0]
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    next(entry for name, entry in header.items() if name != "__metadata__")["shape"] = [2**62, 2**62]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    for look in (load, describe):
        with pytest.raises(CheckpointError, match=file.name):
            look(folder)


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", 7, None, []]
)
def test_an_index_that_leaves_its_folder(name, subjects, copied):
    folder = copied(subjects.checkpoint)
    edit(folder / "model.safetensors.index.json", lambda d: d["weight_map"].update({"model.norm.weight": name}))
    with pytest.raises(QuantSinkError, match=r"model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize("look", [load, describe])
def test_a_config_nested_too_deep(look, subjects, copied):
    folder = copied(subjects.checkpoint)
    (folder / "config.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json.*again"):
        look(folder)


@pytest.mark.parametrize(
    "text", ['"rms_norm_eps": NaN', '"rms_norm_eps": 1e999', '"rms_norm_eps": 1, "rms_norm_eps": 2']
)
def test_a_config_that_is_no_strict_json(text, subjects, copied):
    folder = copied(subjects.checkpoint)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', text))
    with pytest.raises(CheckpointError, match=r"config\.json.*again"):
        load(folder)


@pytest.mark.parametrize("text", [DEEP, '{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}'])
def test_an_index_that_is_no_strict_json(text, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(QuantSinkError, match=r"index\.json"):
        shard_names(index)


def test_what_transformers_says_comes_with_a_remedy(subjects, copied):
    folder = copied(subjects.checkpoint)
    edit(folder / "config.json", lambda d: d.update(hidden_act="x"))
    with pytest.raises(CheckpointError, match="again"):
        load(folder)


def test_an_index_with_a_name_of_100_000_letters(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x" * 100_000}}))
    with pytest.raises(QuantSinkError) as error:
        shard_names(index)
    assert one_line(str(error.value))
