"""How bits and windows are shared out over KV heads."""

import pytest

from quantsink.calibration.cache_plan import choose_widths, choose_windows
from quantsink.calibration.records import KVHead
from quantsink.errors import CalibrationError
from quantsink.kernels.coded_attention.codes import WIDTHS


def kv_head(number, scale=1.0, far=None):
    return KVHead(0, number, False, tuple(scale * 2.0**-width for width in WIDTHS), None, far or {})


@pytest.mark.parametrize("bits", [2.5, 3, 4, 4.5, 5, 6, 7])
@pytest.mark.parametrize("count", [30, 90])
def test_the_real_average_is_within_two_percent_with_enough_heads(count, bits):
    heads = [kv_head(number, 0.9**number) for number in range(count)]
    widths = choose_widths(heads, bits, "measured", 0, 64)
    real = (sum(widths.values()) / count + 0.5) / (bits + 0.5)
    assert 0.98 <= real <= 1.02


def test_heads_with_larger_errors_get_more_bits():
    heads = [kv_head(number, 3.0**-number) for number in range(12)]
    widths = [choose_widths(heads, 4, "measured", 0, 64)[0, number] for number in range(12)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_random_widths_are_the_measured_ones_shuffled_by_the_seed():
    heads = [kv_head(number, 2.0**-number) for number in range(12)]
    measured, random, again = (
        choose_widths(heads, 4, widths, seed, 64) for widths, seed in (("measured", 0), ("random", 1), ("random", 1))
    )
    assert random == again != measured
    assert sorted(random.values()) == sorted(measured.values())


def test_widths_by_head_need_measured_errors():
    head = KVHead(0, 0, False, None, None, {})
    with pytest.raises(CalibrationError, match="--error-windows"):
        choose_widths([head], 4, "measured", 0, 64)
    assert choose_widths([head], 4, "uniform", 0, 64) == {(0, 0): 4}


def test_heads_stream_where_little_weight_lies_beyond_the_window():
    heads = [kv_head(0, far={64: 0.3, 256: 0.01}), kv_head(1, far={64: 0.3, 256: 0.03})]
    assert choose_windows(heads, "off") == {(0, 0): 0, (0, 1): 0}
    assert choose_windows(heads, "auto") == {(0, 0): 256, (0, 1): 0}
    assert choose_windows(heads, "300") == {(0, 0): 300, (0, 1): 0}
    assert choose_windows(heads, "100") == {(0, 0): 0, (0, 1): 0}
    with pytest.raises(CalibrationError, match="--seq-len above 76"):
        choose_windows(heads, "60")
