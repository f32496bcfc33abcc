import dataclasses
import math

import pytest
import torch

from quantsink.calibration import calibrate, plan
from quantsink.calibration.statistics import BIN_WIDTH
from quantsink.errors import CalibrationError, RecipeError
from quantsink.kernels import Route
from quantsink.recipe import PRESETS, Activations, Attention, Clip, Recipe


@pytest.fixture
def calibration(tiny_llama, tokenizer):
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=2)
    return calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)


def routes(decided):
    return {(i, h): r for i, p in enumerate(decided.attentions.values()) for h, r in enumerate(p.routes)}


def test_sink_heads_take_their_route(calibration):
    masses = {(head.layer, head.head): head.bos_mass for head in calibration.heads()}
    threshold = sorted(masses.values())[-5]
    decided = plan(calibration, Recipe(sink_threshold=threshold))
    assert {place for place, route in routes(decided).items() if route is Route.SINK} == {
        place for place, mass in masses.items() if mass >= threshold
    }


def test_the_control_takes_as_many_heads_by_seed(calibration):
    threshold = sorted(head.bos_mass for head in calibration.heads())[-5]
    chosen = []
    for seed in range(4):
        recipe = Recipe(sink_threshold=threshold, attention=Attention(sinks="random", seed=seed))
        assert plan(calibration, recipe) == plan(calibration, recipe)
        decided = plan(calibration, recipe)
        assert decided.count(Route.SINK) == 5
        chosen.append(decided.attentions)
    assert any(chosen[0] != other for other in chosen[1:])


@pytest.mark.parametrize(("sinks", "count"), [("all", 16), ("none", 0)])
def test_sinks_can_be_all_heads_or_none(sinks, count, calibration):
    assert plan(calibration, Recipe(attention=Attention(sinks=sinks))).count(Route.SINK) == count


def test_native_heads_are_those_with_the_largest_measured_error(calibration):
    decided = plan(calibration, Recipe(attention=Attention(sinks="none", native_heads=3)))
    worst = sorted(calibration.heads(), key=lambda head: -head.error_int8)[:3]
    assert {p for p, r in routes(decided).items() if r is Route.NATIVE} == {(h.layer, h.head) for h in worst}


def test_a_kv_head_is_native_if_any_head_of_its_group_is(calibration):
    from quantsink.calibration.routing import native_slices

    places = {(0, h): Route.NATIVE if h in (1, 6) else Route.INT8 for h in range(8)}
    slices = native_slices(calibration.layers[:1], places)
    name = "model.layers.0.self_attn."
    assert slices[name + "q_proj"][0] == (*range(16, 32), *range(96, 112))
    assert slices[name + "k_proj"][0] == slices[name + "v_proj"][0] == tuple(range(32))
    assert slices[name + "o_proj"] == ((), (*range(16, 32), *range(96, 112)))
    only = native_slices(calibration.layers[:1], {(0, h): Route.NATIVE if h == 6 else Route.INT8 for h in range(8)})
    assert only[name + "k_proj"][0] == tuple(range(16, 32))


def test_native_columns_and_static_scales(calibration):
    recipe = Recipe(activations=Activations("static", 0.1, "table"))
    name = "model.layers.1.mlp.down_proj"
    fields = calibration.total.linears[name]
    chosen = plan(calibration, recipe).linears[name]
    assert set(chosen.native_columns) == set(fields["input_amax"].topk(10).indices.tolist())
    keep = [c for c in range(96) if c not in chosen.native_columns]
    mean_peak = fields["input_peak"] / fields["input_windows"]
    assert chosen.input_scale == pytest.approx(float(mean_peak[keep].max()) / 127)
    assert chosen.input_scale <= float(fields["input_amax"][keep].max()) / 127
    assert chosen.sink_scale == pytest.approx(float(fields["input_sink_amax"][keep].max()) / 127)
    plain = plan(calibration, Recipe(activations=Activations("static", 0.0, "plain"))).linears[name]
    assert plain.input_scale == pytest.approx(
        float(torch.maximum(fields["input_amax"], fields["input_sink_amax"]).max()) / 127
    )


def test_exclude_leaves_modules_native_and_refuses_what_matches_nothing(calibration):
    decided = plan(calibration, Recipe(exclude=("layers.1", "layers.0.mlp.up_proj")))
    assert set(decided.attentions["model.layers.1.self_attn"].routes) == {Route.NATIVE}
    assert all(not name.startswith("model.layers.1.") for name in decided.linears)
    assert "model.layers.0.mlp.up_proj" not in decided.linears
    assert "model.layers.0.mlp.gate_proj" in decided.linears
    with pytest.raises(RecipeError, match=r"'layers\.11' matches no"):
        plan(calibration, Recipe(exclude=("layers.11",)))


def test_clips_are_dropped_where_they_would_cost_too_much(calibration):
    fields = calibration.total.heads["model.layers.0.self_attn"]
    bound = 2.0
    loss = fields["gap_mass"][:, int(bound / BIN_WIDTH) :].sum(-1) / fields["rows"]
    limit = float(loss.median())
    decided = plan(calibration, Recipe(attention=Attention(clip=Clip("row", bound, limit))))
    found = decided.attentions["model.layers.0.self_attn"].clip
    assert [math.isinf(c) for c in found] == (loss > limit).tolist()
    assert any("not clipped" in note for note in decided.notes)
    all_of_them = plan(calibration, Recipe(attention=Attention(clip=Clip("absolute", 0.01, math.inf))))
    assert set(all_of_them.attentions["model.layers.0.self_attn"].clip) == {0.01}


def test_excluded_attention_is_not_clipped(calibration):
    recipe = Recipe(attention=Attention(clip=Clip("absolute", 0.01, math.inf)), exclude=("layers.1.self_attn",))
    decided = plan(calibration, recipe)
    assert set(decided.attentions["model.layers.1.self_attn"].clip) == {math.inf}
    assert set(decided.attentions["model.layers.0.self_attn"].clip) == {0.01}


def test_named_heads_stay_native(calibration):
    decided = plan(calibration, Recipe(attention=Attention(native=("0.3", "1.7"))))
    assert {place for place, route in routes(decided).items() if route is Route.NATIVE} == {(0, 3), (1, 7)}
    for wrong in ("2.0", "0.8", "0", "a.b"):
        with pytest.raises(RecipeError, match=r"no such layer\.head"):
            plan(calibration, Recipe(attention=Attention(native=(wrong,))))


def test_a_recipe_that_the_calibration_cannot_serve_is_refused(calibration, tiny_llama, tokenizer):
    with pytest.raises(RecipeError, match="calibrated with 1"):
        plan(calibration, Recipe(sink_size=4))
    with pytest.raises(RecipeError, match="has 16 heads"):
        plan(calibration, Recipe(attention=Attention(native_heads=17)))
    blind = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=512, error_windows=0)
    with pytest.raises(CalibrationError, match="--error-windows"):
        plan(blind, Recipe(attention=Attention(native_heads=1)))
    assert blind.heads()[0].error_int8 is None


def test_weights_only_leaves_attention_alone(calibration):
    decided = plan(calibration, "w8a16")
    assert not decided.attentions
    assert {p.activations for p in decided.linears.values()} == {"native"}
    attention_only = dataclasses.replace(
        PRESETS["w8a8"], weights="native", activations=Activations("native", 0.0, "plain")
    )
    assert not plan(calibration, attention_only).linears
