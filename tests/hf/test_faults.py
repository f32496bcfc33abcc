"""Faults that other toolkits commit in silence, each with its right value; the rest of the list stands where it belongs
(docs/reliability.md names each fault's test)."""

import json
import logging
from typing import Any

import families
import pytest
import torch
from safetensors import safe_open

import quantsink
from quantsink.calibration import plan
from quantsink.calibration.collect import Collector, collecting
from quantsink.kernels import Route
from quantsink.models.architecture import Architecture

FAMILIES, CAUSAL = families.FAMILIES, families.CAUSAL


def ids(length: int = 60, batch: int = 1) -> torch.Tensor:
    tokens = torch.randint(2, 250, (batch, length), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = families.BOS
    return tokens


def calibrated(model: Any, tokenizer: Any, **options: Any) -> quantsink.Calibration:
    settings = {"seq_len": 200, "max_tokens": 400, "query_rows": 16, "error_windows": 1}
    return quantsink.calibrate(model, tokenizer, "builtin:code", **(settings | options))


def collect(model: Any, *batches: tuple[torch.Tensor, ...]) -> Collector:
    collector = Collector(model, Architecture.of(model), sink_size=1, error_windows=0)
    with collecting(collector):
        for batch in batches:
            collector.run(*batch)
    return collector


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_4_padding_enters_no_statistic(name, side):
    """A batch of rows of different lengths against each row alone."""
    model = FAMILIES[name].build()
    rows = [ids(80)[0], ids(50)[0]]
    pad = [80 - len(row) for row in rows]
    placed = [
        torch.cat([torch.ones(n, dtype=torch.long), row] if side == "left" else [row, torch.ones(n, dtype=torch.long)])
        for n, row in zip(pad, rows, strict=True)
    ]
    mask = torch.ones(2, 80, dtype=torch.long)
    for number, n in enumerate(pad):
        mask[number, slice(0, n) if side == "left" else slice(80 - n, None)] = 0
    batch, alone = collect(model, (torch.stack(placed), mask)), collect(model, *((row[None],) for row in rows))
    learned = hasattr(model.config, "n_positions") or name == "opt"
    for group in ("heads", "linears"):
        for module, fields in getattr(alone, group).items():
            for field, expected in fields.items():
                statistic = getattr(batch, group)[module][field]
                if side == "left" and (learned or field.startswith(("key", "query", "gap_count"))):
                    continue  # positions begin elsewhere: rotated keys turn, learned embeddings differ
                tolerance = 1e-5 * max(
                    1.0, float(expected[expected.isfinite()].abs().max()) if expected.numel() else 1.0
                )
                if field == "gap_count":
                    tolerance = 4  # pairs on a bin's border
                same = torch.isclose(statistic, expected, rtol=1e-5, atol=tolerance) | (statistic == expected)
                assert same.all(), (module, field)


@pytest.mark.parametrize("native_heads", ["first", "last", "both"])
def test_7_grouped_queries_protect_their_kv_head(tiny_llama, tokenizer, native_heads):
    """8 query heads on 2 KV heads: 1 is KV head 0's, 6 is KV head 1's."""
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=2)
    native = {"first": ["0.1"], "last": ["0.6"], "both": ["0.1", "0.6"]}[native_heads]
    decided = plan(calibrated(model, tokenizer), quantsink.Recipe.from_dict({"attention": {"native": native}}))
    first = "model.layers.0.self_attn."
    kv = {"first": range(16), "last": range(16, 32), "both": range(32)}[native_heads]
    q = [row for head in native for row in range(16 * int(head[2:]), 16 * int(head[2:]) + 16)]
    assert list(decided.linears[first + "k_proj"].native_rows) == list(kv)
    assert list(decided.linears[first + "v_proj"].native_rows) == list(kv)
    assert list(decided.linears[first + "q_proj"].native_rows) == q
    assert set(q) <= set(decided.linears[first + "o_proj"].native_columns)


