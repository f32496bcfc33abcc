"""Layer mixes: which layer gets which attention."""

import pytest

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec
from quantsink.eval.lab.mechanisms import (
    OutputGate,
    SinkBias,
)
from quantsink.eval.lab.mixes import layer_mix
from quantsink.eval.lab.normalizers import (
    ReLU,
)

SINKS = AttentionSpec(mechanisms=(SinkBias(),))
GATED = AttentionSpec(ReLU(), (OutputGate(),))
PLAIN = AttentionSpec()


def test_layers_mix_sinks_in_the_middle_with_gates_on_top() -> None:
    assert layer_mix(6, SINKS, GATED) == (SINKS,) * 4 + (GATED,) * 2
    assert layer_mix(2, SINKS, GATED) == (SINKS, GATED)
    assert layer_mix(6, SINKS, GATED, PLAIN) == (PLAIN,) * 2 + (SINKS,) * 2 + (GATED,) * 2
    assert layer_mix(4, SINKS, GATED, PLAIN, top_layers=0, bottom_layers=1) == (PLAIN,) + (SINKS,) * 3


@pytest.mark.parametrize(
    ("layers", "bottom", "options"),
    [
        (1, None, {}),
        (2, PLAIN, {}),
        (3, None, {"top_layers": 3}),
        (3, None, {"bottom_layers": 1}),
        (3, None, {"top_layers": -1}),
    ],
)
def test_a_mix_without_a_middle_is_refused(layers: int, bottom: AttentionSpec | None, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"layers of {layers}"):
        layer_mix(layers, SINKS, GATED, bottom, **options)
