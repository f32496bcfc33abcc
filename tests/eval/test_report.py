"""A report: merged, saved, loaded, and shown as HTML and on the terminal."""

import dataclasses
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from quantsink.errors import UsageError
from quantsink.eval import Report, read

Measure = Callable[..., Report]


@pytest.mark.parametrize("options", [{"length": 47}, {"stride": 40}, {"bos": False}, {"max_windows": 3}])
def test_reports_measured_differently_do_not_merge(
    run: Measure, report: Report, tokenizer: PreTrainedTokenizerFast, prose: Path, options: dict[str, Any]
) -> None:
    other = read(tokenizer, str(prose), **{"length": 48, "max_windows": 4, **options})
    with pytest.raises(UsageError, match=r"not comparable: (length|stride|bos|data_fingerprint)"):
        report.merge(run("w8a8", text=other))


def test_reports_measured_alike_merge(run: Measure) -> None:
    first, second = run("w8a8", notes=("a",)), run("w8a16", notes=("a", "b"))
    both = first.merge(second)
    assert [row.method for row in both.rows] == ["reference", "w8a8", "w8a16"]
    assert both.notes == ("a", "b")
    with pytest.raises(UsageError, match="w8a16 appears in both"):
        both.merge(second)


def test_json_round_trip_is_exact_and_strict(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report")
    assert Report.load(tmp_path / "report") == report
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {
        "method",
        "bits_weight",
        "bits_kv",
        "bits_attention",
        "payload_bytes",
        "ppl",
        "ppl_ratio",
        "kl",
        "top1",
    } <= set(data["rows"][0])

    def refused(change: Callable[[dict[str, Any]], Any], message: str) -> None:
        changed = json.loads(json.dumps(data))
        change(changed)
        with pytest.raises(UsageError, match=message):
            Report.from_dict(changed)

    refused(lambda d: d.update(schema=1), "schema 1, this quantsink reads 2")
    refused(lambda d: d.update(more=1), "not a quantsink report")
    refused(lambda d: d["rows"][1].update(extra=1), r"rows\[1\]: unknown key 'extra'")
    refused(lambda d: d["rows"][1].pop("kl"), r"rows\[1\]: no 'kl'")
    refused(lambda d: d["rows"][1].update(kl="low"), r"rows\[1\].kl: expected a number")
    refused(lambda d: d["rows"][1].update(kl=math.nan), r"rows\[1\].kl: expected a number")
    refused(lambda d: d["conditions"].update(length=48.0), "conditions.length: expected int")
    refused(lambda d: d["conditions"].update(complete=0), "conditions.complete: expected bool")


def test_an_infinite_perplexity_is_written_as_json(report: Report) -> None:
    worst = dataclasses.replace(report.rows[1], ppl=math.inf, ppl_ratio=math.inf)
    changed = dataclasses.replace(report, rows=(worst,))
    assert Report.from_dict(json.loads(json.dumps(changed.to_dict(), allow_nan=False))) == changed
    assert "inf" in changed.html({})


def test_html_is_self_contained_and_names_every_row(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report")
    html = (tmp_path / "report" / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import|<script|<link""", html)
    assert html.count("data:image/png;base64,") == 1
    for row in report.rows:
        assert f">{row.method}<" in html
    for fact in ("tiny &lt;llama&gt;", "4-bit grid", report.conditions.data_fingerprint, "stride 47", "float32"):
        assert fact in html
    assert "<llama>" not in html
    assert (tmp_path / "report" / "kl_vs_bits.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_folder_with_other_files_is_refused(report: Report, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        report.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_report_of_the_reference_alone_can_be_saved(run: Measure, tmp_path: Path) -> None:
    run("reference").save(tmp_path / "report")
    assert "No question could be answered" in (tmp_path / "report" / "report.html").read_text()


def test_one_window_gives_figures_without_intervals(
    run: Measure, tokenizer: PreTrainedTokenizerFast, prose: Path, tmp_path: Path
) -> None:
    report = run("w8a8,w8a8-plain", text=read(tokenizer, str(prose), length=48, max_windows=1))
    assert report.rows[1].kl is not None
    assert (report.rows[1].kl_low, report.rows[1].ppl_ratio_high) == (None, None)
    report.save(tmp_path / "report")
    assert Report.load(tmp_path / "report" / "report.json") == report
    assert "not decided" in (tmp_path / "report" / "report.html").read_text()


def test_the_terminal_shows_rows_conditions_and_warnings(report: Report) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(report.table(), *report.lines(), sep="\n")
    output = console.file.getvalue()
    for row in report.rows:
        assert row.method in output
    for fact in (
        "length 48, stride 47, BOS token 0, float32",
        report.conditions.data_fingerprint[:12],
        "only 4 windows",
    ):
        assert fact in output
