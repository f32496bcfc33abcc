"""Real models through the whole of quantsink: calibrated, exported from their files, loaded, generating, measured."""

import pytest
import torch
from safetensors import safe_open

import quantsink
from quantsink.eval import measure, parse_methods, read
from quantsink.export.export import export
from quantsink.models.architecture import Architecture
from quantsink.models.source import find

pytestmark = pytest.mark.real

BRIEF = {"seq_len": 128, "max_tokens": 512, "query_rows": 16, "error_windows": 1}


@pytest.mark.parametrize(
    ("fixture", "place"),
    [
        pytest.param("smollm2", (18, 8), id="smollm2"),
        pytest.param("gemma3", (5, 2), marks=pytest.mark.slow, id="gemma3"),
    ],
)
def test_one_head_stays_native_from_files_to_text(fixture, place, request, tmp_path):
    folder = request.getfixturevalue(fixture)
    source = find(str(folder))
    model, tokenizer = source.model("float32"), source.tokenizer()
    layer = Architecture.of(model).attentions[place[0]]
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", **BRIEF)
    calibration.save(tmp_path / "calibration")
    recipe = quantsink.Recipe.from_dict({"attention": {"native": [f"{place[0]}.{place[1]}"]}})
    messages: list[str] = []
    export(str(folder), tmp_path / "calibration", tmp_path / "out", recipe, measure=False, say=messages.append)
    assert not any("loading it whole" in line for line in messages), "its tensors went one by one"
    size, group = layer.head_dim, layer.kv_head(place[1])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for part, head in (("q", place[1]), ("k", group), ("v", group)):
            name = f"model.layers.{place[0]}.self_attn.{part}_proj"
            rows = slice(head * size, (head + 1) * size)
            assert file.get_tensor(f"{name}.native_row_index").tolist() == list(range(rows.start, rows.stop))
            assert torch.equal(file.get_tensor(f"{name}.native_rows"), model.get_submodule(name).weight[rows])
    quantized = quantsink.quantize(model, calibration, recipe)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    first, second = (quantsink.load(tmp_path / "out") for _ in range(2))
    with torch.no_grad():
        logits = quantized(ids).logits
        assert torch.equal(first(ids).logits, logits), "as quantized in memory"
        assert torch.equal(second(ids).logits, logits)
    text = first.generate(ids, max_new_tokens=12, do_sample=False)
    print(fixture, tokenizer.decode(text[0], skip_special_tokens=True))
    assert text.shape[1] > ids.shape[1] + 4


def test_a_report_shows_the_cost_of_ignoring_sinks(smollm2):
    """One short window and a brief calibration measure 0.0033, 0.038 and 0.034; each bound leaves a factor of two."""
    source = find(str(smollm2))
    model, tokenizer = source.model("float32"), source.tokenizer()
    report = measure(
        model,
        tokenizer,
        model_name="SmolLM2-135M",
        calibration=quantsink.calibrate(model, tokenizer, "builtin:prose", **BRIEF),
        text=read(tokenizer, "builtin:heldout", length=384, max_windows=1),
        methods=parse_methods("attention-fixed,attention-sink,w8a8"),
    )
    kl = {row.method: row.kl for row in report.rows}
    print(kl)
    assert kl["reference"] == 0
    assert 0 < kl["attention-sink"] < 0.007
    assert kl["attention-fixed"] > 5 * kl["attention-sink"]
    assert 0 < kl["w8a8"] < 0.07
