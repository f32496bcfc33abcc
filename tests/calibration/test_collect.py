"""Streamed statistics equal a full eager computation, cost little, and leave the model unchanged."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from quantsink.calibration.calibration import head_means
from quantsink.calibration.collect import Collector, collecting
from quantsink.calibration.statistics import BIN_WIDTH, BINS, merge
from quantsink.errors import ArchitectureError, QuantSinkError
from quantsink.models.architecture import Architecture


def collect(model, *batches, sink_size=1, query_rows=None, error_windows=0):
    collector = Collector(
        model, Architecture.of(model), sink_size=sink_size, query_rows=query_rows, error_windows=error_windows
    )
    with collecting(collector):
        for batch in batches:
            collector.run(*batch)
    return collector


def ids(length, batch=1, seed=1):
    torch.manual_seed(seed)
    return torch.cat([torch.zeros(batch, 1, dtype=torch.long), torch.randint(2, 258, (batch, length - 1))], 1)


def eager_weights(model, tokens):
    """`[layers][B, H, L, L]` float64 attention weights from transformers' own eager attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return [weights.double() for weights in attentions]


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma", "tiny_gemma2"])
@pytest.mark.parametrize("sink_size", [1, 4])
def test_statistics_equal_a_full_eager_computation(family, sink_size, request):
    model = request.getfixturevalue(family)()
    tokens = ids(150)
    collector = collect(model, (tokens,), sink_size=sink_size)
    for layer, weights in zip(collector.architecture.attentions, eager_weights(model, tokens), strict=True):
        rows = weights[0, :, 16:]
        seen = (rows > 0).sum(-1)
        entropy = -(rows * rows.clamp(min=1e-300).log()).sum(-1) / seen.double().log()
        means = head_means(collector.heads[layer.name])
        rest = rows[..., sink_size:].amax(-1)
        expected = {
            "bos_mass": rows[..., 0].mean(-1),
            "sink_mass": rows[..., :sink_size].sum(-1).mean(-1),
            "entropy": entropy.mean(-1),
            "rest_peak": rest.mean(-1),
        }
        for name, value in expected.items():
            assert torch.allclose(means[name], value, atol=1e-5), (layer.name, name)
        fields = collector.heads[layer.name]
        assert torch.allclose(fields["rest_peak_max"], rest.amax(-1), atol=1e-5)
        assert int(fields["rows"][0]) == 134
        gap = (rows.amax(-1, keepdim=True) / rows.clamp(min=1e-300)).log()
        bins = (gap / BIN_WIDTH).clamp(max=BINS - 1).long()
        for head in range(layer.heads):
            count = torch.bincount(bins[head][rows[head] > 0], minlength=BINS)
            assert (fields["gap_count"][head] - count).abs().sum() <= 4, "pairs on a bin's border may move by rounding"
        assert torch.allclose(fields["gap_mass"].sum(-1), fields["rows"], atol=1e-3)


def test_key_and_value_ranges_split_off_the_sink(tiny_llama):
    model, tokens = tiny_llama(), ids(40)
    seen = {}
    Architecture.of(model)  # runs the model, which the hook below must not see

    def grab(module, arguments, output):
        seen["v"] = output.view(1, 40, 2, 16).transpose(1, 2)[0].double()

    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(grab)
    collector = collect(model, (tokens,), sink_size=3)
    handle.remove()
    fields = collector.heads["model.layers.0.self_attn"]
    assert torch.allclose(fields["value_sink_amax"], seen["v"][:, :3].abs().amax(1))
    assert torch.allclose(fields["value_amax"], seen["v"][:, 3:].abs().amax(1))
    assert fields["key_count"].tolist() == [37, 37]
    assert bool((fields["key_sum"] / 37 <= fields["key_max"]).all())
    assert bool((fields["key_sum"] / 37 >= -fields["key_min_negated"]).all())


def test_linear_inputs_keep_sink_rows_apart(tiny_llama):
    model, tokens = tiny_llama(), ids(40)
    seen = {}
    layer = model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda module, arguments: seen.update(x=arguments[0][0].double()))
    collector = collect(model, (tokens,), sink_size=2)
    handle.remove()
    fields = collector.linears["model.layers.1.mlp.down_proj"]
    assert torch.equal(fields["input_sink_amax"], seen["x"][:2].abs().amax(0))
    assert torch.equal(fields["input_amax"], seen["x"][2:].abs().amax(0))
    assert torch.equal(fields["input_peak"], fields["input_amax"])
    assert fields["input_windows"].tolist() == [1]


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_never_enter_a_statistic(family, side, request):
    model, tokens, pads = request.getfixturevalue(family)(), ids(60), 23
    alone = collect(model, (tokens,), error_windows=1)
    filler = torch.full((1, pads), 77)
    real, none = torch.ones_like(tokens), torch.zeros_like(filler)
    order = (filler, tokens) if side == "left" else (tokens, filler)
    mask = torch.cat((none, real) if side == "left" else (real, none), 1)
    padded = collect(model, (torch.cat(order, 1), mask), error_windows=1)
    for name, fields in alone.heads.items():
        for field, value in fields.items():
            if side == "left" and field.startswith(("key", "error", "query_gram")):
                continue  # queries and keys depend on their position, and so does their INT8 error
            assert torch.allclose(padded.heads[name][field], value, atol=1e-5, rtol=1e-4), (name, field)
        assert torch.allclose(padded.heads[name]["value_amax"], fields["value_amax"], atol=1e-5)
        assert torch.equal(padded.heads[name]["key_count"], fields["key_count"])
    for name, fields in alone.linears.items():
        assert torch.allclose(padded.linears[name]["input_amax"], fields["input_amax"], atol=1e-4), name


