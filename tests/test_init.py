"""What `import quantsink` offers, and that it offers nothing else."""

import pydoc
import subprocess
import sys

import pytest

import quantsink

API = ["Calibration", "QuantSinkError", "Recipe", "SinkCache", "calibrate", "load", "quantize", "save"]


def test_dir_lists_the_api_before_anything_was_used():
    code = "import quantsink; print(dir(quantsink))"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert listed == f"{sorted([*API, '__version__'])}\n"


def test_dir_lists_the_api_afterwards_too():
    assert quantsink.calibrate
    assert dir(quantsink) == sorted([*API, "__version__"]) == sorted(quantsink.__all__)


@pytest.mark.parametrize("name", API)
def test_every_name_can_be_imported(name):
    scope = {}
    exec(f"from quantsink import {name}", scope)
    assert scope[name] is getattr(quantsink, name)


@pytest.mark.parametrize("name", ["calibration", "errors", "eval", "kernels", "recipe", "integration"])
def test_folders_need_no_import_of_their_own(name):
    assert getattr(quantsink, name).__name__.startswith("quantsink.")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'quantize_all'"):
        _ = quantsink.quantize_all


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("quantize", ["w8a16", "w8a8-static", "CalibrationError", "save_pretrained", "Example", "in place"]),
        ("calibrate", ["tokenizer:", "builtin:prose", "Example", "Returns", "tokens per window", "DataError"]),
        ("SinkCache.from_calibration", ["past_key_values", "2 to 8", "Example", "RecipeError", "max_length"]),
        ("load", ["trust_remote_code", "CheckpointError"]),
        ("save", ["max_shard_size", "force"]),
    ],
)
def test_help_says_what_a_user_needs(name, parts):
    text = pydoc.render_doc(f"quantsink.{name}", renderer=pydoc.plaintext)
    for part in parts:
        assert part in text, f"help(quantsink.{name}) does not speak of {part}"
