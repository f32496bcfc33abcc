"""The model card: hub metadata, what was quantized and what was measured."""

import dataclasses

import pytest

from quantsink.calibration import Calibration
from quantsink.calibration.routing import plan
from quantsink.export.card import Measured, model_card
from quantsink.recipe import KVCache, Recipe

MEASURED = Measured("builtin:heldout", 1000, 12.3456, 12.5, 0.00123, 0.987)


@pytest.fixture(scope="module")
def calibration(calibrated_model):
    return Calibration.load(calibrated_model / "calibration")


def card(calibration, recipe, model="someone/llama", measured=MEASURED, notes=()):
    return model_card(model, "name", calibration, plan(calibration, recipe), 1234567, measured, notes)


@pytest.mark.parametrize(
    ("model", "is_hub_id"), [("someone/llama", True), ("llama", False), ("/home/llama", False), ("a/b.gguf", False)]
)
def test_only_a_hub_id_is_a_base_model(model, is_hub_id, calibration):
    assert (f"base_model: {model}\n" in card(calibration, Recipe(), model)) is is_hub_id


def test_the_front_matter_comes_first_and_ends(calibration):
    front = card(calibration, Recipe()).split("---\n")
    assert front[0] == ""
    assert front[1].startswith("library_name: transformers\npipeline_tag: text-generation\n")
    assert "- quantsink\n" in front[1]


def test_figures_are_those_measured(calibration):
    text = card(calibration, Recipe())
    assert "| perplexity | 12.346 | 12.500 |" in text
    assert "| KL to the original, nats per token | 0 | 0.00123 |" in text
    assert "| same most likely token | 100 % | 98.70 % |" in text
    assert "Accuracy was not measured at export" in card(calibration, Recipe(), measured=None)


def test_attention_and_cache_appear_as_the_recipe_says(calibration):
    native = card(calibration, Recipe.load("w8a16"))
    assert "| attention | native |" in native
    assert "KV cache" not in native
    heads = "| attention heads by route | "
    cached = dataclasses.replace(Recipe.load("w8a8"), kv_cache=KVCache(bits=8))
    assert heads in card(calibration, cached)
    assert "codes of 8.0 bits on average" in card(calibration, cached)


def test_notes_stand_at_the_end(calibration):
    assert card(calibration, Recipe(), notes=("First note.", "Second note.")).endswith("First note.\n\nSecond note.\n")
