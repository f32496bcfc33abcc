"""Layers of one input are computed together: the same bits, and never another input's outputs."""

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
from transformers.models.llama.modeling_llama import LlamaAttention

import quantsink
import quantsink.layers.linear
import quantsink.layers.shared_input
from quantsink.kernels import quantized_linear
from quantsink.kernels.cpu import library
from quantsink.layers.linear import QuantizedLinear
from quantsink.layers.replacement import Site
from quantsink.layers.shared_input import share_inputs
from quantsink.layers.token_context import TokenContext
from quantsink.models.architecture import Architecture
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
            site = Site(f"attention.{name}", linear, torch.device("cpu"), self.context)
            self.add_module(name, QuantizedLinear.of(site, plan))
        share_inputs(self, (("q", "k", "v"),))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)

    def apart(self, x):
        """Each by itself."""
        sink = None if self.q.sink_rows == "plain" else self.context.sink_rows(x.shape, "")
        outputs = [quantized_linear(x.reshape(-1, 24), sink, layer.tensors()) for layer in (self.q, self.k, self.v)]
        return [y.reshape(*x.shape[:-1], -1) for y in outputs]


@pytest.fixture
def calls(monkeypatch):
    """How many layers each kernel call computed."""
    counts = []

    def one(x, sink, layer):
        counts.append(1)
        return quantsink.kernels.quantized_linear(x, sink, layer)

    def several(x, sink, layers):
        outputs = quantsink.kernels.quantized_linears(x, sink, layers)
        counts.extend([] if outputs is None else [len(layers)])
        return outputs

    for module in (quantsink.layers.shared_input, quantsink.layers.linear):
        monkeypatch.setattr(module, "quantized_linear", one)
    monkeypatch.setattr(quantsink.layers.shared_input, "quantized_linears", several)
    return counts


def double(_, args):
    args[0].mul_(2)


def operators(graph):
    return sum(node.target is torch.ops.quantsink.quantized_linear.default for node in graph.nodes)


def same(outputs, expected):
    return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def quantized(model, tokenizer, recipe="w8a8"):
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    return quantsink.quantize(model, calibration, recipe)


@needs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("tokens", [(1, 1), (2, 3), (2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_computes_three_from_the_first_pass_on(mode, plans, tokens, dtype, calls):
    model = Attention(plans, dtype, tokens)
    together = plans[0].activations != "native" or tokens != (2, 40)
    for _ in range(2):
        x = torch.randn(*tokens, 24, dtype=dtype)
        apart = model.apart(x)
        calls.clear()
        with mode():
            assert same(model(x), apart)
        assert calls == ([3] if together else [1, 1, 1])
        assert model.context.shared.ahead is None


@needs_kernels
@pytest.mark.parametrize("first", "qkv")
def test_any_of_them_may_be_called_first(first, calls):
    model = Attention()
    x = torch.randn(1, 6, 24)
    expected = dict(zip("qkv", model.apart(x), strict=True))
    with torch.no_grad():
        for name in (first, *(other for other in "qkv" if other != first)):
            assert torch.equal(getattr(model, name)(x), expected[name])
    assert calls == [3]


@needs_kernels
@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-static", "w8a16"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_a_model_gives_the_bits_of_its_layers_one_by_one(recipe, family, tokenizer, request, calls):
    recipe = dataclasses.replace(Recipe.load(recipe), output_head="int8")
    model = quantized(request.getfixturevalue(family)(), tokenizer, recipe)
    with torch.inference_mode():
        together = model(IDS[:, :12]).logits
        layers = len(model.model.layers)
        assert calls[-4 * layers - 1 :] == [3, 1, 2, 1] * layers + [1]
        tokens = model.generate(IDS, max_new_tokens=8, do_sample=False)
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.group = ()
        assert torch.equal(model(IDS[:, :12]).logits, together)
        assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), tokens)
    assert set(calls[-7 * layers :]) == {1}


def test_groups_are_declared_for_classes_of_transformers_only(tiny_llama):
    class Careless(LlamaAttention):
        """Its forward may do anything between two layers."""

    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = Careless
    groups = Architecture.of(model).shared_inputs
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    first, gated = (tuple(f"model.layers.0.{name}" for name in group) for group in names)
    assert groups == (first, gated, tuple(name.replace("layers.0", "layers.1") for name in gated))


@needs_kernels
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.data.mul_(2)], ids=["in place", "data"])
def test_code_that_changes_the_input_between_two_layers_gets_the_changed_input(mode, change, tiny_llama, tokenizer):
    """PyTorch does not count changes made through `.data` or in inference mode, so such code never shares an input."""

    class Careless(LlamaAttention):
        def forward(self, hidden_states, *args, **kwargs):
            hidden_states = hidden_states.clone()
            inputs.append(hidden_states.clone())
            self.q_proj(hidden_states)
            change(hidden_states)
            inputs.append(hidden_states.clone())
            outputs.append(self.k_proj(hidden_states))
            return super().forward(inputs[0], *args, **kwargs)

    inputs, outputs = [], []
    model = tiny_llama()
    calibration = quantsink.calibrate(model, tokenizer, "builtin:prose", seq_len=64, max_tokens=512)
    model.model.layers[0].self_attn.__class__ = Careless
    model = quantsink.quantize(model, calibration)
    inputs.clear()
    outputs.clear()
    layer = model.model.layers[0].self_attn.k_proj
    with mode():
        model(IDS)
        rows = inputs[1][0]
        assert torch.equal(outputs[0][0], quantized_linear(rows, torch.tensor([0]), layer.tensors()))


