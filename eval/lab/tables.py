"""One table, printed on a terminal and written as Markdown; figures of several seeds as mean and spread."""

import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """`rows` hold finished text, words in the first `left` columns. `notes`: what the figures rest on."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: int = 1

    def rich(self) -> RichTable:
        table = RichTable(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, name in enumerate(self.columns):
            table.add_column(escape(name), justify="left" if index < self.left else "right")
        for row in self.rows:
            table.add_row(*(escape(cell.replace("`", "")) for cell in row))
        table.caption, table.caption_justify = escape("\n".join(self.notes)), "left"
        return table

    def markdown(self) -> str:
        rule = tuple("---" if index < self.left else "---:" for index in range(len(self.columns)))
        lines = [tuple(map(_cell, self.columns)), rule, *(tuple(map(_cell, row)) for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return f"### {self.title}\n\n{body}\n" + (f"\n{notes}\n" if notes else "")


@dataclass(frozen=True)
class Spread:
    """Of several seeds: mean and standard deviation (of a sample; None for one seed), smallest and largest."""

    mean: float
    sd: float | None
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        found = [float(value) for value in values]
        sd = statistics.stdev(found) if len(found) > 1 else None
        return cls(statistics.fmean(found), sd, min(found), max(found))

    def text(self, digits: int = 3) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")

    def percent(self, digits: int = 1) -> str:
        sd = "" if self.sd is None else f" ± {100 * self.sd:.{digits}f}"
        return f"{100 * self.mean:.{digits}f}{sd}%"

    def short(self) -> str:
        """Three significant digits, for figures of very different sizes."""
        return _significant(self.mean) + ("" if self.sd is None else f" ± {_significant(self.sd)}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _significant(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.3g}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(table.markdown() for table in tables)


def canvas(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quantsink"})
    return buffer.getvalue()
