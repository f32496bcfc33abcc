"""Strict JSON: repeated keys, numbers that are not finite, deep nesting and values of the wrong type are refused."""

import dataclasses
import json
import math
import types
import typing
from typing import Any, Literal

DEPTH = 64
"""Largest number of objects and lists inside each other."""
LENGTH = 80
"""Largest number of characters of a value in an error."""


def parse(text: str | bytes) -> Any:
    """Parsed JSON.

    Raises:
        ValueError: not JSON in UTF-8, a repeated key, NaN or infinity, half a surrogate pair, or nested deeper than
            `DEPTH`.
    """
    try:
        data = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH}") from None
    _check(data)
    return data


def build(cls: type, data: object, place: str, *, complete: bool = False) -> Any:
    """A dataclass from a JSON object. Fields may be str, int, bool, float, Literal of str, tuples, dataclasses, or one
    of these or None; the only conversions are `"inf"` and whole numbers to float.

    Args:
        place: name of the JSON object in errors.
        complete: every field is required, even one with a default.

    Raises:
        ValueError: an unknown or missing key, or a value of the wrong type, with its place.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{place}: expected an object, found {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise ValueError(f"{place}: unknown key {abbreviated(unknown[0])}; known are {', '.join(hints)}")
    required = hints if complete else {f.name for f in dataclasses.fields(cls) if _has_no_default(f)}
    missing = [key for key in hints if key in required and key not in data]
    if missing:
        raise ValueError(f"{place}: {missing[0]} is missing")
    return cls(**{key: value(hints[key], item, f"{place}.{key}") for key, item in data.items()})


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def value(hint: Any, item: object, place: str) -> Any:
    """`item` as a field of type `hint`; see `build`."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), item, place)
    if origin is Literal:
        choices = typing.get_args(hint)
        if not isinstance(item, str) or item not in choices:
            raise ValueError(f"{place}: {abbreviated(item)} is not one of {', '.join(choices)}")
        return item
    if origin is tuple:
        item_type = typing.get_args(hint)[0]
        if not isinstance(item, list | tuple) or not all(type(part) is item_type for part in item):
            plural = "strings" if item_type is str else item_type.__name__
            raise ValueError(f"{place}: expected a list of {plural}, found {abbreviated(item)}")
        return tuple(item)
    if origin is types.UnionType:
        return None if item is None else value(typing.get_args(hint)[0], item, place)
    if hint is float and item == "inf":
        return math.inf
    if isinstance(item, bool) is not (hint is bool) or not isinstance(item, (int, float) if hint is float else hint):
        raise ValueError(f"{place}: expected {hint.__name__}, found {abbreviated(item)}")
    if hint is float and not -1e300 < typing.cast(float, item) < 1e300:
        raise ValueError(f"{place}: expected a finite number, found {abbreviated(item)}")
    return hint(item)


def abbreviated(item: object) -> str:
    """The repr of a value for an error: on one line, cut to `LENGTH` characters."""
    try:
        text = repr(item)
    except (RecursionError, ValueError):  # nested too deep, or an integer of thousands of digits
        text = type(item).__name__
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 3]}..."


def printable(text: str) -> str:
    """The name of a tensor or module for an error: unchanged if it is printable and not too long."""
    return text if text.isprintable() and len(text) <= 3 * LENGTH else abbreviated(text)


def one_line(error: BaseException) -> str:
    """The message of another library's error on one line, cut to three times `LENGTH` characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return text if len(text) <= 3 * LENGTH else f"{text[: 3 * LENGTH - 3]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {abbreviated(repeated)} appears twice")
    return unique


def _no_number(name: str) -> float:
    raise ValueError(f"{name}: expected a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{abbreviated(text)} is larger than any float")
    return number


def _check(data: Any) -> None:
    """Refuse deep nesting and half surrogate pairs. Level by level, so that depth costs no stack."""
    level = [data]
    for _ in range(DEPTH + 1):
        if not level:
            return
        texts = (part for item in level for part in (item if isinstance(item, dict) else (item,)))
        for text in texts:
            if isinstance(text, str) and not text.isascii():
                _check_text(text)
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]
    raise ValueError(f"nested deeper than {DEPTH}")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{abbreviated(text)} holds half a surrogate pair") from None


__all__ = ["abbreviated", "build", "one_line", "parse", "printable", "value"]
