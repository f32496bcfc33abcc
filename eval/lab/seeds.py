"""Results of several seeds: the runs of one variant together, and how their figures are written.

A format string over a `Group` reads a figure off every run: `{heads[0].bos:.3f}` is the mean of `run.heads[0].bos` and
its standard deviation. What else can stand behind the colon: `Figures`.
"""

import math
import operator
import statistics
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar, cast

Run = TypeVar("Run")


@dataclass(frozen=True)
class Spread:
    """Of several seeds: mean and standard deviation (of a sample; None for one seed), smallest and largest."""

    mean: float
    sd: float | None
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        numbers = [float(value) for value in values]
        sd = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), sd, min(numbers), max(numbers))

    def __format__(self, spec: str) -> str:
        """Mean ± standard deviation, both by `spec` (`.3f`, `.1%`); without one, three significant digits each."""
        mean = number(self.mean, spec)
        return mean if self.sd is None else f"{mean.removesuffix('%')} ± {number(self.sd, spec)}"


def number(value: float, spec: str = "") -> str:
    """By `spec`; without one in three significant digits, for figures of very different sizes."""
    if spec:
        return format(value, spec)
    if math.isnan(value):
        return "n/a"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.3g}"


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; the last for more, which only widens intervals."""


def difference(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Mean of second - first with its 95 % interval, and what that allows to say."""
    spread = Spread.of(b - a for a, b in pairs)
    if spread.sd is None:
        return f"{spread.mean:+.4f}", "one seed says nothing"
    half = STUDENT[min(len(pairs) - 2, len(STUDENT) - 1)] * spread.sd / math.sqrt(len(pairs))
    verdict = "no difference shown" if abs(spread.mean) <= half else "higher" if spread.mean > 0 else "lower"
    return f"{spread.mean:+.4f} ± {half:.4f}", verdict


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(map(float, values))


def average(results: Sequence[Run]) -> Run:
    """One result whose every number is the mean of theirs, in nested dataclasses too."""
    items: Sequence[Any] = results
    if not is_dataclass(items[0]):
        return cast(Run, statistics.fmean(items))
    kind: Any = type(items[0])
    return cast(Run, kind(*(average([getattr(item, field.name) for item in items]) for field in fields(items[0]))))


READINGS: dict[str, Callable[[list[Any]], Any]] = {
    "first": operator.itemgetter(0),
    "mean": statistics.fmean,
    "percent": lambda values: 100 * statistics.fmean(values),
    "low": min,
    "high": max,
    "sum": sum,
    "number": len,
    "sizes": lambda values: sum(map(len, values)),
    "all": lambda values: "yes" if all(values) else "no",
    "perplexity": lambda values: f"{values[0]:,.0f}" if values[0] >= 1000 else f"{values[0]:.2f}",
    "list": lambda values: ", ".join(map(str, values)),
    "change": lambda values: f"{100 * statistics.fmean(values):+.1f}%",
    "changes": lambda values: ", ".join(f"{100 * value:+.1f}" for value in values) + "%",
}


class NoFigureError(Exception):
    """No run of a group has the figure; the message is what the cell says then."""


class Figures:
    """One figure of each run that has it (is not None). An attribute or an item is read off each.

    In a format string: `{x:.3f}` is mean ± standard deviation over the runs, `{x}` the same in three significant
    digits (a single value other than a float is written as it is), `{x:mean .1%}` one of `READINGS`, formatted, and
    `{x:.3f else none}` says "none" in the whole cell if no run has the figure.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = [value for value in values if value is not None]

    def __getattr__(self, name: str) -> "Figures":
        return Figures(getattr(value, name) for value in self.values)

    def __getitem__(self, key: Any) -> "Figures":
        return Figures(value[key] for value in self.values)

    def __format__(self, spec: str) -> str:
        spec, _, missing = spec.partition(" else ")
        if not self.values:
            raise NoFigureError(missing)
        reading, _, rest = spec.partition(" ")
        if reading in READINGS:
            return format(READINGS[reading](self.values), rest)
        single = len(self.values) == 1 and not isinstance(self.values[0], float)
        return format(self.values[0] if single else Spread.of(self.values), spec)


@dataclass(frozen=True)
class Group(Generic[Run]):
    """The runs of one variant, one for each seed."""

    name: str
    runs: tuple[Run, ...]

    def __getitem__(self, name: str) -> Any:
        """What a format string reads: the variant's name as `group`, the runs themselves as `row`, else off each."""
        if name == "group":
            return self.name
        return Figures(self.runs) if name == "row" else getattr(Figures(self.runs), name)

    def figures(self, path: str) -> list[Any]:
        """One figure of each run that has it, e.g. `heads[0].bos`."""
        figures: Figures = string.Formatter().get_field(path, (), self)[0]  # type: ignore[arg-type]
        return figures.values


def grouped(runs: Iterable[Run], name: Callable[[Run], str]) -> list[Group[Run]]:
    """Runs of one name together, names and runs in the order in which they come."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(name(run), []).append(run)
    return [Group(label, tuple(each)) for label, each in members.items()]