@pytest.mark.parametrize("recipe", ["w8a16", "w8a8", "w8a8-static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_11_a_residual_beyond_float16(tiny_llama, tokenizer, recipe, dtype, tmp_path):
    """1e5 in one channel of every token: nothing becomes inf, and native parts keep the checkpoint's own type."""
    model = tiny_llama(dtype=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] = 1e5
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[5] *= 1e4
    model = model.to(dtype)
    calibration = calibrated(model, tokenizer)
    assert all(bool((value.isfinite() | (value == -torch.inf)).all()) for value in calibration.tensors().values())
    quantized = quantsink.quantize(model, calibration, recipe)
    quantsink.save(quantized, tmp_path / "out")
    with torch.no_grad():
        logits = quantsink.load(tmp_path / "out")(ids()).logits
    assert logits.isfinite().all()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert "F16" not in kinds.values()
    own = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    assert {kinds[n] for n in kinds if n.endswith(("norm.weight", "embed_tokens.weight", "native_columns"))} == {own}


def test_12_an_all_zero_row_head_and_tensor(tiny_llama, tokenizer, caplog):
    model = tiny_llama()
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.mlp.up_proj.weight[7] = 0
        layer.self_attn.q_proj.weight[16:32] = 0
        layer.mlp.gate_proj.weight.zero_()
    with caplog.at_level(logging.WARNING):
        quantized = quantsink.quantize(model, calibrated(model, tokenizer))
    layer = quantized.model.layers[0]
    for linear, rows in (
        (layer.mlp.up_proj, [7]),
        (layer.self_attn.q_proj, [*range(16, 32)]),
        (layer.mlp.gate_proj, [0, 95]),
    ):
        assert not linear.weight[rows].any()
        assert linear.weight_scale.isfinite().all()
        assert (linear.weight_scale > 0).all()
    with torch.no_grad():
        assert quantized(ids()).logits.isfinite().all()
    (line,) = [record.getMessage() for record in caplog.records if "only zeros" in record.getMessage()]
    for name, count in (("up_proj", 1), ("q_proj", 16), ("gate_proj", 96)):
        assert f"{name} ({count})" in line


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_13_tied_embeddings(name, tokenizer, tmp_path):
    model = FAMILIES[name].build(tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    quantized = quantsink.quantize(model, calibrated(model, tokenizer))
    quantsink.save(quantized, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        vocabulary = [name for name in file.keys() if file.get_slice(name).get_shape()[0] == families.VOCABULARY]  # noqa: SIM118
    assert len(vocabulary) == 1
    loaded = quantsink.load(tmp_path / "out")
    assert loaded.get_input_embeddings().weight.data_ptr() == loaded.get_output_embeddings().weight.data_ptr()


def test_15_learned_sinks_stay_in_the_denominator(tokenizer):
    """gpt-oss: statistics and outputs against an eager load whose learned sinks take most of the weight."""
    model = FAMILIES["gpt_oss"].build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    tokens = ids(100)
    collector = collect(model, (tokens,))
    eager = FAMILIES["gpt_oss"].build(attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        outputs = eager(tokens, output_attentions=True)
    for layer, weights in zip(collector.architecture.attentions, outputs.attentions, strict=True):
        fields = collector.heads[layer.name]
        rows = torch.linspace(16, 99, 64).round().long()
        mass = weights[0][:, rows, 0].double().mean(-1)
        assert torch.allclose(fields["bos_mass"] / fields["rows"], mass, atol=1e-5)
        assert (weights[0].sum(-1) < 0.99).any(), "the learned sink takes its share"
    quantized = quantsink.quantize(model, calibrated(model, tokenizer))
    with torch.no_grad():
        logits = quantized(tokens).logits
        for layer in eager.model.layers:
            layer.self_attn.sinks.fill_(-100.0)
        without = eager(tokens).logits
    error = (logits - outputs.logits).abs().median()
    assert (without - outputs.logits).abs().median() > 10 * error  # medians: a token may go to another expert


def test_16_bits_and_bytes_are_those_on_disk(tiny_llama, tokenizer, tmp_path):
    """What an export prints and what a report counts in memory, against the files."""
    from quantsink.eval.footprint import footprint
    from quantsink.export.export import export

    model = tiny_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    calibrated(model, tokenizer).save(tmp_path / "calibration")
    exported = export(str(tmp_path / "model"), tmp_path / "calibration", tmp_path / "out", measure=False)
    disk = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert exported.payload_bytes == disk
    assert exported.bits_weight == pytest.approx(disk * 8 / exported.parameters, rel=0.01)
    counted = footprint(quantsink.load(tmp_path / "out"), Architecture.of(model), exported.parameters)
    assert counted.payload_bytes == pytest.approx(disk, rel=0.01)
    assert counted.bits_weight == pytest.approx(disk * 8 / exported.parameters, rel=0.01)


def test_19_a_generation_config_that_cannot_be_saved(tiny_llama, tokenizer, tmp_path):
    from quantsink.export.export import export

    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    calibrated(model, tokenizer).save(tmp_path / "calibration")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": False, "temperature": 0.3}))
    with pytest.raises(quantsink.QuantSinkError, match="cannot save its generation config"):
        export(str(tmp_path / "model"), tmp_path / "calibration", tmp_path / "out", measure=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "gpt2"])
def test_20_every_type_gives_the_same_sinks(name, tokenizer):
    sinks = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = families.plant(FAMILIES[name].build(), {0: [2], 1: [1, 3]}).to(dtype)
        sinks[dtype] = [(head.layer, head.head) for head in calibrated(model, tokenizer).heads() if head.sink]
    assert sinks[torch.float32] == [(0, 2), (1, 1), (1, 3)]
    assert sinks[torch.bfloat16] == sinks[torch.float16] == sinks[torch.float32]


def test_pictures(tmp_path):
    """A model without text: statistics, weights, reload."""
    model = FAMILIES["vit"].build()
    pixels = torch.randn(
        6, *FAMILIES["vit"].inputs()["pixel_values"].shape[1:], generator=torch.Generator().manual_seed(2)
    )
    calibration = quantsink.calibrate(model, None, pixels)
    calibration.save(tmp_path / "calibration")
    calibration = quantsink.Calibration.load(tmp_path / "calibration")
    assert calibration.domains[0].windows == 6
    eager = FAMILIES["vit"].build(attn_implementation="eager")
    with torch.no_grad():
        weights = torch.stack(eager(pixels, output_attentions=True).attentions).double()
    for head in calibration.heads():
        assert head.bos_mass == pytest.approx(float(weights[head.layer, :, head.head, :, 0].mean()), abs=2e-2)
    quantized = quantsink.quantize(model, calibration)
    assert plan(calibration).count(Route.INT8) + plan(calibration).count(Route.SINK) == len(calibration.heads())
    with torch.no_grad():
        expected, original = quantized(pixels).last_hidden_state, eager(pixels).last_hidden_state
    assert (expected - original).abs().max() < 0.1 * original.abs().max()
    quantsink.save(quantized, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["linears"]
    with torch.no_grad():
        assert torch.equal(quantsink.load(tmp_path / "out")(pixels).last_hidden_state, expected)
