"""Tables: their definitions, and their text on a terminal and as Markdown."""

import io
from types import SimpleNamespace

from rich.console import Console

from quantsink.eval.lab.seeds import Group
from quantsink.eval.lab.tables import Table, _table, markdown


def printed(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(table.rich())
    return out.getvalue()


DEFINITION = """Errors of {model}
variant | {group} | left
loss | {loss:.2f}
{heading} keys | {errors[{key}]:.1f else -} | each budgets
- at {LENGTH} tokens
- {note}"""


def test_a_definition_and_rows_make_a_table() -> None:
    runs = tuple(SimpleNamespace(loss=loss, errors={"few": loss, "many": None}) for loss in (1.0, 2.0))
    facts = {"model": "tiny", "budgets": {4: "few", 64: "many"}, "LENGTH": 256, "note": ""}
    table = _table(DEFINITION, [Group("softmax", runs)], facts)
    assert table.title == "Errors of tiny"
    assert table.columns == ("variant", "loss", "4 keys", "64 keys")
    assert table.rows == (("softmax", "1.50 ± 0.71", "1.5 ± 0.7", "-"),)
    assert table.notes == ("at 256 tokens",), "an empty note is left out"
    assert table.left == 1


def test_a_row_may_be_any_object() -> None:
    table = _table("t\nname | {name} | left\ncount | {count:,}", [SimpleNamespace(name="BOS", count=1234)], {})
    assert table.rows == (("BOS", "1,234"),)


def test_a_column_per_key_is_missing_if_there_are_no_keys() -> None:
    definition = "t\nname | {name}\n{heading} | {name} | each extra"
    assert _table(definition, [], {"extra": []}).columns == ("name",)


def test_markdown_aligns_words_left_and_numbers_right() -> None:
    table = Table("Title", ("name", "value"), (("x", "1"),), ("a note",))
    assert markdown([table]) == "### Title\n\n| name | value |\n| --- | ---: |\n| x | 1 |\n\n- a note\n"


def test_a_cell_cannot_break_a_table() -> None:
    table = Table("t", ("a", "b"), (("x|y\nz", "[red]z"),), ())
    assert "| x\\|y z | [red]z |" in table.markdown()
    assert "[red]z" in printed(table)
