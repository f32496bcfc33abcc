"""Damaged files end in success or in a QuantSinkError that says where; never in another exception, a hang or a lie.

Every case is made from its surface's name and its number: a failure prints both and what was changed.
"""

import copy
import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quantsink import strict_json
from quantsink.calibration import Calibration, plan
from quantsink.checkpoint.save_load import load
from quantsink.cli.inspect import describe
from quantsink.errors import QuantSinkError
from quantsink.hf.config import QuantSinkConfig
from quantsink.hf.validate import check_tensors
from quantsink.models.source import shard_names
from quantsink.recipe import Recipe

CASES = {
    "recipe, values": 1200,
    "recipe, bytes": 600,
    "quantization_config, values": 1200,
    "calibration.json, values": 300,
    "calibration.json, bytes": 200,
    "calibration.safetensors, header": 120,
    "calibration.safetensors, bytes": 60,
    "shard, header": 400,
    "shard, bytes": 300,
    "index, values": 300,
    "inspect": 200,
    "load, config.json": 100,
    "load, index": 60,
    "load, shard": 60,
}
HYPOTHESIS = 300
"""Cases of each property."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**62, -(2**62), 10**400, 0.5, -0.5, 1e-300, 1e300, math.nan,
    math.inf, -math.inf, "", "inf", "NaN", "x" * 100_000, "../../../etc/passwd", "/etc/passwd", "\ud800", "a\nb",
    "\x1b[2J", "\0", "²", "int8", "native", "model", [], [0], [[]], {}, {"a": 1}, "__deep__", "__deepest__",
)  # fmt: skip
KEYS = ("", "x", "a\nb", "__class__", "self", "bits", "schema", "ü", "\ud800", "x" * 5000)


def test_there_are_enough_cases():
    assert sum(CASES.values()) + 2 * HYPOTHESIS >= 5000


def rng_of(surface: str, number: int) -> random.Random:
    return random.Random(f"{surface} {number}")


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def changed(rng: random.Random, data: Any) -> tuple[str, str]:
    """(the JSON text of `data` after a change or two, what was changed)."""
    data = copy.deepcopy(data)
    changes, twice = [], None
    for _ in range(rng.choice((1, 1, 1, 2))):
        path = rng.choice([place for place in places(data) if place] or [()])
        if not path:
            break
        holder, key = at(data, path[:-1]), path[-1]
        how = rng.choice(("replace", "replace", "replace", "nudge", "drop", "add", "swap", "copy", "twice", "reorder"))
        changes.append(f"{how} {'.'.join(map(str, path))[:200]}")
        if how == "replace":
            holder[key] = copy.deepcopy(rng.choice(VALUES))
            changes.append(f"by {str(holder[key])[:40]!r}")
        elif how == "nudge" and type(holder[key]) in (int, float):
            holder[key] += rng.choice((1, -1, 0.5, 16))
        elif how == "drop":
            del holder[key]
        elif how == "add":
            if isinstance(holder, dict):
                holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
            else:
                holder.insert(key, copy.deepcopy(rng.choice((*VALUES, *holder))))
        elif how == "swap":
            other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        elif how == "copy":
            holder[key] = copy.deepcopy(at(data, rng.choice(places(data))))
        elif how == "twice" and isinstance(holder, dict):
            holder["__twice__"], twice = copy.deepcopy(rng.choice((holder[key], *VALUES))), key
        elif isinstance(holder, dict):
            items = list(holder.items())
            rng.shuffle(items)
            holder.clear()
            holder.update(items)
    text = json.dumps(data)
    if twice is not None:
        text = text.replace('"__twice__"', json.dumps(twice))
    for mark, depth in (("__deep__", 100), ("__deepest__", 100_000)):
        text = text.replace(f'"{mark}"', "[" * depth + "]" * depth)
    return text, ", ".join(changes)


def damaged(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    out, changes = bytearray(data), []
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, length = rng.randrange(len(out) + 1), rng.choice((1, 2, 8, 64))
        how = rng.choice(("flip", "flip", "set", "insert", "delete", "cut", "run", "repeat"))
        changes.append(f"{how} at {place}")
        if how == "flip" and place < len(out):
            out[place] ^= 1 << rng.randrange(8)
        elif how == "set" and place < len(out):
            out[place] = rng.choice(b'\x00\xff0919-"{}[],:eE.\\')
        elif how == "insert":
            out[place:place] = rng.randbytes(length)
        elif how == "delete":
            del out[place : place + length]
        elif how == "cut":
            del out[place:]
        elif how == "run":
            out[place : place + length] = bytes([rng.randrange(256)]) * len(out[place : place + length])
        elif how == "repeat":
            out[place:place] = out[place : place + length]
    return bytes(out), ", ".join(changes)


def split(shard: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", shard[:8])
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]


def header_changed(rng: random.Random, shard: bytes) -> tuple[bytes, str]:
    """A safetensors file whose header was changed; now and then its length too, and what it says of its length."""
    header, data = split(shard)
    text, changes = changed(rng, header)
    encoded = text.encode("utf-8", "surrogatepass")
    length = len(encoded)
    if rng.random() < 0.1:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**62, 2**64 - 1))
        changes += f", header length {length}"
    return struct.pack("<Q", max(length, 0)) + encoded + data, changes


def cases(surface: str) -> Any:
    return ((f"{surface} {number}", rng_of(surface, number)) for number in range(CASES[surface]))


def check_recipe(recipe: Recipe | None, text: str | bytes) -> None:
    """An accepted recipe says what its text says, and survives its own JSON."""
    if recipe is None:
        return
    assert Recipe.from_json(recipe.to_json()) == recipe
    expected, whole = strict_json.parse(text), recipe.to_dict()
    assert agrees(whole, expected), (whole, expected)


def agrees(whole: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return isinstance(whole, dict) and all(key in whole and agrees(whole[key], expected[key]) for key in expected)
    return whole == expected


@pytest.mark.parametrize("surface", ["recipe, values", "recipe, bytes"])
def test_recipes(surface, subjects, ends_well):
    calibration = Calibration.load(subjects.calibration)
    whole = subjects.recipe.to_dict()
    for case, rng in cases(surface):
        if surface.endswith("values"):
            text, changes = changed(rng, whole)
        else:
            raw, changes = damaged(rng, json.dumps(whole).encode())
            text = raw.decode("utf-8", "replace")
        names = ("recipe",)
        recipe = ends_well(surface, f"{case}: {changes}", lambda text=text: Recipe.from_json(text), names)
        check_recipe(recipe, text)
        if recipe is not None and rng.random() < 0.1:
            ends_well("recipe, planned", f"{case}: {changes}", lambda r=recipe: plan(calibration, r), PLANNED)


PLANNED = ("recipe", "kv bits", "widths", "native heads", "sink_size", "residual", "max_length", "stream", "seed")


def test_a_recipe_file(subjects, ends_well, tmp_path):
    path = tmp_path / "mine.json"
    for number in range(100):
        raw, changes = damaged(random.Random(f"file {number}"), subjects.recipe.to_json().encode())
        path.write_bytes(raw)
        recipe = ends_well(
            "recipe, file", f"file {number}: {changes}", lambda: Recipe.load(path), ("mine.json", "recipe")
        )
        check_recipe(recipe, raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["int8", "native"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
by_example = settings(
    max_examples=HYPOTHESIS,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@by_example
@given(st.dictionaries(st.sampled_from([*Recipe().to_dict(), "x"]), json_values, max_size=3))
def test_any_recipe(ends_well, data):
    text = json.dumps(data)
    recipe = ends_well("recipe, any", text, lambda: Recipe.from_json(text), ("recipe",))
    check_recipe(recipe, text)


CONFIG_KEYS = ["recipe", "sink_size", "linears", "attentions", "kv_cache", "experts", "format_version", "x"]


@by_example
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), json_values, max_size=3))
def test_any_quantization_config(subjects, ends_well, data):
    whole = json.loads((subjects.checkpoint / "config.json").read_text())["quantization_config"] | data
    check_config(ends_well("quantization_config, any", str(data), lambda: QuantSinkConfig(**whole), CONFIG), whole)


CONFIG = ("config.json",)


def check_config(config: QuantSinkConfig | None, whole: dict[str, Any]) -> None:
    if config is None:
        return
    kept = config.to_dict()
    for key, value in whole.items():
        assert kept[key] == value or (key == "experts" and value is None), f"{key}: {kept[key]} {value}"
    config.cache_plan()


def test_quantization_config(subjects, ends_well):
    surface = "quantization_config, values"
    whole = json.loads((subjects.checkpoint / "config.json").read_text())["quantization_config"]
    for case, rng in cases(surface):
        text, changes = changed(rng, whole)
        try:
            data = strict_json.parse(text)
        except ValueError:
            data = {**whole, rng.choice(list(whole)): copy.deepcopy(rng.choice(VALUES))}
        if "self" in data:
            continue  # Python's own TypeError; `load` and `describe` word it
        try:
            QuantSinkConfig(**data)
        except TypeError as error:
            assert "argument" in str(error), case  # noqa: PT017  (a key is missing; `load` and `describe` word it)
            continue
        except QuantSinkError:
            pass
        check_config(ends_well(surface, f"{case}: {changes}", lambda data=data: QuantSinkConfig(**data), CONFIG), data)


FILES = ("calibration.json", "calibration.safetensors")


def check_calibration(calibration: Calibration | None, folder: Path, recipe: Recipe, case: str) -> None:
    """An accepted calibration holds what its files say, and its plan's numbers can be used."""
    if calibration is None:
        return
    facts = json.loads((folder / FILES[0]).read_text())
    again = json.loads(json.dumps(calibration.facts()))
    for key in again:
        if key in ("heads", "kv_heads"):
            assert len(again[key]) == len(facts[key]), case
            for restored, stored in zip(again[key], facts[key], strict=True):
                assert restored.keys() == stored.keys(), case
                for name, value in restored.items():
                    same = (
                        value == pytest.approx(stored[name], rel=1e-6, abs=1e-7)
                        if isinstance(value, float)
                        else value == stored[name]
                    )
                    assert same or isinstance(value, dict | list), f"{case}: {name}"
        else:
            assert again[key] == facts[key], f"{case}: {key}"
    tensors = load_file(folder / FILES[1])
    assert tensors.keys() == calibration.tensors().keys(), case
    assert all(torch.equal(value, tensors[name]) for name, value in calibration.tensors().items()), case
    model_plan = plan(calibration, recipe)
    assert len(calibration.kv_heads()) == sum(layer.kv_heads for layer in calibration.layers), case
    for linear in model_plan.linears.values():
        assert 0 < linear.input_scale < math.inf, case
        assert 0 < linear.sink_scale < math.inf, case
    for attention in model_plan.attentions.values():
        assert all(math.isfinite(value) for row in attention.key_mean for value in row), case


