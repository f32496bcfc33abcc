"""`measure`: rows, conditions, and what is refused."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantsink.calibration.calibration import Calibration
from quantsink.errors import CalibrationError, CheckpointError, ModelError, QuantSinkError, UsageError
from quantsink.eval import METHODS, EvalText, Method, Report, Row, read
from quantsink.eval.methods import NotRunError

Measure = Callable[..., Report]


def row(report: Report, name: str) -> Row:
    return next(row for row in report.rows if row.method == name)


def test_every_method_has_its_row_in_order(report: Report) -> None:
    assert [row.method for row in report.rows] == list(METHODS)
    assert all(row.ok for row in report.rows)


def test_the_reference_is_itself(report: Report) -> None:
    first = report.rows[0]
    assert (first.kl, first.ppl_ratio, first.top1, first.bits_weight) == (0, 1, 1, 32)


def test_figures_lie_within_their_intervals(report: Report) -> None:
    for row in report.rows[1:]:
        assert row.kl_low is not None
        assert row.kl_low <= row.kl <= row.kl_high
        assert row.ppl_ratio_low <= row.ppl_ratio <= row.ppl_ratio_high
        assert row.ppl == pytest.approx(row.ppl_ratio * report.rows[0].ppl)
        assert 0 <= row.top1 <= 1


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


def test_text_used_for_calibration_is_reported(
    run: Measure, calibration: Calibration, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for name in (calibration.domains[0].spec, str(tmp_path / "copy.txt")):
        if not Path(name).exists():
            Path(name).write_text(Path(calibration.domains[0].spec).read_text())
        report = run("reference", text=read(tokenizer, name, length=30, max_windows=2))
        assert report.conditions.calibration.covers_text
        assert "measured on text used for calibration" in report.warnings[0]
        assert "measured on text used for calibration" in report.html({})


def test_unsuitable_inputs_are_refused_before_any_work(
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
    report = run(methods=methods)
    assert [r.status for r in report.rows[1:]] == [
        "not run: bitsandbytes does not run on abacus",
        "failed: peer: its logits contain NaN or inf",
    ]
    assert report.rows[1].kl is None
    assert "does not run on abacus" in report.html({})
    assert Report.from_dict(report.to_dict()) == report


def test_nan_in_a_method_of_our_own_ends_the_report(run: Measure) -> None:
    def poison(model: Any, _: Any) -> Any:
        model.model.norm.weight.data[0] = math.nan
        return model

    with pytest.raises(QuantSinkError, match="poisoned: its logits contain NaN"):
        run(methods=[Method("poisoned", "", "preset", poison, False)])


@pytest.fixture(scope="module")
def checkpoint(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "w8a8"
    model.save_pretrained(folder)
    return folder


def test_a_checkpoint_is_a_row_with_its_bytes_on_disk(run: Measure, checkpoint: Path) -> None:
    report = run(checkpoints=[checkpoint], load_checkpoint=LlamaForCausalLM.from_pretrained)
    last = report.rows[-1]
    assert (last.method, last.kl, last.group) == (f"checkpoint ({checkpoint.parent.name}/w8a8)", 0, "checkpoint")
    assert last.payload_bytes == report.rows[0].payload_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 259}, "vocab_size is 259"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1"),
        ({"dtype": "bfloat16"}, "holds bfloat16, the reference is float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    run: Measure, tiny: Callable[..., LlamaForCausalLM], checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    def load(_: Path) -> LlamaForCausalLM:
        return tiny(**options).to(options.get("dtype") and torch.bfloat16)

    with pytest.raises(CheckpointError, match=message):
        run(checkpoints=[checkpoint], load_checkpoint=load)
