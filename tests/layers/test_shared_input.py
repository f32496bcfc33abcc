"""Layers that read one tensor are computed together: the same bits, and never another tensor's outputs."""

import copy
import dataclasses
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache

import quantsink
import quantsink.layers.shared_input
from quantsink.kernels import quantized_linear
from quantsink.kernels.cpu import library
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.shared_input import MISSES
from quantsink.layers.token_context import TokenContext
from quantsink.models.inputs import cache_argument
from quantsink.plan import LinearPlan
from quantsink.recipe import Recipe

IDS = torch.arange(2, 60)[None]
PLANS = {
    "w8a8": [LinearPlan("per_token", "native", native_columns=(3,))] * 3,
    "other columns": [LinearPlan("per_token", "plain", native_columns=(c,)) for c in (3, 3, 5)],
    "static": [LinearPlan("static", "table", input_scale=0.03, sink_scale=0.1)] * 3,
    "other scales": [LinearPlan("static", "table", input_scale=s, sink_scale=0.1) for s in (0.03, 0.02, 0.03)],
    "other sink scales": [LinearPlan("static", "table", input_scale=0.03, sink_scale=s) for s in (0.1, 0.1, 0.2)],
    "weights only": [LinearPlan("native", "plain")] * 3,
    "native rows": [LinearPlan("per_token", "native", native_rows=(n,)) for n in (0, 3, 8)],
}

needs_kernels = pytest.mark.skipif(library() is None, reason="the C++ kernels were not built")


class Attention(nn.Module):
    """Three layers of one input, with all that could go between them."""

    def __init__(self, plans=PLANS["w8a8"], dtype=torch.float32, tokens=(1, 6)):
        super().__init__()
        torch.manual_seed(0)
        self.context = TokenContext(1)
        self.context.set(tokens, 0, None, torch.device("cpu"))
        for name, size, plan in zip("qkv", (50, 48, 9), plans, strict=True):
            linear = nn.Linear(24, size, dtype=dtype)
            self.add_module(name, QuantizedLinear.of(f"attention.{name}", linear, plan, self.context))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)

    def apart(self, x):
        """Each by itself."""
        sink = None if self.q.sink_rows == "plain" else self.context.sink_rows(x.shape, "")
        found = [quantized_linear(x.reshape(-1, 24), sink, layer.tensors()) for layer in (self.q, self.k, self.v)]
        return [y.reshape(*x.shape[:-1], -1) for y in found]


@pytest.fixture
def calls(monkeypatch):
    """How many layers each kernel call computed."""
    found = []

    def one(x, sink, layer):
        found.append(1)
        return quantsink.kernels.quantized_linear(x, sink, layer)

    def several(x, sink, layers):
        outputs = quantsink.kernels.quantized_linears(x, sink, layers)
        found.extend([] if outputs is None else [len(layers)])
        return outputs

    monkeypatch.setattr(quantsink.layers.shared_input, "quantized_linear", one)
    monkeypatch.setattr(quantsink.layers.shared_input, "quantized_linears", several)
    return found


def passes(model, times):
    """Whole ones, each with its own input."""
    for _ in range(times):
        x = torch.randn(1, 6, 24)
        assert same(model(x), model.apart(x))
        model.context.merging.finish()


def double(_, args):
    args[0].mul_(2)


def operators(graph):
    return sum(node.target is torch.ops.quantsink.quantized_linear.default for node in graph.nodes)


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 3), (2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_the_second_pass_on_one_call_computes_three(plans, tokens, dtype, calls):
    model = Attention(plans, dtype, tokens)
    expected_calls = [[1, 1, 1], [3], [3]] if plans[0].activations != "native" or tokens != (2, 40) else [[1, 1, 1]] * 3
    for expected in expected_calls:
        x = torch.randn(*tokens, 24, dtype=dtype)
        apart = model.apart(x)
        model.context.merging.clear()
        calls.clear()
        with torch.inference_mode():
            assert same(model(x), apart)
        assert calls == expected


@needs_kernels
@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-static", "w8a16"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_a_model_gives_the_same_bits_pass_for_pass(recipe, family, tokenizer, request, calls):
    model = request.getfixturevalue(family)()
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    model = quantsink.quantize(model, calibration, dataclasses.replace(Recipe.load(recipe), output_head="int8"))
    with torch.inference_mode():
        first, second = (model(IDS[:, :12]).logits for _ in range(2))
        assert torch.equal(first, second)
        layers = len(model.model.layers)
        assert calls[-4 * layers :] == [3, 1, 2, 1] * layers
        merged = [model.generate(IDS, max_new_tokens=8, do_sample=False) for _ in range(2)]
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.peers.followers, module.peers.known = (), True
        assert torch.equal(model(IDS[:, :12]).logits, first)
        assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), merged[0])
    assert torch.equal(*merged)
    assert set(calls[-7 * layers :]) == {1}


