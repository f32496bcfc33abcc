"""`measure` and the report it gives: conditions, refusals, files and what they say."""

import copy
import dataclasses
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibration import Calibration
from quantsink.errors import CalibrationError, CheckpointError, ModelError, QuantSinkError, UsageError
from quantsink.eval import METHODS, EvalText, Method, Report, Row, compare_conditions, measure, parse_methods, read
from quantsink.eval.findings import findings, number
from quantsink.eval.methods import NotRunError

Measure = Callable[..., Report]


@pytest.fixture(scope="module")
def run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, calibration: Calibration, text: EvalText
) -> Measure:
    """`measure` on the tiny model; keywords override its own."""

    def call(methods: str | list[Method] = "reference", **options: Any) -> Report:
        settings = {
            "model": model,
            "tokenizer": tokenizer,
            "model_name": "tiny <llama>",
            "calibration": calibration,
            "text": text,
            "methods": parse_methods(methods) if isinstance(methods, str) else methods,
        }
        return measure(**{**settings, **options})

    return call


@pytest.fixture(scope="module")
def report(run: Measure) -> Report:
    return run("all", notes=("its weights lie on a 4-bit grid",))


def row(report: Report, name: str) -> Row:
    return next(row for row in report.rows if row.method == name)


def test_every_method_has_its_row_in_order(report: Report) -> None:
    assert [row.method for row in report.rows] == list(METHODS)
    assert all(row.ok for row in report.rows)


def test_the_reference_is_itself(report: Report) -> None:
    first = report.rows[0]
    assert (first.kl, first.ppl_ratio, first.top1, first.bits_weight) == (0, 1, 1, 32)


def test_figures_lie_within_their_intervals(report: Report) -> None:
    for found in report.rows[1:]:
        assert found.kl_low is not None
        assert found.kl_low <= found.kl <= found.kl_high
        assert found.ppl_ratio_low <= found.ppl_ratio <= found.ppl_ratio_high
        assert found.ppl == pytest.approx(found.ppl_ratio * report.rows[0].ppl)
        assert 0 <= found.top1 <= 1


def test_routes_and_bits(report: Report) -> None:
    assert (row(report, "w8a8").sink_heads, row(report, "w8a8-random").sink_heads) == (2, 2)
    assert (row(report, "w8a8").bits_attention, row(report, "w8a16").bits_attention) == (8, 32)
    assert row(report, "clip-row-10").native_heads == 8
    assert row(report, "w8a16").bits_weight < row(report, "w8a8").bits_weight < 32


def test_the_model_stays_as_it_is(run: Measure, model: LlamaForCausalLM) -> None:
    before = copy.deepcopy(model.state_dict())
    run("w8a8,bnb-llm-int8")
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config._attn_implementation == "sdpa"


def test_conditions_are_true(report: Report, model: LlamaForCausalLM, text: EvalText) -> None:
    c = report.conditions
    assert (c.length, c.stride, c.bos, c.dtype, c.windows, c.scored) == (48, 47, 0, "float32", 4, 188)
    assert (c.data, c.data_fingerprint, c.complete) == ("prose.txt", text.fingerprint, False)
    assert c.parameters == sum(p.numel() for p in model.parameters())
    assert c.calibration is not None
    assert (c.calibration.data, c.calibration.tokens, c.calibration.covers_text) == (("other.txt",), 192, False)
    assert c.versions.torch == torch.__version__


def test_text_used_for_calibration_is_said(
    run: Measure, calibration: Calibration, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for name in (calibration.domains[0].spec, str(tmp_path / "copy.txt")):
        if not Path(name).exists():
            Path(name).write_text(Path(calibration.domains[0].spec).read_text())
        found = run("reference", text=read(tokenizer, name, length=30, max_windows=2))
        assert found.conditions.calibration.covers_text
        assert "measured on text used for calibration" in found.warnings[0]
        assert "measured on text used for calibration" in found.html({})


def test_nothing_runs_on_wrong_terms(
    run: Measure, tiny: Callable[..., LlamaForCausalLM], model: LlamaForCausalLM, calibration: Calibration
) -> None:
    with pytest.raises(UsageError, match="w8a8: needs a calibration"):
        run("w8a8", calibration=None)
    with pytest.raises(CalibrationError, match="not those of the calibrated"):
        run("w8a8", model=tiny(initializer_range=0.2))
    with pytest.raises(ModelError, match="already quantized"):
        run("reference", model=METHODS["w8a8"].build(copy.deepcopy(model), calibration))
    with pytest.raises(UsageError, match="load_checkpoint"):
        run("reference", checkpoints=[Path("x")])
    assert run("reference,bnb-llm-int8", calibration=None).conditions.calibration is None


def test_a_method_that_cannot_run_states_why(run: Measure) -> None:
    def refuse(*_: Any) -> Any:
        raise NotRunError("bitsandbytes does not run on abacus")

    def fail(*_: Any) -> Any:
        raise QuantSinkError("peer: its logits contain NaN or inf")

    methods = [Method("absent", "", "peer", refuse, False), Method("broken", "", "peer", fail, False)]
    found = run(methods=methods)
    assert [r.status for r in found.rows[1:]] == [
        "not run: bitsandbytes does not run on abacus",
        "failed: peer: its logits contain NaN or inf",
    ]
    assert found.rows[1].kl is None
    assert "does not run on abacus" in found.html({})
    assert Report.from_dict(found.to_dict()) == found


def test_nan_in_a_method_of_our_own_ends_the_report(run: Measure) -> None:
    def poison(model: Any, _: Any) -> Any:
        model.model.norm.weight.data[0] = math.nan
        return model

    with pytest.raises(QuantSinkError, match="poisoned: its logits contain NaN"):
        run(methods=[Method("poisoned", "", "preset", poison, False)])


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "w8a8"
    model.save_pretrained(folder)
    return folder


def test_a_checkpoint_is_a_row_with_its_bytes_on_disk(run: Measure, checkpoint: Path) -> None:
    found = run(checkpoints=[checkpoint], load_checkpoint=LlamaForCausalLM.from_pretrained)
    last = found.rows[-1]
    assert (last.method, last.kl, last.group) == ("checkpoint:w8a8", 0, "checkpoint")
    assert last.payload_bytes == found.rows[0].payload_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vocab_size": 259}, "vocab_size is 259"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1"),
        ({"dtype": "bfloat16"}, "holds bfloat16, the reference is float32"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    run: Measure, tiny: Callable[..., LlamaForCausalLM], checkpoint: Path, options: dict[str, Any], says: str
) -> None:
    def load(_: Path) -> LlamaForCausalLM:
        return tiny(**options).to(options.get("dtype") and torch.bfloat16)

    with pytest.raises(CheckpointError, match=says):
        run(checkpoints=[checkpoint], load_checkpoint=load)


