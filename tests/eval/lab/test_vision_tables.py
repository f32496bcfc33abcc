"""The vision experiment's tables and pictures."""

import dataclasses

from quantsink.eval.lab.tables import markdown
from quantsink.eval.lab.vision import (
    VisionRun,
)
from quantsink.eval.lab.vision_tables import vision_plots, vision_tables


def test_tables_and_pictures(vision_runs: list[VisionRun]) -> None:
    again = [dataclasses.replace(run, seed=1, accuracy=run.accuracy + 0.01) for run in vision_runs]
    for found in (vision_runs, [*again, *vision_runs]):
        tables = vision_tables(found)
        for table in tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}
            table.rich()
        text = markdown(tables)
        assert "nan" not in text
        assert "refused" in text
        assert ("one seed says nothing" in text) == (found is vision_runs)
    plots = vision_plots(vision_runs)
    assert set(plots) == {"vision_places.png", "vision_heads.png"}
    assert all(png.startswith(b"\x89PNG") for png in plots.values())


def test_without_the_gate_there_is_nothing_to_compare(vision_runs: list[VisionRun]) -> None:
    titles = [table.title for table in vision_tables(vision_runs[:1])]
    assert "The gate against none" not in titles
    assert "The gate's values" not in titles
