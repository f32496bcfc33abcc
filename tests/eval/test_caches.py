"""Rows measured through a KV cache: what is fed and scored, the size of a cache, and the report."""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibration import Calibration
from quantsink.errors import UsageError
from quantsink.eval import EvalText, Method, Report, cache_methods, divergence, measure, parse_widths, read
from quantsink.eval.bootstrap import kl_mean, perplexity
from quantsink.eval.caches import cache_bits, cache_bytes
from quantsink.eval.divergence import CHUNK, PREFILL
from quantsink.eval.findings import findings

needs_hqq = pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="needs hqq: pip install hqq")


@pytest.fixture(scope="module")
def cache_text(tokenizer: PreTrainedTokenizerFast, prose: Path) -> EvalText:
    return read(tokenizer, str(prose), length=PREFILL + 3 * CHUNK + 5, max_windows=2, context=PREFILL)


def plain(name: str = "plain", group: str = "cache") -> Method:
    """A row whose cache is transformers' own, exact one."""

    def prepare(model: Any, _: Any) -> Any:
        return lambda: DynamicCache(config=model.config)

    return Method(name, "", group, lambda model, _: model, False, prepare)


@pytest.fixture(scope="module")
def run(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, cache_text: EvalText) -> Callable[..., Report]:
    def call(methods: list[Method], **options: Any) -> Report:
        settings = {"calibration": None, "text": cache_text, **options}
        return measure(model, tokenizer, model_name="tiny", methods=methods, **settings)

    return call


def test_scoring_in_chunks_through_an_exact_cache_changes_nothing(
    model: LlamaForCausalLM, cache_text: EvalText
) -> None:
    with divergence.log_probs() as store:
        first = divergence.score_reference(model, cache_text.windows, store)
        again = divergence.score(
            model, cache_text.windows, store, name="cached", cache=lambda: DynamicCache(config=model.config)
        )
    assert kl_mean(again) == pytest.approx(0, abs=1e-6)
    assert perplexity(again) == pytest.approx(perplexity(first), rel=1e-5)
    assert [w.count for w in again] == [3 * CHUNK + 5] * 2


