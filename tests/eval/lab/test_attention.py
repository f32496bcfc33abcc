"""The attention itself: its formula, its two paths, padding, and what it refuses."""

import cmath
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec, Inputs, LabAttention, Mechanism
from quantsink.eval.lab.mechanisms import (
    AlternatingSinks,
    ContentSink,
    LearnableSinks,
    OutputGate,
    SinkBias,
    SinksByLength,
)
from quantsink.eval.lab.mixes import HybridHeads
from quantsink.eval.lab.normalizers import Normalizer, ReLU, Softmax, Softmax1
from quantsink.eval.lab.windows import DistanceBias, SegmentWindow, WindowDecay
from quantsink.hf.attention import NAME

DIM, HEADS, SIZE = 12, 3, 4
GATES = (OutputGate(), OutputGate("channel", "learned"))


def made(spec: AttentionSpec, seed: int = 0, **options: Any) -> LabAttention:
    """In float64, with parameters that are nowhere 0."""
    torch.manual_seed(seed)
    attention = LabAttention(DIM, HEADS, SIZE, spec, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return attention


def padded(length: int) -> Tensor:
    """`[3, length]`: whole, padded on the left, padded on the right."""
    real = torch.ones(3, length, dtype=torch.bool)
    cut = length // 3
    real[1, :cut] = False
    real[2, length - cut :] = False
    return real


def by_hand(attention: LabAttention, x: Tensor) -> Tensor:
    """Softmax attention over the tokens `[L, dim]` of one row, number by number."""
    length = len(x)
    q, k, v = (
        projection(x).detach().view(length, HEADS, SIZE).tolist()
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = torch.zeros(length, HEADS, SIZE, dtype=torch.float64)
    for head in range(HEADS):
        for i in range(length):
            keys = range(i + 1 if attention.is_causal else length)
            scores = []
            for j in keys:
                a, b = q[i][head], k[j][head]
                if attention.spec.rotary:
                    a, b = turned(a, i), turned(b, j)
                scores.append(sum(s * t for s, t in zip(a, b, strict=True)) / math.sqrt(SIZE))
            total = sum(math.exp(s) for s in scores)
            for j, score in zip(keys, scores, strict=True):
                out[i, head] += math.exp(score) / total * torch.tensor(v[j][head], dtype=torch.float64)
    return out.flatten(1) @ attention.o_proj.weight.detach().T


def turned(vector: list[float], position: int) -> list[float]:
    """Channels i and i + D / 2 as a complex number, turned by position / 10000^(2 i / D)."""
    half = len(vector) // 2
    found = [
        complex(vector[i], vector[i + half]) * cmath.exp(1j * position / 10_000 ** (2 * i / len(vector)))
        for i in range(half)
    ]
    return [z.real for z in found] + [z.imag for z in found]


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16, 63])
def test_attention_is_its_formula_on_the_real_tokens(length: int, causal: bool, rotary: bool) -> None:
    attention = made(AttentionSpec(causal=causal, rotary=rotary))
    x = torch.randn(3, length, DIM, dtype=torch.float64)
    real = padded(length)
    out = attention(x, Inputs(real))
    for row in range(3):
        torch.testing.assert_close(out[row, real[row]], by_hand(attention, x[row, real[row]]))
        assert not out[row, ~real[row]].any()
    torch.testing.assert_close(attention(x[:1]), out[:1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", [Softmax(), Softmax1()], ids=lambda n: n.name)
@pytest.mark.parametrize("mechanisms", [(), *((gate,) for gate in GATES)])
@pytest.mark.parametrize("length", [1, 16])
def test_through_the_interface_it_computes_the_same(
    mechanisms: tuple[Mechanism, ...], normalizer: Normalizer, causal: bool, length: int
) -> None:
    config = SimpleNamespace(_attn_implementation="eager")
    attention = made(AttentionSpec(normalizer, mechanisms, causal, rotary=True), config=config)
    x = torch.randn(3, length, DIM, dtype=torch.float64)
    real = padded(length)
    nobody = real.clone()
    nobody[1] = False
    for inputs in (Inputs(), Inputs(real), Inputs(nobody)):
        with torch.no_grad():
            config._attn_implementation = "eager"
            plain = attention(x, inputs)
            for implementation in (NAME, "quantsink_observe"):
                if implementation == "quantsink_observe" and isinstance(normalizer, Softmax1):
                    continue  # without an observer that stands for torch's SDPA, which has no s_aux
                config._attn_implementation = implementation
                torch.testing.assert_close(attention(x, inputs), plain)


Call = tuple[tuple[int, ...] | None, dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls of the implementation `quantsink_test`: the mask's shape, and the options."""
    seen: list[Call] = []

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        assert isinstance(module, LabAttention)
        assert q.shape == k.shape == v.shape
        assert mask is None or mask.dtype == torch.bool
        seen.append((None if mask is None else tuple(mask.shape), options))
        return q.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "quantsink_test", attend)
    return seen


def test_the_interface_is_given_masks_only_for_padding_and_sinks_only_for_softmax1(calls: list[Call]) -> None:
    config = SimpleNamespace(_attn_implementation="quantsink_test")
    x = torch.randn(3, 16, DIM, dtype=torch.float64)
    made(AttentionSpec(Softmax(), GATES[:1]), config=config)(x)
    made(AttentionSpec(Softmax1()), config=config)(x, Inputs(padded(16)))
    (no_mask, plain), (mask, with_sink) = calls
    assert no_mask is None
    assert plain == {"dropout": 0.0, "scaling": SIZE**-0.5}
    assert mask == (3, 1, 16, 16)
    assert torch.equal(with_sink.pop("s_aux"), torch.zeros(HEADS, dtype=torch.float64))
    assert with_sink == plain


@pytest.mark.parametrize(
    ("spec", "implementation"),
    [
        (AttentionSpec(ReLU()), "quantsink_test"),
        (AttentionSpec(Softmax(), (SinkBias(),)), "quantsink_test"),
        (AttentionSpec(Softmax(), (LearnableSinks(), OutputGate())), "quantsink_test"),
        (AttentionSpec(Softmax(), (WindowDecay(4),)), "quantsink_test"),
        (AttentionSpec(Softmax1()), "sdpa"),
        (AttentionSpec(Softmax()), "sdpa"),
        (AttentionSpec(Softmax()), "eager"),
        (AttentionSpec(Softmax()), None),
    ],
    ids=str,
)
def test_what_the_interface_cannot_express_goes_the_plain_way(
    spec: AttentionSpec, implementation: str | None, calls: list[Call]
) -> None:
    x = torch.randn(1, 16, DIM, dtype=torch.float64)
    config = SimpleNamespace(_attn_implementation=implementation)
    torch.testing.assert_close(made(spec, config=config)(x), made(spec)(x))
    assert not calls


def test_recording_goes_the_plain_way_and_gives_the_weights(calls: list[Call]) -> None:
    attention = made(AttentionSpec(Softmax()), config=SimpleNamespace(_attn_implementation="quantsink_test"))
    x, record = torch.randn(3, 16, DIM, dtype=torch.float64), list[Tensor]()
    real = padded(16)
    attention(x, Inputs(real), record)
    assert not calls
    assert record[0].shape == (3, HEADS, 16, 16)
    torch.testing.assert_close(record[0].sum(-1), real[:, None].expand(3, HEADS, 16).double())


@pytest.mark.parametrize("causal", [False, True])
def test_parts_and_finish_are_what_forward_does(causal: bool) -> None:
    attention = made(AttentionSpec(Softmax1(), (SinkBias(), LearnableSinks(2), OutputGate()), causal))
    x, inputs, record = torch.randn(3, 16, DIM, dtype=torch.float64), Inputs(padded(16)), list[Tensor]()
    out = attention(x, inputs, record)
    parts = attention.parts(x, inputs)
    assert parts.sinks == 2
    assert parts.query.shape == (3, HEADS, 16, SIZE)
    assert parts.key.shape == parts.value.shape == (3, HEADS, 18, SIZE)
    assert parts.visible.dtype == torch.bool
    shape = (3, HEADS, 16, 18)
    assert parts.bias is not None
    scores = torch.einsum("bhid,bhjd->bhij", parts.query, parts.key) / 2 + parts.bias.expand(shape)
    torch.testing.assert_close(parts.scores(), scores)
    weights = Softmax1()(scores, parts.visible.expand(shape))
    torch.testing.assert_close(record[0], weights)
    torch.testing.assert_close(attention.finish(weights @ parts.value, x, inputs), out)


@pytest.mark.parametrize("mechanisms", [(), GATES[1:], (LearnableSinks(3), ContentSink(), SinksByLength())])
def test_a_row_of_padding_gives_zeros_and_finite_gradients(mechanisms: tuple[Mechanism, ...]) -> None:
    attention = made(AttentionSpec(Softmax(), mechanisms, rotary=True))
    x = torch.randn(3, 16, DIM, dtype=torch.float64, requires_grad=True)
    real = padded(16)
    real[1] = False
    out = attention(x, Inputs(real))
    out.square().sum().backward()
    assert not out[~real].any()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[~real].any()


def test_gradients_of_a_composed_attention() -> None:
    mechanisms = (
        SinkBias(), LearnableSinks(2), DistanceBias(trainable=True), ContentSink(3), OutputGate("channel", "learned"),
    )  # fmt: skip
    attention = made(AttentionSpec(Softmax1(), mechanisms, rotary=True))
    names, parameters = zip(*attention.named_parameters(), strict=True)
    inputs = Inputs(torch.tensor([[True] * 4, [False, True, True, True]]))

    def run(x: Tensor, *given: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(attention, dict(zip(names, given, strict=True)), (x, inputs))
        return found

    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_it_trains_after_it_ran_in_inference_mode() -> None:
    attention = made(AttentionSpec(Softmax(), (DistanceBias(), WindowDecay(5)), rotary=True))
    x = torch.randn(1, 17, DIM, dtype=torch.float64)  # a length that no other test has put into the tables
    with torch.inference_mode():
        first = attention(x)
    again = attention(x)
    again.sum().backward()
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize(
    ("mechanisms", "about"),
    [
        ((OutputGate(), OutputGate("channel")), "the output"),
        ((LearnableSinks(), SinkBias(), LearnableSinks(2)), "the learnable sinks"),
        ((LearnableSinks(), HybridHeads(kind="learnable")), "the learnable sinks"),
        ((SinkBias(), SinksByLength()), "the sink bias"),
        ((AlternatingSinks(), HybridHeads()), "the sink bias"),
        ((WindowDecay(4), SegmentWindow(4)), "the window"),
        ((SegmentWindow(4), HybridHeads(window=4)), "the window"),
    ],
)
def test_mechanisms_that_contradict_each_other_are_refused(mechanisms: tuple[Mechanism, ...], about: str) -> None:
    with pytest.raises(UsageError, match=rf"layer 5: .* both about {about}; leave one"):
        LabAttention(DIM, HEADS, SIZE, AttentionSpec(mechanisms=mechanisms), layer_idx=5)


def test_rotary_positions_need_heads_of_even_size() -> None:
    with pytest.raises(UsageError, match="even size, not 5"):
        LabAttention(DIM, HEADS, 5, AttentionSpec(rotary=True))


def test_a_spec_is_a_value_with_a_name() -> None:
    spec = AttentionSpec(Softmax1(), (LearnableSinks(4), OutputGate()))
    assert spec == AttentionSpec(Softmax1(), (LearnableSinks(4), OutputGate()))
    assert len({spec, AttentionSpec(), AttentionSpec()}) == 2
    assert spec.name == "softmax1 + learnable-sinks-4 + gate"
    assert AttentionSpec().name == "softmax"


def test_it_looks_like_an_attention_of_transformers() -> None:
    config = SimpleNamespace(_attn_implementation="eager")
    attention = LabAttention(DIM, HEADS, SIZE, AttentionSpec(causal=False), 7, config)
    assert attention.config is config
    assert (attention.layer_idx, attention.is_causal, attention.num_key_value_groups) == (7, False, 1)
    assert (attention.num_heads, attention.head_dim, attention.scaling) == (HEADS, SIZE, 0.5)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        assert type(projection) is torch.nn.Linear
        assert projection.bias is None
