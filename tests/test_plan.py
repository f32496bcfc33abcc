"""What a plan accepts before any model is seen."""

import pytest

from quantsink.errors import CacheError
from quantsink.plan import CachePlan
from quantsink.recipe import KVCache

OPTIONS = KVCache(sink_size=4)


@pytest.mark.parametrize(
    ("bits", "windows"),
    [((4, 4), (0, 128)), ((8, 2), None), ((3,), (64,))],
    ids=["streaming", "no windows", "one head"],
)
def test_a_cache_plan_takes_a_width_and_a_window_for_each_head(bits, windows):
    plan = CachePlan(OPTIONS, {"a": bits}, {} if windows is None else {"a": windows})
    assert (plan.sink_size, plan.rounding) == (4, "query")


@pytest.mark.parametrize("bits", [(5, 4), (4, True), ("4",), (4.0,), ()])
def test_widths_without_codes_are_refused(bits):
    with pytest.raises(CacheError, match=r"layer: bits .*one of 8, 4, 3, 2 for each KV head"):
        CachePlan(OPTIONS, {"layer": bits})


@pytest.mark.parametrize("windows", [(-1, 0), (0,), (2.5, 0), (True, 0)])
def test_windows_that_are_no_numbers_of_tokens_are_refused(windows):
    with pytest.raises(CacheError, match=r"layer: windows .*a whole number for each KV head"):
        CachePlan(OPTIONS, {"layer": (4, 4)}, {"layer": windows})


def test_a_cache_plan_needs_a_number_of_sinks():
    with pytest.raises(CacheError, match="sink_size"):
        CachePlan(KVCache(), {})
