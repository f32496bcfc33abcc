import dataclasses
import json
import math

import pytest

from quantsink.errors import RecipeError
from quantsink.recipe import PRESETS, Activations, Attention, Clip, Recipe, excluded


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    assert Recipe.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_every_field_survives_json():
    recipe = Recipe(
        output_head="int8",
        activations=Activations("static", 0.05, "table"),
        attention=Attention("int8", "random", 3, ("1.2",), "row", 32, Clip("row", 8.0, math.inf), 7),
        sink_size=4,
        sink_threshold=0.5,
        entropy_threshold=0.25,
        exclude=("layers.1", "*.down_proj"),
    )
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"wieghts": "int8"}', "unknown key 'wieghts'"),
        ('{"attention": {"clip": {"bond": 3}}}', "recipe.attention.clip: unknown key 'bond'"),
        ('{"weights": "int4"}', "'int4' is not one of int8, native"),
        ('{"sink_size": true}', "recipe.sink_size: expected int"),
        ('{"sink_size": 1, "sink_size": 2}', "'sink_size' stands twice"),
        ('{"sink_threshold": NaN}', "expected a finite number"),
        ('{"attention": {"native_heads": -1}}', "native_heads: 0 or more"),
        ('{"exclude": "layers.1"}', "expected a list of strings"),
        ('{"activations": {"sink_rows": "table"}}', "table needs activations.kind: static"),
        ('{"attention": {"kind": "native", "clip": {"kind": "row"}}}', "clip: needs attention.kind: int8"),
        ('{"weights": "native"}', "native weights need activations.kind: native"),
        (
            '{"weights": "native", "activations": {"kind": "native"}, "output_head": "int8"}',
            "output_head: int8 needs weights: int8",
        ),
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(text, said):
    with pytest.raises(RecipeError) as error:
        Recipe.from_json(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["w8a8"].weights = "native"


def test_a_name_that_is_neither_preset_nor_file():
    with pytest.raises(RecipeError, match=r"w8a9.*w8a16, w8a8, w8a8-static"):
        Recipe.load("w8a9")


def test_load_reads_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"exclude": ["layers.0"]}))
    assert Recipe.load(path) == Recipe(exclude=("layers.0",))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"mine\.json"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("name", "pattern", "hit"),
    [
        ("model.layers.1.self_attn.q_proj", "layers.1", True),
        ("model.layers.11.self_attn.q_proj", "layers.1", False),
        ("model.layers.11.self_attn.q_proj", "layers.1*", True),
        ("model.layers.1.mlp.down_proj", "down_proj", True),
        ("model.layers.1.mlp.down_proj", "layers.*.mlp", True),
        ("model.layers.1.mlp.down_proj", "proj", False),
        ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj.weight", False),
    ],
)
def test_patterns_match_whole_components(name, pattern, hit):
    assert excluded(name, [pattern]) is hit
