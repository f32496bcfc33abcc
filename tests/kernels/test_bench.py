"""The benches run on small sizes and print their rows. No time is asserted: a bench says what this processor does."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from quantsink.kernels import Route
from quantsink.kernels.cpu import library

BENCH = Path(__file__).parents[2] / "kernels" / "bench"
needs_kernels = pytest.mark.skipif(library() is None, reason="the C++ kernels were not built")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What kernels/bench/run.py defines."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(BENCH / "run.py"))


def small_cases() -> dict[str, Any]:
    """Cases of the CPU bench in sizes that take a moment."""
    return {
        "prefill_int8_4096": lambda bench, repeats: bench["prefill"](6, 2, 64, 256, (Route.INT8,) * 6, repeats),
        "decode_4bit_32k": lambda bench, repeats: bench["decode"](4, repeats, keys=600),
    }


def written_rows(script: str, *arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    target = folder / "rows.json"
    monkeypatch.setattr(sys, "argv", [script, "--json", str(target), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(BENCH / script), run_name="__main__")
    written: dict[str, Any] = json.loads(target.read_text())
    return written


def test_the_reference_bench_prints_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--case", "prefill 256", "--repeats", "1")
    (row,) = written_rows("reference.py", *arguments, folder=tmp_path, monkeypatch=monkeypatch)["rows"]
    assert set(row) == {"name", "ours_ms", "eager_ms", "ratio"}
    assert row["ratio"] == pytest.approx(row["ours_ms"] / row["eager_ms"])
    assert "prefill 256" in capsys.readouterr().out


@needs_kernels
@pytest.mark.parametrize("name", small_cases())
def test_the_cpu_bench_prints_a_row_its_gate_and_the_processor(
    bench: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = small_cases()[name]
    monkeypatch.setitem(bench["CASES"], name, lambda repeats: case(bench, repeats))
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(target), "--only", name, "--repeats", "1"])
    bench["main"]()
    written, printed = json.loads(target.read_text()), capsys.readouterr().out
    (row,) = written["rows"]
    assert {"name", "ours_ms", "best_torch_ms", "as_transformers_ms", "ratio", "gate", "aim", "reached"} <= set(row)
    assert (row["name"], row["gate"]) == (name, "passed")
    assert row["ratio"] == pytest.approx(row["best_torch_ms"] / row["ours_ms"])
    assert row["reached"] == (row["ratio"] >= row["aim"])
    assert name in printed
    assert ("reached" if row["reached"] else "not reached") in printed
    assert written["processor"]["model"] in printed
    assert written["processor"]["features"] in printed


@needs_kernels
def test_an_aim_that_is_not_reached_is_no_failure(bench: dict[str, Any]) -> None:
    assert bench["reached"]("prefill_int8_4096", 0.1) is False
    assert bench["reached"]("prefill_int8_4096", 9.0) is True
    assert bench["reached"]("mixed_overhead", 1.05) is True, "least overhead is best"
    assert bench["reached"]("decode_4bit_32k", None) is None
    assert set(bench["AIMS"]) == set(bench["CASES"])


@needs_kernels
def test_a_kernel_outside_its_error_budget_is_not_timed(bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = bench["main"].__globals__
    attention = names["sink_attention"]
    monkeypatch.setitem(names, "sink_attention", lambda **arguments: attention(**arguments) * 1.01)
    row = bench["prefill"](6, 2, 64, 256, (Route.INT8,) * 6, 1)
    assert row["gate"].startswith("failed: RMS error")
    assert row["ours_ms"] is None


@needs_kernels
def test_a_decoding_step_reads_the_bytes_of_its_codes_once(bench: dict[str, Any]) -> None:
    """Bits per number and half a bit of scales: what the bandwidth of the bench is computed from."""
    row = bench["decode"](4, 1, keys=4096 + 65)
    coded, exact = 2 * 3 * 4096 * 64 * 4.5 / 8, 2 * 3 * 65 * 64 * 2
    assert row["gb_per_s"] * row["ours_ms"] * 1e6 == pytest.approx(coded + exact)