@pytest.mark.parametrize(
    ("surface", "file"),
    [
        ("calibration.json, values", 0),
        ("calibration.json, bytes", 0),
        ("calibration.safetensors, header", 1),
        ("calibration.safetensors, bytes", 1),
    ],
)
def test_calibrations(surface, file, subjects, copied, ends_well):
    folder = copied(subjects.calibration)
    raw = (folder / FILES[file]).read_bytes()
    for case, rng in cases(surface):
        if surface.endswith("values"):
            # Most of the file is derived; the facts get their share.
            whole = json.loads(raw)
            hidden = {key: whole.pop(key) for key in ("heads", "kv_heads")} if rng.random() < 0.7 else {}
            text, changes = changed(rng, whole)
            if hidden:
                text = text.rstrip()[:-1] + ", " + json.dumps(hidden)[1:]
            new = text.encode("utf-8", "surrogatepass")
        elif surface.endswith("header"):
            new, changes = header_changed(rng, raw)
        else:
            new, changes = damaged(rng, raw)
        (folder / FILES[file]).write_bytes(new)
        calibration = ends_well(surface, f"{case}: {changes}", lambda: Calibration.load(folder), FILES)
        check_calibration(calibration, folder, subjects.recipe, f"{case}: {changes}")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("surface", ["shard, header", "shard, bytes"])