@needs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.data.mul_(2)], ids=["in place", "data"])
def test_an_input_changed_between_two_layers_is_read_again(mode, change):
    """In every pass, as a model's code would; nothing counts the changes of a tensor made in inference mode."""
    model = Attention()
    with mode():
        for _ in range(4):
            x = torch.randn(1, 6, 24)
            found = [model.q(x)]
            change(x)
            found += [model.k(x), model.v(x)]
            assert same(found[1:], model.apart(x)[1:])
            model.context.merging.finish()


@needs_kernels
def test_outside_a_pass_nothing_is_kept():
    model = Attention(PLANS["weights only"])
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        passes(model, 2)
        model.context._after()
        model.q(x)
        assert model.context.merging.held is None
        model.k.weight.neg_()
        assert same([model.k(x)], model.apart(x)[1:2])


@needs_kernels
def test_a_gradient_is_not_lost_on_what_was_computed_without():
    model = Attention(PLANS["weights only"])
    with torch.no_grad():
        passes(model, 2)
    x = torch.randn(1, 6, 24, requires_grad=True)
    with torch.no_grad():
        model.q(x)
    assert model.k(x).requires_grad
    y = torch.randn(1, 6, 24)
    model.context.merging.clear()
    with torch.inference_mode():
        model.q(y)
    assert not model.k(y).is_inference()


@needs_kernels
def test_who_does_not_come_for_an_output_is_no_longer_waited_for(calls):
    model = Attention()
    with torch.inference_mode():
        passes(model, 2)
        assert calls == [1, 1, 1, 3]
        for _ in range(2):
            x, y = torch.randn(1, 6, 24), torch.randn(1, 6, 24)
            assert same([model.q(x), model.k(x), model.q(y)], [*model.apart(x)[:2], model.apart(y)[0]])
            model.context.merging.clear()
            calls.clear()
            passes(model, 2)
            assert calls == [1, 1, 1, 3]
        for _ in range(MISSES):
            model.q(torch.randn(1, 6, 24))
            model.context.merging.finish()
            calls.clear()
            passes(model, 2)
        assert set(calls) == {1}


@needs_kernels
def test_a_hook_on_one_layer_is_heeded_by_all():
    """It may change the input in place, which nothing counts in inference mode."""
    model = Attention()
    with torch.inference_mode():
        passes(model, 2)
        handle = model.k.register_forward_pre_hook(double)
        for _ in range(2):
            x = torch.randn(1, 6, 24)
            assert same(model(x.clone()), [model.apart(x)[0], *model.apart(2 * x)[1:]])
            model.context.merging.finish()
        handle.remove()
        assert model.q.peers.misses == 0
        assert model.q.peers.followers == (model.k, model.v)
        passes(model, 2)


@needs_kernels
def test_a_layer_exchanged_is_computed_no_more(calls):
    model = Attention()
    with torch.inference_mode():
        passes(model, 2)
        calls.clear()
        gone, model.k = model.k, nn.Linear(24, 48)
        for _ in range(3):
            x = torch.randn(1, 6, 24)
            q, _, v = model(x)
            sink = model.context.sink_rows(x.shape, "")
            expected = [quantized_linear(x[0], sink, layer.tensors())[None] for layer in (model.q, model.v)]
            assert same([q, v], expected)
            model.context.merging.finish()
    assert calls == [3, 1, 1, 2]
    assert gone not in model.q.peers.followers


@needs_kernels
@pytest.mark.parametrize("change", [{"name": "elsewhere.k"}, {"activations": "native"}, {"sink_rows": "plain"}])
def test_layers_of_different_kinds_stay_apart(change, calls):
    model = Attention([LinearPlan("per_token", "native")] * 3)
    vars(model.k).update(change)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(1, 6, 24)
            model(x)
            model.context.merging.finish()
    assert calls == [1, 1, 1, 2, 1, 2, 1]
    assert model.q.peers.followers == (model.v,)


@needs_kernels
def test_nan_in_the_first_pass_does_not_keep_layers_apart(calls):
    model = Attention()
    with torch.inference_mode():
        model(torch.full((1, 6, 24), torch.nan))
        model.context.merging.finish()
        passes(model, 1)
    assert calls == [1, 1, 1, 3]


@needs_kernels
def test_fake_tensors_outside_their_mode():
    model = Attention(PLANS["weights only"])
    x = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.randn(1, 6, 24))
    with torch.no_grad():
        assert [y.shape[-1] for y in model(x)] == [50, 48, 9]


@needs_kernels
def test_encoders_of_pictures_merge_in_their_first_block_too(calls):
    model = Attention(PLANS["weights only"])
    decoder = nn.Module()
    decoder.forward = lambda pixel_values: model(pixel_values)
    model.context._after()
    model.context.attach(decoder)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(1, 6, 24)
            assert same(decoder(pixel_values=x), model.apart(x))
    assert calls == [1, 1, 1, 3]


