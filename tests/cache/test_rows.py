"""The state of one sequence: which of its tokens are exact, coded and forgotten."""

import pytest

from quantsink.cache.rows import Row


@pytest.mark.parametrize(
    ("row", "newest"),
    [
        (Row(0, 0, (0,)), 300),
        (Row(30, 0, (0,)), 270),
        (Row(0, 2, (2,)), 300 - 4 - 128),
        (Row(30, 2, (2, 1)), 270 - 4 - 128),
    ],
)
def test_the_newest_tokens_are_those_that_are_neither_sinks_nor_codes(row, newest):
    assert row.newest(300, 4) == newest
    assert row.length(300) == 300 - row.start


def test_tokens_are_forgotten_when_no_bank_holds_their_block():
    assert Row(0, 5, (5, 2)).forgotten == 0
    assert Row(0, 5, (3, 2)).forgotten == 128
