"""A profile's tables."""

import io

from rich.console import Console

from quantsink.eval.lab.profile_results import (
    Profile,
)
from quantsink.eval.lab.profile_tables import profile_tables
from quantsink.eval.lab.tables import markdown


def test_tables_say_what_they_rest_on(profile: Profile) -> None:
    grids = profile_tables(profile)
    page = markdown(profile_tables(profile))
    out = io.StringIO()
    for grid in grids:
        Console(file=out, width=200).print(grid.rich())
        assert all(len(row) == len(grid.columns) for row in grid.rows)
    for needed in ("192 ", "rows from 16 on", "8 sentences of text.txt (seed 0), with BOS"):
        assert needed in page
        assert needed in out.getvalue()
    first = profile.shares[0].means[0]
    assert f"{100 * first.first:.1f} %" in page
    assert ("where seen" in page) == (profile.sliding_layers > 0)
