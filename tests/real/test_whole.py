"""Two real models through the whole of quantsink: calibrated, exported from their files, loaded, generating."""

import pytest
import torch
from safetensors import safe_open

import quantsink
from quantsink.export.export import export
from quantsink.models.architecture import Architecture
from quantsink.models.source import find

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("fixture", "place"), [("smollm2", (18, 8)), ("gemma3", (5, 2))])
def test_one_head_stays_native_from_files_to_text(fixture, place, request, tmp_path):
    folder = request.getfixturevalue(fixture)
    source = find(str(folder))
    model, tokenizer = source.model("float32"), source.tokenizer()
    layer = Architecture.of(model).attentions[place[0]]
    calibration = quantsink.calibrate(
        model, tokenizer, "builtin:prose", seq_len=128, max_tokens=512, query_rows=16, error_windows=1
    )
    calibration.save(tmp_path / "calibration")
    recipe = quantsink.Recipe.from_dict({"attention": {"native": [f"{place[0]}.{place[1]}"]}})
    said: list[str] = []
    export(str(folder), tmp_path / "calibration", tmp_path / "out", recipe, measure=False, say=said.append)
    assert not any("loading it whole" in line for line in said), "its tensors went one by one"
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
        wanted = quantized(ids).logits
        assert torch.equal(first(ids).logits, wanted), "as quantized in memory"
        assert torch.equal(second(ids).logits, wanted)
    text = first.generate(ids, max_new_tokens=12, do_sample=False)
    print(fixture, tokenizer.decode(text[0], skip_special_tokens=True))
    assert text.shape[1] > ids.shape[1] + 4
