"""A long text through a rolling cache: what is fed and scored, what the cache weighs, what the report says of it."""

import copy
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibration import Calibration
from quantsink.errors import ArchitectureError, QuantSinkError, UsageError
from quantsink.eval import EvalText, Report, RollingCurve, Stream, measure, read_stream, rolling
from quantsink.eval.findings import rolling_findings
from quantsink.eval.rolling import CHUNK, DROPPED, KEPT, POINTS

TOKENS, HELD = 8192, 512


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "long.txt"
    path.write_text("".join(f"line {number} of many, each different.\n" for number in range(300)))
    return path


@pytest.fixture(scope="module")
def stream(tokenizer: PreTrainedTokenizerFast, long_text: Path) -> Stream:
    return read_stream(tokenizer, str(long_text), tokens=TOKENS, max_length=HELD)


Measure = Callable[..., Report]


@pytest.fixture(scope="module")
def run(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    calibration: Calibration,
    text: EvalText,
    stream: Stream,
) -> Measure:
    def call(**options: Any) -> Report:
        settings = {"model": model, "calibration": calibration, "rolling": stream, **options}
        return measure(tokenizer=tokenizer, model_name="tiny", text=text, methods=[], **settings)

    return call


@pytest.fixture(scope="module")
def report(run: Measure) -> Report:
    return run()


def test_a_stream_is_one_bos_and_the_beginning_of_the_text(
    stream: Stream, tokenizer: PreTrainedTokenizerFast, long_text: Path
) -> None:
    assert stream.tokens == TOKENS
    assert stream.ids[1:].tolist() == tokenizer(long_text.read_text()[:TOKENS])["input_ids"]
    assert stream.ids[0] == tokenizer.bos_token_id
    assert int((stream.ids == tokenizer.bos_token_id).sum()) == 1
    without = read_stream(tokenizer, str(long_text), tokens=TOKENS, bos=False)
    assert without.tokens == TOKENS
    assert torch.equal(without.ids[:-1], stream.ids[1:])


def test_documents_follow_each_other(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    parts = [letter * 3000 for letter in "abc"]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    documents = read_stream(tokenizer, str(tmp_path / "three.jsonl"), tokens=TOKENS)
    assert documents.ids[1:].tolist() == tokenizer("".join(parts)[:TOKENS])["input_ids"]


def test_a_text_with_one_token_too_few_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "enough.txt").write_text("x" * TOKENS)
    assert read_stream(tokenizer, str(tmp_path / "enough.txt"), tokens=TOKENS).tokens == TOKENS
    (tmp_path / "short.txt").write_text("x" * (TOKENS - 1))
    with pytest.raises(UsageError, match=r"--rolling 8192: short.txt has 8,191 tokens; give fewer"):
        read_stream(tokenizer, str(tmp_path / "short.txt"), tokens=TOKENS)


@pytest.mark.parametrize("tokens", [0, -8192, 4096, 10000])
def test_lengths_that_are_no_multiple_of_the_points_are_refused(
    tokens: int, tokenizer: PreTrainedTokenizerFast, long_text: Path
) -> None:
    with pytest.raises(UsageError, match=rf"--rolling {tokens}: a multiple of 4096, 8192 or more"):
        read_stream(tokenizer, str(long_text), tokens=tokens)


