"""Strict JSON: what is refused, what is read, and how values appear in errors."""

import math
import re
from dataclasses import dataclass
from typing import Literal

import pytest

from quantsink import strict_json

DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class Part:
    size: int = 1


@dataclass(frozen=True)
class Whole:
    name: str
    mode: Literal["row", "column"] = "row"
    scale: float = 1.0
    bits: int | None = None
    labels: tuple[str, ...] = ()
    part: Part = Part()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "appears twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "larger than any float"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\ud800": 1}', "surrogate"),
        (DEEP, "nested deeper"),
        ("[" * 70 + "]" * 70, "nested deeper"),
        ("1" * 5000, "digit"),
        (b"\xff", "utf-8"),
        ("", "Expecting value"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        strict_json.parse(text)


def test_parse_reads_moderate_depth_and_whole_surrogate_pairs():
    assert strict_json.parse("[" * 60 + "]" * 60)
    assert strict_json.parse('{"ü": 1.5, "b": [true, null, "\\ud83d\\ude00"]}') == {"ü": 1.5, "b": [True, None, "😀"]}


def test_build_converts_whole_numbers_and_inf_to_float_and_nothing_else():
    data = {"name": "a", "scale": 2, "bits": None, "labels": ["x", "y"], "part": {"size": 3}}
    whole = strict_json.build(Whole, data, "file")
    assert whole == Whole("a", scale=2.0, labels=("x", "y"), part=Part(3))
    assert type(whole.scale) is float
    assert strict_json.build(Whole, {"name": "a", "scale": "inf"}, "file").scale == math.inf


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "file: expected an object, found list"),
        ({}, "file: name is missing"),
        ({"name": "a", "nam": 1}, "file: unknown key 'nam'; known are name, mode, scale, bits, labels, part"),
        ({"name": 1}, "file.name: expected str, found 1"),
        ({"name": "a", "mode": "cell"}, "file.mode: 'cell' is not one of row, column"),
        ({"name": "a", "scale": True}, "file.scale: expected float, found True"),
        ({"name": "a", "scale": "1.5"}, "file.scale: expected float, found '1.5'"),
        ({"name": "a", "scale": 10**400}, "file.scale: expected a finite number"),
        ({"name": "a", "bits": True}, "file.bits: expected int, found True"),
        ({"name": "a", "bits": 4.0}, "file.bits: expected int, found 4.0"),
        ({"name": "a", "labels": "xy"}, "file.labels: expected a list of strings, found 'xy'"),
        ({"name": "a", "labels": ["x", 1]}, "file.labels: expected a list of strings"),
        ({"name": "a", "part": {"size": "3"}}, "file.part.size: expected int, found '3'"),
    ],
)
def test_build_names_the_place_of_a_wrong_value(data, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        strict_json.build(Whole, data, "file")


def test_build_of_a_complete_object_requires_fields_with_defaults():
    with pytest.raises(ValueError, match="file: mode is missing"):
        strict_json.build(Whole, {"name": "a"}, "file", complete=True)


def test_values_in_errors_stay_short_and_on_one_line():
    assert strict_json.abbreviated("a\nb") == r"'a\nb'"
    assert len(strict_json.abbreviated("x" * 1000)) == strict_json.LENGTH
    assert strict_json.abbreviated(10**5000) == "int"
    assert strict_json.printable("model.layers.0") == "model.layers.0"
    assert strict_json.printable("a\nb") == r"'a\nb'"
    assert strict_json.one_line(ValueError("first\n  second\x00third")) == "first second third"
    assert len(strict_json.one_line(ValueError("x" * 1000))) == 3 * strict_json.LENGTH