# Comparing


@pytest.mark.parametrize("options", [{"length": 47}, {"stride": 40}, {"bos": False}, {"max_windows": 3}])
def test_reports_measured_differently_do_not_merge(
    run: Measure, report: Report, tokenizer: PreTrainedTokenizerFast, prose: Path, options: dict[str, Any]
) -> None:
    other = read(tokenizer, str(prose), **{"length": 48, "max_windows": 4, **options})
    with pytest.raises(UsageError, match=r"not comparable: (length|stride|bos|data_fingerprint)"):
        report.merge(run("w8a8", text=other))


def test_another_dtype_or_model_does_not_compare(report: Report) -> None:
    for change in ({"dtype": "bfloat16"}, {"model_fingerprint": "0" * 64}):
        with pytest.raises(UsageError, match=next(iter(change))):
            compare_conditions(report.conditions, dataclasses.replace(report.conditions, **change))


def test_reports_measured_alike_merge(run: Measure) -> None:
    first, second = run("w8a8", notes=("a",)), run("w8a16", notes=("a", "b"))
    both = first.merge(second)
    assert [row.method for row in both.rows] == ["reference", "w8a8", "w8a16"]
    assert both.notes == ("a", "b")
    with pytest.raises(UsageError, match="w8a16: stands in both"):
        both.merge(second)


# Files


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

    def refused(change: Callable[[dict[str, Any]], Any], says: str) -> None:
        changed = json.loads(json.dumps(data))
        change(changed)
        with pytest.raises(UsageError, match=says):
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
    found = dataclasses.replace(report, rows=(worst,))
    assert Report.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    assert "inf" in found.html({})


def test_html_stands_alone_and_names_every_row(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "report")
    html = (tmp_path / "report" / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|url\(|@import|<script|<link""", html)
    assert html.count("data:image/png;base64,") == 1
    for found in report.rows:
        assert f">{found.method}<" in html
    for fact in ("tiny &lt;llama&gt;", "4-bit grid", report.conditions.data_fingerprint, "stride 47", "float32"):
        assert fact in html
    assert "<llama>" not in html
    assert (tmp_path / "report" / "kl_vs_bits.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_taken_folder_is_refused(report: Report, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        report.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_report_of_the_reference_alone_can_be_saved(run: Measure, tmp_path: Path) -> None:
    run("reference").save(tmp_path / "report")
    assert "No two rows" in (tmp_path / "report" / "report.html").read_text()


def test_one_window_gives_figures_without_intervals(
    run: Measure, tokenizer: PreTrainedTokenizerFast, prose: Path, tmp_path: Path
) -> None:
    found = run("w8a8,w8a8-plain", text=read(tokenizer, str(prose), length=48, max_windows=1))
    assert found.rows[1].kl is not None
    assert (found.rows[1].kl_low, found.rows[1].ppl_ratio_high) == (None, None)
    found.save(tmp_path / "report")
    assert Report.load(tmp_path / "report" / "report.json") == found
    assert "not decided" in (tmp_path / "report" / "report.html").read_text()


def test_the_terminal_shows_rows_conditions_and_warnings(report: Report) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(report.table(), *report.lines(), sep="\n")
    shown = console.file.getvalue()
    for found in report.rows:
        assert found.method in shown
    for fact in (
        "length 48, stride 47, BOS token 0, float32",
        report.conditions.data_fingerprint[:12],
        "only 4 windows",
    ):
        assert fact in shown


# Findings


def test_verdicts_follow_the_rows(report: Report) -> None:
    def shifted(name: str, by: float) -> Row:
        base = row(report, "attention-row")
        sums = tuple(dataclasses.replace(w, kl=w.kl + by * w.count) for w in base.windows)
        return dataclasses.replace(base, method=name, windows=sums, kl=base.kl + by)

    def verdict(sink: float, other: float) -> str:
        (found,) = findings([shifted("attention-sink", sink), shifted("attention-random", other)])
        return found.verdict

    assert verdict(0.0, 0.1) == "helped"
    assert verdict(0.1, 0.0) == "hurt"
    assert verdict(0.0, 0.0) == "no difference shown"
    one = [dataclasses.replace(r, windows=r.windows[:1]) for r in report.rows]
    assert {found.verdict for found in findings(one)} == {"not decided"}


def test_numbers_read_plainly() -> None:
    shown = [number(value) for value in (0.0, 0.000744, 0.0103, 1.6512, 12345.6, 1.23e-6, -0.00021, math.inf)]
    assert shown == ["0", "0.000744", "0.0103", "1.65", "12,300", "1.23e-06", "-0.000210", "inf"]