def test_each_curve_has_points_at_equal_steps(report: Report, model: LlamaForCausalLM) -> None:
    assert [curve.method for curve in report.rolling] == [KEPT, DROPPED]
    kept, dropped = report.rolling
    assert (kept.sinks, dropped.sinks) == (4, 0)
    for curve in report.rolling:
        assert (curve.max_length, curve.trained_length) == (HELD, model.config.max_position_embeddings)
        assert 8 < curve.bits_kv <= 10
        assert [point.tokens for point in curve.points] == [TOKENS // POINTS * (i + 1) for i in range(POINTS)]
        assert [point.scored for point in curve.points] == [TOKENS // POINTS - CHUNK] + [TOKENS // POINTS] * (
            POINTS - 1
        )
        for point in curve.points:
            assert point.ppl == pytest.approx(math.exp(point.nll / point.scored))


def test_before_anything_is_dropped_the_perplexity_is_the_models(
    report: Report, model: LlamaForCausalLM, stream: Stream
) -> None:
    with torch.no_grad():
        rows = model(input_ids=stream.ids[None, : TOKENS // POINTS]).logits[0].log_softmax(-1)
    targets = stream.ids[1 : TOKENS // POINTS + 1]
    exact = math.exp(-rows.gather(1, targets[:, None])[CHUNK:].double().mean().item())
    for curve in report.rolling:
        assert curve.points[0].ppl == pytest.approx(exact, rel=0.02)


def test_a_full_cache_has_constant_size(report: Report) -> None:
    for curve in report.rolling:
        full = {point.cache_bytes for point in curve.points if point.tokens >= 2 * HELD}
        assert len(full) == 1
        exact = 2 * 2 * 2 * 16 * HELD * 4  # layers; keys, values; KV heads; head size; tokens; float32
        assert 0 < full.pop() < exact


def test_peak_memory_is_read_from_linux_or_left_out(
    report: Report, run: Measure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if Path("/proc/self/status").is_file():
        for curve in report.rolling:
            peaks = [point.peak_bytes for point in curve.points]
            assert all(peak is not None and peak > 50e6 for peak in peaks)
            # Linux adds these up from counters that are not exact.
            assert all(later > earlier - 2**20 for earlier, later in itertools.pairwise(peaks))
    monkeypatch.setattr(rolling, "_PROC", tmp_path / "none")
    unknown = run()
    assert {point.peak_bytes for curve in unknown.rolling for point in curve.points} == {None}
    assert Report.from_dict(unknown.to_dict()) == unknown
    assert unknown.rolling_columns == ["tokens", "perplexity, sinks kept", "perplexity, sinks dropped", "cache MB"]
    assert "resident" not in unknown.findings[-1].evidence


def test_progress_counts_the_chunks_of_each_curve(
    run: Measure, monkeypatch: pytest.MonkeyPatch, stream: Stream, model: LlamaForCausalLM
) -> None:
    calls = []
    run(progress=lambda *at: calls.append(at))
    chunks = TOKENS // CHUNK
    assert calls[-1] == ("rolling, sinks dropped", chunks, chunks)
    assert [at[1] for at in calls if at[0] == "rolling, sinks kept"] == list(range(1, chunks + 1))
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_nan_is_refused_and_its_place_named(model: LlamaForCausalLM, calibration: Calibration, stream: Stream) -> None:
    broken = copy.deepcopy(model)
    plans = rolling.plan_rolling(broken, calibration, stream)
    broken.model.norm.weight.data[0] = math.nan
    with pytest.raises(QuantSinkError, match=r"rolling, sinks kept: token 512: its logits contain NaN"):
        rolling.measure_rolling(broken, plans, stream)
    assert broken.config._attn_implementation == "sdpa"


def refused(run: Measure, error: type[Exception], match: str, **options: Any) -> None:
    calls: list[Any] = []
    with pytest.raises(error, match=match):
        run(progress=lambda *at: calls.append(at), **options)
    assert not calls


def test_invalid_lengths_are_refused(run: Measure, stream: Stream) -> None:
    refused(
        run,
        UsageError,
        "--rolling-length 4096: the model takes at most 2048 tokens",
        rolling=dataclasses.replace(stream, max_length=4096),
    )
    for length in (300, 100):
        short = dataclasses.replace(stream, max_length=length)
        refused(run, UsageError, f"--rolling-length {length}: at least 387", rolling=short)


def test_the_smallest_length_holds_a_chunk(run: Measure, stream: Stream) -> None:
    smallest = run(rolling=dataclasses.replace(stream, max_length=387))
    assert {curve.max_length for curve in smallest.rolling} == {387}


def test_a_calibration_is_needed(run: Measure) -> None:
    refused(run, UsageError, "--rolling: needs a calibration of tiny", calibration=None)


def test_dynamic_rotary_positions_are_refused(tiny: Callable[..., LlamaForCausalLM], stream: Stream) -> None:
    model = tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ArchitectureError, match="needs fixed rotary positions, the model has dynamic"):
        rolling.check_rolling(model, stream)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_sliding_layers_is_accepted(tiny_gemma: Callable[..., Any], stream: Stream) -> None:
    rolling.check_rolling(tiny_gemma(), dataclasses.replace(stream, max_length=387))


def test_a_report_survives_json_and_damaged_json_is_refused(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report")
    assert Report.load(tmp_path / "report") == report
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.json", "report.html", "rolling.png"}
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (data["schema"], len(data["rolling"])) == (2, 2)

    def wrong(change: Callable[[dict[str, Any]], Any], message: str) -> None:
        changed = json.loads(json.dumps(data))
        change(changed)
        with pytest.raises(UsageError, match=message):
            Report.from_dict(changed)

    wrong(lambda d: d.pop("rolling"), "not a quantsink report")
    wrong(lambda d: d["rolling"][0].update(more=1), r"rolling\[0\]: unknown key 'more'")
    wrong(lambda d: d["rolling"][1]["points"][2].pop("ppl"), r"rolling\[1\].points\[2\]: no 'ppl'")
    wrong(lambda d: d["rolling"][1]["points"][2].update(tokens=1.0), r"points\[2\].tokens: expected int")
    report.save(tmp_path / "report", force=True)


def test_html_and_terminal_show_the_curves(report: Report) -> None:
    pictures = report.pictures()
    assert list(pictures) == ["rolling.png"]
    html = report.html(pictures)
    assert html.count("data:image/png;base64,") == 1
    console = Console(width=200, file=io.StringIO())
    console.print(report.rolling_table(), *report.lines(), sep="\n")
    printed = console.file.getvalue()
    for point, other in zip(*(curve.points for curve in report.rolling), strict=True):
        line = next(line.split() for line in printed.splitlines() if line.split()[:1] == [f"{point.tokens:,}"])
        assert line[1:4] == [f"{point.ppl:,.2f}", f"{other.ppl:,.2f}", f"{point.cache_bytes / 1e6:.2f}"]
        assert f">{point.ppl:,.2f}<" in html
    for fact in ("A rolling cache over 8,192 tokens: sinks kept, not dropped", "largest over smallest"):
        assert fact in printed
        assert fact in html
    assert "at most 512 tokens held" in dict(report.facts())["rolling cache"]


def test_reports_merge_with_one_rolling_cache(report: Report, run: Measure) -> None:
    plain = run(rolling=None)
    assert plain.rolling == ()
    assert plain.merge(report).rolling == report.rolling == report.merge(plain).rolling
    with pytest.raises(UsageError, match="a rolling cache appears in both"):
        report.merge(report)


def changed(curve: RollingCurve, nll: float, cache: Callable[[int], int], peak: Callable[[int], int]) -> RollingCurve:
    points = tuple(
        dataclasses.replace(
            point,
            nll=nll * point.scored,
            ppl=math.exp(nll),
            cache_bytes=cache(i),
            peak_bytes=peak(i),
        )
        for i, point in enumerate(curve.points)
    )
    return dataclasses.replace(curve, points=points)


@pytest.mark.parametrize(("kept", "verdict"), [(1.0, "helped"), (3.0, "hurt"), (2.0, "no difference shown")])
def test_verdict_follows_the_perplexities(kept: float, verdict: str, report: Report) -> None:
    def flat(_: int) -> int:
        return 1000

    curves = [changed(report.rolling[0], kept, flat, flat), changed(report.rolling[1], 2.0, flat, flat)]
    perplexities, memory = rolling_findings(curves)
    assert (perplexities.verdict, memory.verdict) == (verdict, "flat")
    assert f"ratio over all {math.exp(kept - 2):.3g}" in perplexities.evidence


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        (lambda i: 1000 * min(i + 1, 4), "flat"),  # grows in the first quarter only
        (lambda i: 4000 + 10 * i, "grew"),
        (lambda i: 5000 - 40 * i, "grew"),
    ],
)
def test_memory_is_flat_if_it_does_not_change_after_the_first_quarter(
    sizes: Callable[[int], int], verdict: str, report: Report
) -> None:
    def flat(_: int) -> int:
        return 1000

    for cache, peak in ((sizes, flat), (flat, sizes)):
        curves = [changed(curve, 1.0, cache, peak) for curve in report.rolling]
        assert rolling_findings(curves)[1].verdict == verdict


def test_without_curves_there_is_no_finding() -> None:
    assert rolling_findings([]) == []


def test_an_infinite_perplexity_is_drawn_and_written(report: Report) -> None:
    kept, dropped = report.rolling
    worst = dataclasses.replace(dropped.points[-1], ppl=math.inf, nll=1e6)
    infinite = dataclasses.replace(
        report, rolling=(kept, dataclasses.replace(dropped, points=(*dropped.points[:-1], worst)))
    )
    assert Report.from_dict(json.loads(json.dumps(infinite.to_dict(), allow_nan=False))) == infinite
    assert infinite.pictures()["rolling.png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert "inf" in infinite.html({})