@needs_kernels
def test_copies_and_files_hold_no_pass_and_work(calls):
    model = Attention()
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        expected = model(x)
        model(x.clone())
        model.q(x)  # a pass that was broken off
        buffer = io.BytesIO()
        torch.save(model, buffer)
        for again in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
        ):
            assert again.context.merging.held is None
            again.k.weight.neg_()
            for _ in range(2):
                found = again(x.clone())
                assert torch.equal(found[0], expected[0])
                assert not torch.equal(found[1], expected[1])
            assert [f is g for f, g in zip(again.q.peers.followers, (again.k, again.v), strict=True)] == [True, True]
        assert len(pickle.dumps(model.q)) < 1.1 * len(pickle.dumps(Attention().q))
    assert sorted(model.state_dict()) == sorted(Attention().state_dict())


@needs_kernels
def test_nothing_outlives_a_pass(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    model = quantsink.quantize(model, calibration, "w8a8")
    merging = model.model.layers[0].self_attn.q_proj.context.merging
    seen = []
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda m, args, y: seen.append(weakref.ref(args[0])))
    with torch.inference_mode():
        for _ in range(2):
            model(IDS)
            assert merging.held is None
    gc.collect()
    assert [ref() for ref in seen] == [None, None]

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(stop)
    with torch.inference_mode():
        expected = model.model.layers[1].self_attn.q_proj.peers.followers
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        handle.remove()
        model(IDS)
    peers = model.model.layers[1].self_attn.q_proj.peers
    assert peers.followers == expected != ()
    assert peers.misses == 0


@needs_kernels
def test_weights_that_are_elsewhere_are_not_touched(calls):
    """accelerate loads an offloaded layer's weights when that layer is called, not before."""
    model = Attention()
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        expected = [model(x), model.context.merging.clear()][0]
        kept = dict(model.v._buffers)
        model.v._buffers |= {name: None if b is None else b.to("meta") for name, b in kept.items()}
        found = [model.q(x), model.k(x)]
        model.v._buffers |= kept
        assert same([*found, model.v(x)], expected)
    assert set(calls) == {1}


@needs_kernels
def test_a_compiled_model_and_a_watched_one_merge_nothing(calls):
    model = Attention(PLANS["other columns"])
    x = torch.randn(1, 6, 24)
    with torch.no_grad():
        expected = model.apart(x)
        model.context.merging.clear()
        model(x)
        calls.clear()
        assert same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
        assert calls == []
        model.context.merging.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert same(model(x), expected)
    assert sum("quantized_linear" in event.name for event in profile.events()) == 3


@needs_kernels
@pytest.mark.parametrize("learned", [False, True])
def test_tracers_see_layers_one_by_one(learned):
    model = Attention()
    if learned:
        passes(model, 2)
    x = torch.randn(1, 6, 24)
    traced = make_fx(model)(x)
    assert operators(traced.graph) == 3
    exported = torch.export.export(model, (x,), strict=False)
    assert operators(exported.graph) == 3
    other = torch.randn(1, 6, 24)
    with torch.no_grad():
        assert same(traced(other), model.apart(other))
        assert same(exported.module()(other), model.apart(other))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert [y.shape[-1] for y in model(mode.from_tensor(x))] == [50, 48, 9]
    model.context.merging.clear()
    passes(model, 3)
    assert len(model.q.peers.followers) == 2


@needs_kernels
def test_threads_that_share_a_model_get_their_own_results():
    model = Attention(PLANS["other columns"])
    inputs = [torch.randn(1, 6, 24) for _ in range(4)]
    expected = [model.apart(x) for x in inputs]
    wrong = []

    def work(x, right):
        with torch.inference_mode():
            wrong.extend(None for _ in range(200) if not same(model(x), right))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_kernels
def test_gradients_of_weights_only_layers_are_right():
    model = Attention(PLANS["weights only"])
    with torch.inference_mode():
        model(torch.randn(1, 6, 24))
    x = torch.randn(1, 6, 24, requires_grad=True)
    sum(y.sum() for y in model(x)).backward()
    wanted = sum((m.weight.float() * m.weight_scale[:, None]).sum(0) for m in (model.q, model.k, model.v))
    torch.testing.assert_close(x.grad, wanted.expand(1, 6, 24), rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_whole_model_compiles(tiny_llama, tokenizer):
    model = tiny_llama()
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    model = quantsink.quantize(model, calibration, "w8a8")
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(IDS).logits, expected)
            assert torch.equal(model(IDS).logits, expected)


@needs_kernels
def test_a_cache_step_merges_too(tiny_llama, tokenizer, calls):
    model = tiny_llama()
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    model = quantsink.quantize(model, calibration, "w8a8")
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(IDS, **{cache_argument(model): cache})
        calls.clear()
        model(IDS[:, -1:], **{cache_argument(model): cache})
    assert calls == [3, 1, 2, 1] * 2
