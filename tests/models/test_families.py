"""Every family from end to end: its heads, its planted sinks, export, reload and generation."""

from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM

import quantsink
from quantsink.calibration import plan
from quantsink.errors import ArchitectureError
from quantsink.hf.attention import NAME
from quantsink.kernels import Route
from quantsink.models.architecture import Architecture
from quantsink.models.inputs import example

FAMILIES, CAUSAL = families.FAMILIES, families.CAUSAL
TEXT = [name for name in FAMILIES if name != "vit"]
LATENT = [name for name in CAUSAL if name.startswith("deepseek")]
PLANTED = (1, 1)
"""Layer and head."""
MARKED = quantsink.Recipe.from_dict({"attention": {"native": ["1.1"]}})


def ids(length: int = 60, batch: int = 1) -> torch.Tensor:
    tokens = torch.randint(2, 250, (batch, length), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = families.BOS
    return tokens


@torch.no_grad()
def output(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    result = model(input_ids=tokens)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def calibrated(model: Any, tokenizer: Any, **options: Any) -> quantsink.Calibration:
    settings = {"seq_len": 200, "max_tokens": 400, "query_rows": 16, "error_windows": 1}
    return quantsink.calibrate(model, tokenizer, "builtin:code", **(settings | options))


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_lie_where_the_modelling_code_puts_them(name):
    model = FAMILIES[name].build()
    architecture = Architecture.of(model)
    for layer in architecture.attentions:
        truth = families.layout(model, layer.index)
        for part, module, rows in (
            (layer.q, truth.q_module, truth.q_rows),
            (layer.k, truth.k_module, truth.k_rows),
            (layer.v, truth.v_module, truth.v_rows),
            (layer.o, truth.o_module, truth.o_columns),
        ):
            assert part.module == module
            assert [list(part.channels([head])) for head in range(len(part.starts))] == rows
        assert [layer.kv_head(head) for head in range(layer.heads)] == [truth.kv_head(h) for h in range(layer.heads)]
        assert layer.causal == FAMILIES[name].causal
    assert len(architecture.attentions) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_without_weights_has_the_same_outline(name):
    with torch.device("meta"):
        empty = FAMILIES[name].build()
    full = Architecture.of(FAMILIES[name].build())
    architecture = Architecture.of(empty)
    assert [layer.outline for layer in architecture.attentions] == [layer.outline for layer in full.attentions]
    assert (architecture.linears, architecture.experts) == (full.linears, full.experts)


@pytest.mark.parametrize("name", CAUSAL)
def test_exactly_the_planted_head_is_found_and_kept_native(name, tokenizer):
    """Rows and columns of the marked head, and of its KV head, hold the original's numbers; no other does."""
    model = families.plant(FAMILIES[name].build(), {PLANTED[0]: [PLANTED[1]]})
    calibration = calibrated(model, tokenizer)
    assert [(head.layer, head.head) for head in calibration.heads() if head.sink] == [PLANTED]
    chosen = plan(calibration, MARKED)
    layer, head = PLANTED
    truth = families.layout(model, layer)
    native_rows: dict[str, set[int]] = {}
    for module, rows in (
        (truth.q_module, truth.q_rows[head]),
        (truth.k_module, truth.k_rows[truth.kv_head(head)]),
        (truth.v_module, truth.v_rows[truth.kv_head(head)]),
    ):
        native_rows.setdefault(module, set()).update(rows)
    original = {module: families.weight(model.get_submodule(module)).detach().clone() for module in native_rows}
    output_weight = families.weight(model.get_submodule(truth.o_module)).detach().clone()
    assert {n: set(p.native_rows) for n, p in chosen.linears.items() if p.native_rows} == native_rows
    assert set(truth.o_columns[head]) <= set(chosen.linears[truth.o_module].native_columns)
    quantized = quantsink.quantize(model, calibration, MARKED)
    for module, rows in native_rows.items():
        linear = quantized.get_submodule(module)
        assert linear.native_row_index.tolist() == sorted(rows)
        assert torch.equal(linear.native_rows, original[module][sorted(rows)])
        assert not linear.weight[sorted(rows)].any()
        rest = [row for row in range(linear.out_features) if row not in rows]
        back = linear.weight[rest].float() * linear.weight_scale[rest, None]
        columns = linear.native_column_index.tolist() if linear.shape.columns else []
        if columns:
            back[:, columns] = linear.native_columns[rest]
        assert (back - original[module][rest]).abs().max() <= linear.weight_scale[rest].max() / 2 + 1e-6
    o = quantized.get_submodule(truth.o_module)
    at = {column: place for place, column in enumerate(o.native_column_index.tolist())}
    for column in truth.o_columns[head]:
        assert torch.equal(o.native_columns[:, at[column]], output_weight[:, column])


@pytest.mark.parametrize("name", TEXT)
def test_exported_reloaded_and_saved_again(name, tokenizer, tmp_path):
    model = FAMILIES[name].build()
    before = sum(p.numel() * p.element_size() for p in model.parameters())
    calibration = calibrated(model, tokenizer)
    calibration.save(tmp_path / "calibration")
    read = quantsink.Calibration.load(tmp_path / "calibration")
    assert read.layers == calibration.layers
    quantized = quantsink.quantize(model, read, MARKED)
    logits = output(quantized, ids())
    assert logits.isfinite().all()
    quantsink.save(quantized, tmp_path / "first")
    loaded = quantsink.load(tmp_path / "first")
    assert type(loaded) is type(quantized)
    assert torch.equal(output(loaded, ids()), logits)
    quantsink.save(loaded, tmp_path / "second")
    first, second = ((tmp_path / part / "model.safetensors").read_bytes() for part in ("first", "second"))
    assert first == second
    assert len(first) < before, "smaller than it was"
    with pytest.raises(quantsink.QuantSinkError, match="already quantized"):
        quantsink.quantize(loaded, read)
    if FAMILIES[name].causal:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
        assert again.generate(ids(), max_new_tokens=4, do_sample=False).shape == (1, 64)


@pytest.mark.parametrize("name", CAUSAL)
def test_our_attention_is_the_models_own(name, tokenizer):
    """All heads native, weights native: what is left of quantsink is its attention."""
    model = FAMILIES[name].build()
    expected = output(FAMILIES[name].build(attn_implementation="eager"), ids(100))  # SDPA knows no soft-cap
    calibration = calibrated(model, tokenizer, error_windows=0)
    recipe = quantsink.Recipe.from_dict(
        {
            "weights": "native",
            "activations": {"kind": "native"},
            "attention": {"native": [f"{h.layer}.{h.head}" for h in calibration.heads()]},
        }
    )
    assert plan(calibration, recipe).count(Route.NATIVE) == len(calibration.heads())
    result = output(quantsink.quantize(model, calibration, recipe), ids(100))
    assert model.config._attn_implementation == NAME
    assert torch.allclose(result, expected, atol=2e-4), (result - expected).abs().max()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_step_after_a_prompt_is_the_whole_text(name, tokenizer):
    """Weights and attention in 8 bits, transformers' own cache: with native inputs nothing depends on the cut."""
    model = FAMILIES[name].build()
    recipe = quantsink.Recipe.from_dict(
        {"activations": {"kind": "native"}, "attention": {"kind": "native", "sinks": "none"}}
    )
    quantized = quantsink.quantize(model, calibrated(model, tokenizer), recipe)
    tokens = ids(50)
    whole = output(quantized, tokens)[:, 40:]
    with torch.no_grad():
        first = quantized(input_ids=tokens[:, :40], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        argument = quantsink.models.inputs.cache_argument(quantized)
        second = quantized(input_ids=tokens[:, 40:], **{argument: cache}).logits
    assert torch.allclose(second, whole, atol=1e-4)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_of_codes(name, tokenizer):
    model = FAMILIES[name].build()
    calibration = calibrated(model, tokenizer)
    if name in LATENT:
        with pytest.raises(ArchitectureError, match="latent attention"):
            quantsink.SinkCache.from_calibration(model, calibration, 8, widths="uniform")
        return
    tokens = ids(300)
    expected = output(model, tokens)[:, -8:]
    cache = quantsink.SinkCache.from_calibration(model, calibration, 8, widths="uniform")
    argument = quantsink.models.inputs.cache_argument(model)
    with torch.no_grad():
        model(input_ids=tokens[:, :-8], use_cache=True, **{argument: cache})
        logits = model(input_ids=tokens[:, -8:], use_cache=True, **{argument: cache}).logits
    assert cache.get_seq_length() == 300
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    assert (
        0
        < cache.nbytes()
        < 0.8 * 2 * sum(300 * layer.kv_heads * layer.head_dim * 4 for layer in Architecture.of(model).attentions)
    )


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_are_quantized_and_those_without_a_token_named(name, tokenizer):
    model = FAMILIES[name].build()
    experts = Architecture.of(model).experts
    router = next(m for n, m in model.named_modules() if n.endswith(("mlp.gate", "mlp.router")))
    with torch.no_grad():
        for parameter in router.parameters():
            parameter[3] = 0  # never the largest
        router.weight[3] = -100 * router.weight[:3].mean(0)
        if hasattr(router, "bias") and router.bias is not None:
            router.bias[3] = -1e4
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias[3] = -1e4
    calibration = calibrated(model, tokenizer)
    tokens = calibration.total.experts[experts[0].name]["tokens"]
    originals = {n: getattr(model.get_submodule(experts[0].name), n).detach().clone() for n in experts[0].weights}
    if name != "mixtral":  # without a bias no row of a router is always the smallest
        assert tokens[3] == 0
        assert f"{experts[0].name}.3" in calibration.unused_experts()
        assert any("sent no token" in note and f"{experts[0].name}.3" in note for note in plan(calibration).notes)
    assert tokens.sum() == calibration.domains[0].tokens * model.config.num_experts_per_tok
    quantized = quantsink.quantize(model, calibration)
    for weight, original in originals.items():
        held = getattr(quantized.get_submodule(experts[0].name), weight)
        assert held.weight.dtype == torch.int8
        assert held.weight_scale.isfinite().all()
        for number in range(experts[0].count):
            scale = held.weight_scale[number]
            assert (
                (held[number] - original[number]).abs() <= (scale if experts[0].transposed else scale[:, None]) / 1.99
            ).all()


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_layers_of_one_input_are_given_the_same_numbers(name):
    """Nothing in transformers' code changes the input between two layers that are computed together."""
    model = FAMILIES[name].build()
    groups = Architecture.of(model).shared_inputs
    inputs: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for layer in (layer for group in groups for layer in group):
        inputs[layer] = []
        model.get_submodule(layer).register_forward_pre_hook(
            lambda _, args, seen=inputs[layer]: seen.append((id(args[0]), args[0].clone()))
        )
    for _ in range(2):
        model(**example(model))
    for first, *others in groups:
        for other in others:
            for (identity, x), (other_identity, y) in zip(inputs[first], inputs[other], strict=True):
                assert identity == other_identity, (first, other)
                assert torch.equal(x, y)
    separate = [layer for layer in Architecture.of(model).attentions if len({layer.q.module, layer.k.module}) == 2]
    assert bool(groups) == bool(separate) or name.startswith("deepseek")