def test_a_batch_is_the_sum_of_its_rows(tiny_llama):
    model, batch = tiny_llama(), ids(50, batch=3)
    together = collect(model, (batch,))
    apart = collect(model, *((row[None],) for row in batch))
    for name, fields in apart.heads.items():
        for field, value in fields.items():
            assert torch.allclose(together.heads[name][field], value, atol=1e-5, rtol=1e-5), field


def test_two_measurements_merge_by_addition(tiny_llama):
    model = tiny_llama()
    first, second, both = (collect(model, *b) for b in ([(ids(40),)], [(ids(50),)], [(ids(40),), (ids(50),)]))
    for name, fields in both.heads.items():
        merged = merge([first.heads[name], second.heads[name]])
        for field, value in fields.items():
            assert torch.equal(merged[field], value), field


def test_sampled_rows_estimate_all_rows(tiny_llama):
    model, tokens = tiny_llama(), ids(400)
    name = "model.layers.0.self_attn"
    sampled = head_means(collect(model, (tokens,), query_rows=64).heads[name])
    exact = head_means(collect(model, (tokens,)).heads[name])
    assert torch.allclose(sampled["bos_mass"], exact["bos_mass"], atol=0.02)
    assert torch.allclose(sampled["entropy"], exact["entropy"], atol=0.02)


def test_collecting_leaves_hooks_and_modes_as_they_were(tiny_llama):
    model = tiny_llama()
    model.train()
    model.model.layers[1].eval()
    implementation = model.config._attn_implementation
    hooks = {name: len(m._forward_pre_hooks) for name, m in model.named_modules()}
    modes = {name: m.training for name, m in model.named_modules()}

    def stop():
        with collecting(Collector(model, Architecture.of(model), sink_size=1)):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    collect(model, (ids(30),))
    assert model.config._attn_implementation == implementation
    assert {name: len(m._forward_pre_hooks) for name, m in model.named_modules()} == hooks
    assert {name: m.training for name, m in model.named_modules()} == modes


def test_collecting_from_one_model_leaves_another_with_its_config_alone(tiny_llama):
    first = tiny_llama(seed=0)
    second = type(first)(first.config).eval()
    expected = collect(first, (ids(40),)).heads["model.layers.0.self_attn"]
    with collecting(Collector(second, Architecture.of(second), sink_size=1)):
        fields = collect(first, (ids(40),)).heads["model.layers.0.self_attn"]
    assert torch.equal(fields["bos_mass"], expected["bos_mass"])


def test_the_output_of_the_model_is_untouched(tiny_gemma):
    model, tokens, seen = tiny_gemma(), ids(60), []
    handle = model.model.register_forward_hook(lambda module, arguments, output: seen.append(output[0]))
    with torch.no_grad():
        model(tokens)
    collect(model, (tokens,))
    handle.remove()
    assert torch.allclose(seen[0], seen[-1], atol=1e-5)


def test_attention_that_bypasses_the_interface_is_refused(tiny_llama):
    model = tiny_llama()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ArchitectureError, match=r"layers\.1\.self_attn: its attention did not go through"):
        collect(model, (ids(30),))


def test_real_tokens_must_lie_together(tiny_llama):
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 10] = 0
    with pytest.raises((ValueError, QuantSinkError), match="unbroken run"):
        collect(tiny_llama(), (ids(30), mask))


def test_a_sink_head_costs_less_on_the_sink_route(tiny_llama):
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
            layer.self_attn.k_proj.weight.mul_(3)
    collector = collect(model, (ids(200),), error_windows=1)
    for fields in collector.heads.values():
        means = head_means(fields)
        assert bool((means["error_int8"] > 0).all())
        assert bool((means["error_int8"] < 1).all())
        strong = means["bos_mass"] > 0.3
        assert bool((means["error_sink"][strong] < means["error_int8"][strong]).all())
        assert math.isfinite(float(means["error_sink"].sum()))


def test_memory_does_not_grow_with_the_square_of_the_length(tiny_llama):
    """Bytes that the statistics allocate at once, by the allocator's own count."""
    model = tiny_llama(max_position_embeddings=8192)
    peaks = {}
    for length in (512, 8192):
        collector = Collector(model, Architecture.of(model), sink_size=1)
        tokens = torch.randint(2, 258, (1, length))
        with (
            collecting(collector),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        ):
            collector.run(tokens)
        peaks[length] = max(event.cpu_memory_usage for event in profile.events())
    assert peaks[8192] < 32 * peaks[512], "16 x the length; 256 x would be the square"


class Written(TorchDispatchMode):
    """Bytes that operators write; views and uninitialised tensors are none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        if not operator.is_view and "empty" not in str(operator):
            self.bytes += sum(x.nbytes for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def work(run):
    """(floating-point operations in matrix products, bytes written by all operators)."""
    with FlopCounterMode(display=False) as products:
        run()
    with Written() as written:
        run()
    return products.get_total_flops(), written.bytes


@pytest.mark.parametrize(
    ("error_windows", "most_flops", "most_bytes"), [(0, 1.1, 2), (1, 1.35, 5)], ids=["statistics", "with errors"]
)
def test_a_window_costs_little_more_than_its_forward_pass(tiny_llama, error_windows, most_flops, most_bytes):
    """Layers of SmolLM2-135M's shape on a window of the default length, with the default number of query rows."""
    model = tiny_llama(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    tokens = ids(512)
    architecture = Architecture.of(model)

    def forward():
        with torch.no_grad():
            model.model(tokens, use_cache=False)

    def measure():
        collector = Collector(model, architecture, sink_size=1, error_windows=error_windows)
        with collecting(collector):
            collector.run(tokens)

    plain, measured = work(forward), work(measure)
    assert measured[0] < most_flops * plain[0]
    assert measured[1] < most_bytes * plain[1]