def test_each_window_fills_a_fresh_cache_with_a_prefill_and_chunks(
    model: LlamaForCausalLM, cache_text: EvalText, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, caches, seen = [], [], []

    class Watched(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **named: Any) -> Any:
            if layer == 0:
                fed.append(keys.shape[-2])
            return super().update(keys, values, layer, *rest, **named)

    def make() -> Any:
        caches.append(Watched(config=model.config))
        return caches[-1]

    with divergence.log_probs() as store:
        divergence.score_reference(model, cache_text.windows, store)
        divergence.score(model, cache_text.windows, store, name="x", cache=make, see=lambda *at: seen.append(at))
    assert fed == [128, 32, 32, 32, 5] * 2
    assert [cache for _, cache in seen] == caches
    assert [len(window.ids) for window, _ in seen] == [cache.get_seq_length() for cache in caches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_an_exact_cache_is_that_of_its_numbers(dtype: torch.dtype, model: LlamaForCausalLM) -> None:
    cache = DynamicCache(config=model.config)
    states = torch.ones(1, 2, 10, 16, dtype=dtype)
    for layer in range(2):
        cache.update(states, states, layer)
    assert cache_bytes(cache) == 2 * 2 * 2 * 10 * 16 * dtype.itemsize
    assert cache_bits(cache) == 8 * dtype.itemsize


def test_a_cache_with_nbytes_is_asked_for_its_size() -> None:
    assert cache_bytes(SimpleNamespace(nbytes=lambda: 7)) == 7
    assert cache_bits(SimpleNamespace(bits_per_number=4.5)) == 4.5


def test_a_cache_gets_a_row_with_its_bits_and_bytes(run: Callable[..., Report], tmp_path: Path) -> None:
    report = run([plain()])
    first, row = report.rows
    assert row.kl == pytest.approx(0, abs=1e-6)
    assert (first.bits_kv, first.kv_bytes) == (32, None)
    assert (row.bits_kv, row.kv_bytes) == (32, 2 * 2 * 2 * 229 * 16 * 4)  # keys, values; layers; heads; tokens; size
    c = report.conditions
    assert (c.context, c.scored) == (PREFILL, 2 * 101)
    facts = dict(report.facts())
    assert "first 128 of each window are context only" in facts["windows"]
    assert "128 tokens first and then 32" in facts["KV caches"]
    assert "context 128" in report.lines()[0]
    report.save(tmp_path / "report")
    assert Report.load(tmp_path / "report") == report
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.json",
        "report.html",
        "kl_vs_kv_bits.png",
    }
    html = (tmp_path / "report" / "report.html").read_text()
    assert ">KV bits<" in html
    assert html.count("data:image/png;base64,") == 1
    report.save(tmp_path / "report", force=True)
    assert [column.header for column in report.table().columns][:3] == ["method", "KV bits", "KL"]


def test_weights_and_caches_each_have_a_picture(run: Callable[..., Report], calibration: Calibration) -> None:
    from quantsink.eval import METHODS

    report = run([METHODS["w8a16"], plain()], calibration=calibration)
    pictures = report.pictures()
    assert list(pictures) == ["kl_vs_bits.png", "kl_vs_kv_bits.png"]
    assert report.html(pictures).count("data:image/png;base64,") == 2


def test_a_cache_without_context_is_refused(run: Callable[..., Report], text: EvalText) -> None:
    with pytest.raises(UsageError, match="plain: its error shows only after the prefill"):
        run([plain()], text=text)


def test_reports_with_and_without_context_do_not_merge(
    run: Callable[..., Report], tokenizer: PreTrainedTokenizerFast, prose: Path, cache_text: EvalText
) -> None:
    other = read(tokenizer, str(prose), length=cache_text.length, max_windows=2)
    with pytest.raises(UsageError, match="context is 128 in one and 0 in the other"):
        run([plain()]).merge(run([], text=other))


def test_widths_keep_their_order() -> None:
    assert parse_widths("4, 2,4") == (4, 2)
    for wrong in ("5", "", "4,", "4;2", "four", "4.0"):
        with pytest.raises(UsageError, match=r"--kv-bits .*8, 4, 3, 2"):
            parse_widths(wrong)


def test_each_width_has_its_controls_and_hqq(
    model: LlamaForCausalLM, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def plan(_: Calibration, *args: Any, **options: Any) -> str:
        calls.append((*args, options))
        return "a plan"

    monkeypatch.setattr(Calibration, "cache_plan", plan)
    fake = SimpleNamespace(SinkCache=lambda model, plan: (model, plan))
    monkeypatch.setitem(sys.modules, "quantsink.hf.sink_cache", fake)
    methods = cache_methods((4, 2))
    assert [method.name for method in methods] == [
        *("kv4", "kv4-no-sinks", "kv4-nearest", "kv4-uniform", "kv4-random", "kv2", "kv2-no-sinks", "kv2-nearest"),
        *("hqq-kv4", "hqq-kv2"),
    ]
    for method in methods[:5]:
        assert method.calibrated
        assert method.cache is not None
        assert method.cache(model, calibration)() == (model, "a plan")
        with pytest.raises(UsageError, match="needs a calibration"):
            method.cache(model, None)
    assert calls == [
        (model, {"bits": 4, **more})
        for more in ({}, {"sink_size": 0}, {"rounding": "nearest"}, {"widths": "uniform"}, {"widths": "random"})
    ]


def test_findings_compare_the_widths_that_were_measured(run: Callable[..., Report]) -> None:
    names = ["kv4", "kv4-no-sinks", "kv4-nearest", "kv4-uniform", "kv4-random", "hqq-kv4", "kv2", "hqq-kv2", "kv3"]
    comparisons = findings(run([plain(name) for name in names]).rows)
    assert [(item.tried, item.against) for item in comparisons] == [
        ("kv4", "hqq-kv4"),
        ("kv4", "kv4-no-sinks"),
        ("kv4", "kv4-nearest"),
        ("kv4", "kv4-uniform"),
        ("kv4", "kv4-random"),
        ("kv2", "hqq-kv2"),
    ]
    assert "(kv4, 32.00 bits)" in comparisons[0].evidence


def hqq(bits: int) -> Method:
    return next(method for method in cache_methods((bits,)) if method.group == "peer-cache")


@needs_hqq
def test_the_bits_of_hqq_are_those_of_its_tensors(run: Callable[..., Report]) -> None:
    report = run([hqq(4), hqq(2)])
    four, two = report.rows[1:]
    # Groups of 64 with a scale and a zero point in the model's own float32; 128 of 229 tokens are coded, the rest not.
    assert (four.bits_kv, two.bits_kv) == (4 + 1, 2 + 1)
    numbers = 2 * 2 * 2 * 16
    assert four.kv_bytes == numbers * (128 * 5 // 8 + 101 * 4)
    assert four.kl is not None
    assert two.kl is not None
    assert 0 < four.kl < two.kl
    assert math.isfinite(two.kl)


@needs_hqq
def test_hqq_at_3_bits_gives_the_reason_why_it_does_not_run(run: Callable[..., Report]) -> None:
    row = run([hqq(3)]).rows[1]
    assert row.status.startswith("not run: HQQ's 3-bit cache does not run on this model: ")
    assert row.kv_bytes is None


@needs_hqq
def test_hqq_refuses_sliding_layers(tiny_gemma: Callable[..., Any]) -> None:
    from quantsink.eval.methods import NotRunError

    with pytest.raises(NotRunError, match="only full attention layers"):
        hqq(4).cache(tiny_gemma(), None)


def test_without_hqq_its_row_says_how_to_install_it(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "hqq" else find(name, *rest))
    row = run([hqq(4)]).rows[1]
    assert row.status == "not run: hqq is not installed; pip install 'quantsink[peers]'"


def test_streaming_rows_give_a_reason_where_windows_were_too_short(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Streaming needs the weight beyond 256 tokens, which windows of 64 do not show."""
    from quantsink.calibration import calibrate
    from quantsink.eval.methods import NotRunError

    methods = {method.name: method for method in cache_methods((8,))}
    assert list(methods) == ["kv8", "kv8-no-sinks", "kv8-nearest", "kv8-stream", "kv8-stream-random", "hqq-kv8"]
    short = calibrate(model, tokenizer, seq_len=64, max_tokens=256)
    make = methods["kv8-stream"].cache
    assert make is not None
    with pytest.raises(NotRunError, match="--seq-len"):
        make(model, short)