def test_shards(surface, subjects, copied, ends_well):
    folder = copied(subjects.checkpoint)
    files = shards(folder)
    whole = {file: file.read_bytes() for file in files}
    headers = {file: split(raw)[0] for file, raw in whole.items()}
    names = (*(file.name for file in files), *(name for header in headers.values() for name in header))
    for case, rng in cases(surface):
        file = rng.choice(files)
        how = header_changed if surface.endswith("header") else damaged
        new, changes = how(rng, whole[file] if rng.random() < 0.5 else whole[file][: 8 + len(whole[file]) // 2])
        file.write_bytes(new)
        taken = ends_well(
            surface, f"{case}: {changes}", lambda: check_tensors(subjects.model, files) is None or True, names
        )
        if taken:
            now = split(new)[0]
            for name, entry in headers[file].items():
                kept = all(now[name][key] == entry[key] for key in ("dtype", "shape") if key in entry)
                assert kept, f"{case}: {changes}: {name}: {now[name]} {entry}"
        file.write_bytes(whole[file])


def test_indices(subjects, copied, ends_well):
    surface = "index, values"
    index = copied(subjects.checkpoint) / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    few = {"metadata": whole["metadata"], "weight_map": dict(list(whole["weight_map"].items())[:6])}
    for case, rng in cases(surface):
        text, changes = changed(rng, few)
        index.write_bytes(text.encode("utf-8", "surrogatepass"))
        names = ends_well(surface, f"{case}: {changes}", lambda: shard_names(index), ("index.json",))
        for name in names or ():
            assert (index.parent / name).resolve().parent == index.parent.resolve(), f"{case}: {changes}: {name}"


def one_changed(rng: random.Random, file: Path, raw: bytes) -> tuple[bytes, str]:
    if file.suffix == ".safetensors":
        return (header_changed if rng.random() < 0.5 else damaged)(rng, raw)
    if rng.random() < 0.3:
        return damaged(rng, raw)
    text, changes = changed(rng, json.loads(raw))
    return text.encode("utf-8", "surrogatepass"), changes


def test_inspect(subjects, copied, ends_well):
    folder = copied(subjects.checkpoint)
    files = [folder / "config.json", *shards(folder)]
    names = (folder.name, *(file.name for file in files))
    for case, rng in cases("inspect"):
        file = rng.choice(files)
        raw = file.read_bytes()
        new, changes = one_changed(rng, file, raw)
        file.write_bytes(new)
        described = ends_well("inspect", f"{case}: {file.name}: {changes}", lambda: describe(folder), names)
        if described is not None:
            json.dumps(described[0], allow_nan=False)
        file.write_bytes(raw)


FACTS = (None, True, -1, 0, 2**31, 2**62, 1e300, math.nan, "x", [])


def test_facts_of_the_model(subjects, tmp_path, ends_well):
    """Each fact of config.json that is transformers' own, replaced by each of a few values."""
    surface = "load, model facts"
    folder = Path(shutil.copytree(subjects.checkpoint, tmp_path / "checkpoint"))
    file = folder / "config.json"
    raw = file.read_bytes()
    whole = json.loads(raw)
    for key, value in whole.items():
        for new in FACTS if key != "quantization_config" else ():
            text = json.dumps({**whole, key: new})
            file.write_text(text)
            where = f"{key}: {value} -> {new}"
            model = ends_well(surface, where, lambda: load(folder), (str(folder), file.name))
            if model is not None:
                check_model(model, file, raw, text.encode(), where, subjects)


@pytest.mark.parametrize("surface", ["load, config.json", "load, index", "load, shard"])
def test_loading(surface, subjects, tmp_path, ends_well):
    folder = Path(shutil.copytree(subjects.checkpoint, tmp_path / "checkpoint"))
    pick: dict[str, Callable[[random.Random], Path]] = {
        "load, config.json": lambda _: folder / "config.json",
        "load, index": lambda _: folder / "model.safetensors.index.json",
        "load, shard": lambda rng: rng.choice(shards(folder)),
    }
    for case, rng in cases(surface):
        file = pick[surface](rng)
        raw = file.read_bytes()
        new, changes = one_changed(rng, file, raw)
        file.write_bytes(new)
        where = f"{case}: {file.name}: {changes}"
        model = ends_well(surface, where, lambda: load(folder), (str(folder), file.name))
        if model is not None:
            check_model(model, file, raw, new, where, subjects)
        file.write_bytes(raw)


def check_model(model: Any, file: Path, old: bytes, new: bytes, where: str, subjects: Any) -> None:
    """What loads computes numbers; the same ones where nothing that has a meaning was changed."""
    with torch.no_grad():
        logits = model(torch.arange(2, 40)[None]).logits
    assert bool(logits.isfinite().all()) or "NaN" in new.decode("utf-8", "replace"), where
    if file.name != "config.json" and (file.suffix == ".json" or split(new)[1] == split(old)[1]):
        assert torch.equal(logits, subjects.logits), where
