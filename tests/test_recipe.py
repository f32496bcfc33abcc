import dataclasses
import json
import math

import pytest

from quantsink.errors import RecipeError
from quantsink.kernels.coded_attention import codes
from quantsink.recipe import BLOCK, PRESETS, WIDTHS, Activations, Attention, Clip, KVCache, Recipe, excluded


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
    ("text", "message"),
    [
        ('{"wieghts": "int8"}', "unknown key 'wieghts'"),
        ('{"attention": {"clip": {"bond": 3}}}', "recipe.attention.clip: unknown key 'bond'"),
        ('{"weights": "int4"}', "'int4' is not one of int8, native"),
        ('{"sink_size": true}', "recipe.sink_size: expected int"),
        ('{"sink_size": 1, "sink_size": 2}', "'sink_size' appears twice"),
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
        ('{"kv_cache": {"bits": 9}}', "recipe: kv_cache.bits: expected a number from 2 to 8, found 9"),
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(text, message):
    with pytest.raises(RecipeError) as error:
        Recipe.from_json(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits: expected a number from 2 to 8, found 1"),
        ({"bits": "4"}, "bits: expected a number from 2 to 8, found '4'"),
        ({"bits": math.nan}, "bits: expected a number from 2 to 8"),
        ({"bits": 4.5, "widths": "uniform"}, "bits: expected with uniform widths one of 8, 4, 3, 2, found 4.5"),
        ({"sink_size": -1}, "sink_size: expected a whole number, 0 or more, found -1"),
        ({"sink_size": True}, "sink_size: expected a whole number"),
        ({"residual": 2.5}, "residual: expected a whole number"),
        ({"residual": None}, "residual: expected a whole number"),
        ({"widths": "best"}, "widths: expected one of measured, uniform, random, found 'best'"),
        ({"rounding": "up"}, "rounding: expected one of query, nearest, found 'up'"),
        ({"stream": "on"}, "stream: expected auto, off or a number of tokens, found 'on'"),
        ({"stream": 0}, "stream: expected auto, off or a number of tokens, found '0'"),
        ({"stream": True}, "stream: expected auto, off or a number of tokens, found True"),
        ({"sink_size": 4, "residual": 64, "max_length": 195}, "max_length: expected a whole number, at least 196"),
        ({"max_length": 195}, "at least 196 (sink_size, residual and two blocks of 64), found 195"),
        ({"seed": -1}, "seed: expected a whole number"),
    ],
)
def test_invalid_cache_options_are_refused_where_they_are_given(options, message):
    with pytest.raises(RecipeError) as error:
        KVCache(**options)
    assert message in str(error.value)
    assert str(error.value).startswith("kv_cache.")


def test_cache_options_take_the_calibrations_sinks_and_four_at_least():
    assert KVCache().with_sinks(1).sink_size == 4
    assert KVCache().with_sinks(6).sink_size == 6
    assert KVCache(sink_size=0).with_sinks(6).sink_size == 0
    with pytest.raises(RecipeError, match="at least 204"):
        KVCache(max_length=200).with_sinks(12)


def test_streamed_tokens_may_be_given_as_a_number():
    assert KVCache(stream=256) == KVCache(stream="256")
    assert Recipe.from_json(Recipe(kv_cache=KVCache(stream=256)).to_json()).kv_cache.stream == "256"


def test_widths_and_blocks_are_those_of_the_kernels():
    assert (WIDTHS, BLOCK) == (codes.WIDTHS, codes.BLOCK)


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
