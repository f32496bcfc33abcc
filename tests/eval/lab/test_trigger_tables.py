"""The trigger experiments' tables and pictures, from runs with known figures."""

import dataclasses

import pytest

from quantsink.eval.lab.measures import METHODS, single_parts
from quantsink.eval.lab.tables import Table
from quantsink.eval.lab.trigger import HeadWeights, Solved
from quantsink.eval.lab.trigger_runs import Calibrated, TriggerRun
from quantsink.eval.lab.trigger_tables import trigger_plots, trigger_tables


def run(name: str, seed: int, layers: int = 1, own: bool = True) -> TriggerRun:
    heads = tuple(
        HeadWeights(
            layer, 0, 0.9, 0.05 if "learnable" in name else 0.0, 1.0, None if name == "relu" else 0.5, 0.9, 0.01
        )
        for layer in range(layers)
    )
    return TriggerRun(
        name=name,
        seed=seed,
        layers=layers,
        length=16,
        own=own,
        steps=10,
        solved=Solved(1.0 - 0.1 * seed, 1.0, 0.1, 0.2),
        heads=heads,
        strong=(1.0 + seed,) * layers,
        solved_long=1.0,
        long_sequences=8,
        errors=dict(zip(METHODS, (0.8, 0.6, 0.5, 0.1, 0.4), strict=True)),
        parts=dict.fromkeys(single_parts(1), 0.01),
        solved_8_bits=dict.fromkeys(METHODS, 0.75),
        calibrated=None if name == "relu" else Calibrated(((0, 0),), ((0, 0),), 1e-9, 0.02, 1.0),
    )


@pytest.fixture
def runs() -> list[TriggerRun]:
    """Deep ones first, as the experiment has them."""
    return [
        each
        for seed in (0, 1)
        for each in (
            run("softmax", seed, layers=4),
            run("softmax", seed),
            run("relu", seed),
            run("softmax + learnable-sinks", seed),
            run("softmax", seed, own=False),
        )
    ]


def cells(table: Table, row: str) -> dict[str, str]:
    return dict(zip(table.columns, next(cells for cells in table.rows if cells[0] == row), strict=True))


def test_tables_read_off_every_seed(runs: list[TriggerRun]) -> None:
    shallow, deep, eight_bits, sources, calibration = trigger_tables(runs)
    names = ["`softmax`", "`relu`", "`softmax + learnable-sinks`", "`softmax`, own content left out"]
    assert [row[0] for row in shallow.rows] == names
    row = cells(shallow, "`softmax`")
    assert row["weight on BOS"] == "0.9000 ± 0.0000"
    assert row["on a learnable sink"] == ""
    assert row["solved (worst seed)"] == "95.0% (90.0%)"
    assert cells(shallow, "`softmax + learnable-sinks`")["on a learnable sink"] == "0.0500 ± 0.0000"
    assert cells(shallow, "`relu`")["entropy"] == "no weight"

    assert deep.title == "4 layers of 1 heads: strong sink heads per sequence"
    assert cells(deep, "`softmax`")["all layers"] == "6.00 ± 2.83"
    assert cells(deep, "`softmax`")["seeds from - to"] == "4.00 to 8.00"
    assert "2 seeds" in deep.notes[0]

    assert [row[0] for row in eight_bits.rows] == [*names[:3], "`softmax`, 4 layers"]
    row = cells(eight_bits, "`softmax`")
    assert row["closed by `sink` (from - to)"] == "80.0% (80.0% to 80.0%)"
    assert row["by `random`"] == "20.0%"
    assert cells(sources, "`softmax`")["all three"] == "0.5 ± 0"
    assert cells(calibration, "`relu`")["heads found"] == "refused"
    assert cells(calibration, "`softmax`, 4 layers")["heads found"] == "2 of 8"
    assert cells(calibration, "`softmax`")["the same"] == "yes"


def test_a_calibration_that_disagrees_is_told(runs: list[TriggerRun]) -> None:
    calibrated = Calibrated((), ((0, 0),), 0.5, 0.02, 1.0)
    changed = [dataclasses.replace(r, calibrated=calibrated) if r.seed and r.calibrated else r for r in runs]
    assert cells(trigger_tables(changed)[-1], "`softmax`")["the same"] == "no"


def test_pictures_are_drawn(runs: list[TriggerRun]) -> None:
    pictures = trigger_plots(runs)
    assert set(pictures) == {"trigger_bos.png", "trigger_8_bits.png"}
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
