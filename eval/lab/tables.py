"""Tables, for a terminal and as Markdown. What their columns and their words are is written in `tables/*.txt`.

A definition there is `# name: title`, then a line for each column, then its notes (`- `). A column is its heading, a
template of its cells and, after another bar, `left` for words or `each NAME` for a column per key of the list of that
name; `{heading}` and `{key}` are then its heading and its key. A template is Python's format string over a row, which
is a `Group` of runs or any other object. Titles, headings and notes are format strings over an experiment's facts.
"""

import importlib.resources
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from quantsink.eval.lab.seeds import Group, NoFigureError


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
        lines = [tuple(map(_escaped, self.columns)), rule, *(tuple(map(_escaped, row)) for row in self.rows)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return f"### {self.title}\n\n{body}\n" + (f"\n{notes}\n" if notes else "")


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(table.markdown() for table in tables)


def read_tables(experiment: str, rows: Mapping[str, Iterable[Any]], facts: Mapping[str, Any]) -> list[Table]:
    """The tables of `tables/EXPERIMENT.txt` that have `rows`, in the order of `rows`; `facts`: what the words name."""
    text = (importlib.resources.files(__package__) / "tables" / f"{experiment}.txt").read_text("utf-8")
    definitions = dict(part.split(": ", 1) for part in text.removeprefix("# ").replace("\n  ", " ").split("\n\n# "))
    return [_table(definitions[name], each, facts) for name, each in rows.items()]


def _table(definition: str, rows: Iterable[Any], facts: Mapping[str, Any]) -> Table:
    title, *lines = definition.splitlines()
    notes = [line.removeprefix("- ").format_map(facts) for line in lines if line.startswith("- ")]
    columns = [each for line in lines if not line.startswith("- ") for each in _columns(line, facts)]
    return Table(
        title.format_map(facts),
        tuple(heading.format_map(facts) for heading, _, _ in columns),
        tuple(tuple(_cell(template, row) for _, template, _ in columns) for row in rows),
        tuple(filter(None, notes)),
        sum(place == "left" for _, _, place in columns),
    )


def _columns(line: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    heading, template, place = f"{line} | ".split(" | ")[:3]
    if not place.startswith("each "):
        yield heading, template, place
        return
    keys = facts[place.removeprefix("each ")]
    for name, key in keys.items() if isinstance(keys, Mapping) else zip(keys, keys, strict=True):
        yield heading.replace("{heading}", str(name)), template.replace("{key}", str(key)), place


def _cell(template: str, row: Any) -> str:
    try:
        return template.format_map(row if isinstance(row, Group) else Group("", (row,)))
    except NoFigureError as missing:
        return str(missing)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
