"""The language experiments' tables and pictures, from runs with known figures."""

import pytest

from quantsink.eval.lab.language import Activation, AtLength, Bucket, EightBits, GradientNoise, HeadMass
from quantsink.eval.lab.language_runs import (
    CACHES,
    KEYS,
    NOISY,
    QUICK,
    SOFTMAX,
    STREAM,
    TUNED,
    TUNED_SINK,
    VARIANTS,
    LanguageResult,
    LanguageRun,
    StepCost,
    StreamCurve,
    TextFacts,
)
from quantsink.eval.lab.language_tables import language_plots, language_tables
from quantsink.eval.lab.measures import METHODS
from quantsink.eval.lab.tables import Table


def buckets(length: int, size: int, perplexity: float) -> tuple[Bucket, ...]:
    return tuple(Bucket(start, start + size, perplexity) for start in range(0, length, size))


def run(name: str, seed: int) -> LanguageRun:
    curves = tuple(
        StreamCurve(cache, 8.0 - index, buckets(STREAM, KEYS, 8.0 - index))
        for index, cache in enumerate((*CACHES, TUNED_SINK, TUNED))
    )
    return LanguageRun(
        name=name,
        seed=seed,
        loss=2.0,
        lengths=tuple(AtLength(n, 1024, 10.0 + seed, buckets(n, n // 8, 10.0 + seed)) for n in (128, 512)),
        noise=tuple(GradientNoise(step, 4, 0.5, 1.0) for step in (20, 40)) if name in NOISY else (),
        heads=(HeadMass(0, 0, 0.9, 0.0, 1.0), HeadMass(0, 1, 0.1, 0.25, 0.8)),
        activations=(Activation(0, 30.0, 40.0), Activation(1, 35.0, 20.0)),
        eight_bits=tuple(EightBits(method, kl, 1.0) for method, kl in zip(METHODS, (5, 4, 2, 1, 3), strict=True)),
        streaming=curves if name == SOFTMAX.name else (),
    )


@pytest.fixture
def result() -> LanguageResult:
    runs = tuple(run(spec.name, seed) for spec in VARIANTS for seed in (0, 1))
    return LanguageResult(QUICK, TextFacts(1000, 10, 100), runs, StepCost((10.0, 10.0), (11.0, 10.5)))


def cells(table: Table, row: str) -> dict[str, str]:
    return dict(zip(table.columns, next(cells for cells in table.rows if cells[0] == row), strict=True))


def test_tables_read_off_every_seed(result: LanguageResult) -> None:
    claims, perplexity, noise, sinks, eight_bits, streaming, steps = language_tables(result)
    row = cells(claims, "cost of a training step, ms")
    assert (row["change, pair by pair"], row["mean"], row["verdict here"]) == ("+10.0, +5.0%", "+7.5%", "undecided")
    assert cells(claims, "perplexity per byte, 128 bytes (1x)")["verdict here"] == "-"
    assert claims.left == 2

    row = cells(perplexity, "`softmax`")
    assert (row["512 (4x)"], row["448-511"]) == ("10.500 ± 0.707", "10.50 ± 0.71")
    assert [row[:2] for row in noise.rows] == [(f"`{name}`", step) for name in NOISY for step in ("20", "40")]
    assert cells(noise, "`softmax`")["trace / ‖true‖²"] == "0.571 ± 0"

    row = cells(sinks, "`relu`")
    assert row["BOS mass, mean of heads"] == "0.500 ± 0.000"
    assert (row["sink heads (>= 0.3)"], row[">= 0.8"]) == ("2, 2", "1, 1")
    assert (row["largest activation at BOS"], row["elsewhere"]) == ("35.0 ± 0.0", "40.0 ± 0.0")

    row = cells(eight_bits, "`softmax`")
    assert (row["gap closed, sink"], row["gap closed, random"]) == ("0.50 ± 0.00", "-0.50 ± 0.00")
    assert [row[0] for row in streaming.rows] == [*CACHES, TUNED_SINK, TUNED]
    assert streaming.columns[:5] == ("cache", "from 128 on", "0-63", "64-127", "192-255")
    assert cells(steps, "first tokens kept")["change"] == "-14.3, -14.3%"
    assert cells(steps, "first tokens kept")["mean"] == "-14.3%"


def test_pictures_are_drawn(result: LanguageResult) -> None:
    pictures = language_plots(result)
    names = ["language_positions.png", "language_sinks.png", "language_8_bits.png", "language_streaming.png"]
    assert list(pictures) == names
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