@needs_kernels
def test_an_input_changed_in_place_is_read_again():
    model = Attention()
    x = torch.randn(1, 6, 24)
    with torch.no_grad():
        first = model.q(x)
        expected = model.apart(x)[0]
        x.mul_(2)
        assert same([first, model.k(x), model.v(x)], [expected, *model.apart(x)[1:]])


@needs_kernels
def test_outside_a_pass_nothing_is_kept():
    model = Attention(PLANS["weights only"])
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        model.context._after()
        model.q(x)
        assert model.context.shared.ahead is None
        model.k.weight.neg_()
        assert same([model.k(x)], model.apart(x)[1:2])


@needs_kernels
def test_a_gradient_is_not_lost_on_what_was_computed_without():
    model = Attention(PLANS["weights only"])
    x = torch.randn(1, 6, 24, requires_grad=True)
    with torch.no_grad():
        model.q(x)
    assert model.k(x).requires_grad
    y = torch.randn(1, 6, 24)
    model.context.shared.clear()
    with torch.inference_mode():
        model.q(y)
    assert not model.k(y).is_inference()


@needs_kernels
def test_an_output_that_is_not_asked_for_is_dropped_with_the_next_input(calls):
    model = Attention()
    x, y = torch.randn(1, 6, 24), torch.randn(1, 6, 24)
    with torch.no_grad():
        assert same([model.q(x), model.k(x), model.q(y)], [*model.apart(x)[:2], model.apart(y)[0]])
        assert same([model.v(x)], model.apart(x)[2:])
    assert calls[:2] == [3, 3]


@needs_kernels
@pytest.mark.parametrize("hooked", ["q", "k"])
@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_on_one_layer_is_heeded_by_all(hooked, register, calls):
    """It may change the input in place, which nothing counts in inference mode."""
    model = Attention()
    with torch.inference_mode():
        handle = getattr(getattr(model, hooked), register)(lambda _, args, *output: double(_, args))
        x = torch.randn(1, 6, 24)
        before, after = model.apart(x), model.apart(2 * x)
        changed = ("qkv".index(hooked) + (register == "register_forward_hook")) % 3
        assert same(model(x.clone()), [*before[:changed], *after[changed:]])
        assert calls == [1, 1, 1]
        handle.remove()
        assert same(model(x), before)
        assert calls == [1, 1, 1, 3]


