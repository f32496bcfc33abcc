"""JSON as quantsink reads it: what could mean two things or nothing is refused, and so is what has another type."""

import dataclasses
import json
import math
import types
import typing
from typing import Any, Literal

DEPTH = 64
"""Objects and lists inside each other."""
SHOWN = 80
"""Characters of a value that an error repeats."""


def parse(text: str | bytes) -> Any:
    """Parsed JSON.

    Raises:
        ValueError: no JSON in UTF-8, a key that stands twice, NaN or infinity, half a surrogate pair, or deeper than
            `DEPTH`.
    """
    try:
        found = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH}") from None
    _check(found)
    return found


def build(cls: type, data: object, place: str, *, complete: bool = False) -> Any:
    """A dataclass from a JSON object. Fields may be str, int, bool, float, Literal of str, tuples, dataclasses, or one
    of these or None; nothing is converted but `"inf"` and whole numbers to float.

    Args:
        place: names the origin in errors.
        complete: every field must be there, defaults or not.

    Raises:
        ValueError: an unknown or missing key, or a value of another type, by its place.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{place}: expected an object, found {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = [key for key in data if key not in hints]
    if unknown:
        raise ValueError(f"{place}: unknown key {shown(unknown[0])}; known are {', '.join(hints)}")
    needed = hints if complete else {f.name for f in dataclasses.fields(cls) if _has_no_default(f)}
    absent = [key for key in hints if key in needed and key not in data]
    if absent:
        raise ValueError(f"{place}: {absent[0]} is missing")
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
            raise ValueError(f"{place}: {shown(item)} is not one of {', '.join(choices)}")
        return item
    if origin is tuple:
        kind = typing.get_args(hint)[0]
        if not isinstance(item, list | tuple) or not all(type(part) is kind for part in item):
            what = "strings" if kind is str else kind.__name__
            raise ValueError(f"{place}: expected a list of {what}, found {shown(item)}")
        return tuple(item)
    if origin is types.UnionType:
        return None if item is None else value(typing.get_args(hint)[0], item, place)
    if hint is float and item == "inf":
        return math.inf
    if isinstance(item, bool) is not (hint is bool) or not isinstance(item, (int, float) if hint is float else hint):
        raise ValueError(f"{place}: expected {hint.__name__}, found {shown(item)}")
    if hint is float and not -1e300 < typing.cast(float, item) < 1e300:
        raise ValueError(f"{place}: expected a finite number, found {shown(item)}")
    return hint(item)


def shown(item: object) -> str:
    """A value in an error: on one line, and cut where it is long."""
    try:
        text = repr(item)
    except (RecursionError, ValueError):  # nested too deep, or an integer of thousands of digits
        text = type(item).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def named(text: str) -> str:
    """A tensor's or module's name in an error: as it is, unless it would not stay on one line."""
    return text if text.isprintable() and len(text) <= 3 * SHOWN else shown(text)


def said(error: BaseException) -> str:
    """What another library says of a damaged file: on one line, and cut where it repeats the file."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    return text if len(text) <= 3 * SHOWN else f"{text[: 3 * SHOWN - 3]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} stands twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name}: expected a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is larger than any float")
    return number


def _check(found: Any) -> None:
    """Level by level, so that depth costs no stack."""
    level = [found]
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
        raise ValueError(f"{shown(text)} holds half a surrogate pair") from None


__all__ = ["build", "named", "parse", "said", "shown", "value"]