@needs_kernels
@pytest.mark.parametrize("plan", [LinearPlan("native", "plain"), LinearPlan("per_token", "plain")])
def test_layers_of_different_kinds_stay_apart(plan, calls):
    plain = LinearPlan("per_token", "native")
    model = Attention([plain, plan, plain])
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        model(x)
    assert calls == [2, 1]
    assert model.q.group == (model.q, model.v)
    assert model.k.group == ()


@needs_kernels
def test_fake_tensors_outside_their_mode():
    model = Attention(PLANS["weights only"])
    x = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.randn(1, 6, 24))
    with torch.no_grad():
        assert [y.shape[-1] for y in model(x)] == [50, 48, 9]


@needs_kernels
def test_encoders_of_pictures_share_inputs_in_their_first_block_too(calls):
    model = Attention(PLANS["weights only"])
    decoder = nn.Module()
    decoder.forward = lambda pixel_values: model(pixel_values)
    model.context._after()
    model.context.attach(decoder)
    with torch.no_grad():
        x = torch.randn(1, 6, 24)
        assert same(decoder(pixel_values=x), model.apart(x))
    assert calls == [3]


@needs_kernels
def test_copies_and_files_hold_no_pass_and_work(calls):
    model = Attention()
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        expected = model(x)
        model.q(x)  # a pass that was broken off
        buffer = io.BytesIO()
        torch.save(model, buffer)
        for again in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
        ):
            assert again.context.shared.ahead is None
            assert all(a is b for a, b in zip(again.q.group, (again.q, again.k, again.v), strict=True))
            again.k.weight.neg_()
            calls.clear()
            outputs = again(x.clone())
            assert calls == [3]
            assert torch.equal(outputs[0], expected[0])
            assert not torch.equal(outputs[1], expected[1])
    assert sorted(model.state_dict()) == sorted(Attention().state_dict())


@needs_kernels
def test_nothing_outlives_a_pass(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    shared = model.model.layers[0].self_attn.q_proj.context.shared
    inputs = []
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, y: inputs.append(weakref.ref(args[0])))
    with torch.inference_mode():
        for _ in range(2):
            model(IDS)
            assert shared.ahead is None
    gc.collect()
    assert [ref() for ref in inputs] == [None, None]

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(stop)
    with torch.inference_mode():
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        assert shared.ahead is None
        handle.remove()
        model(IDS)


@needs_kernels
def test_weights_that_are_elsewhere_are_not_touched(calls):
    """accelerate loads an offloaded layer's weights when that layer is called, not before."""
    model = Attention()
    x = torch.randn(1, 6, 24)
    with torch.inference_mode():
        expected = model.apart(x)
        kept = dict(model.v._buffers)
        model.v._buffers |= {name: None if b is None else b.to("meta") for name, b in kept.items()}
        outputs = [model.q(x), model.k(x)]
        model.v._buffers |= kept
        assert same([*outputs, model.v(x)], expected)
    assert calls[:2] == [1, 1]


@needs_kernels
def test_a_compiled_model_and_a_watched_one_share_nothing(calls):
    model = Attention(PLANS["other columns"])
    x = torch.randn(1, 6, 24)
    with torch.no_grad():
        expected = model.apart(x)
        calls.clear()
        assert same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
        assert set(calls) <= {1}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert same(model(x), expected)
    assert sum("quantized_linear" in event.name for event in profile.events()) == 3


@needs_kernels
def test_tracers_see_layers_one_by_one():
    model = Attention()
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
    expected = sum((m.weight.float() * m.weight_scale[:, None]).sum(0) for m in (model.q, model.k, model.v))
    torch.testing.assert_close(x.grad, expected.expand(1, 6, 24), rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_whole_model_compiles(tiny_llama, tokenizer):
    model = quantized(tiny_llama(), tokenizer)
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(IDS).logits, expected)
            assert torch.equal(model(IDS).logits, expected)


@needs_kernels
def test_a_cache_step_shares_inputs_too(tiny_llama, tokenizer, calls):
    model = quantized(tiny_llama(), tokenizer)
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(IDS, **{cache_argument(model): cache})
        calls.clear()
        model(IDS[:, -1:], **{cache_argument(model): cache})
    assert calls == [3, 1, 2, 1] * 2
