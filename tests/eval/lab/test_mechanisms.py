"""Every mechanism against its formula, and all of them with every normalizer, under padding and in causal order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lab_attention import given, made
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from quantsink.errors import UsageError
from quantsink.eval.lab.attention import AttentionSpec, Inputs, LabAttention, Mechanism, Tokens
from quantsink.eval.lab.chunks import Chunked
from quantsink.eval.lab.mechanisms import (
    AlternatingSinks,
    ContentSink,
    LearnableSinks,
    LearnableSinksPart,
    OutputGate,
    SinkBias,
    SinksByLength,
    clip_gradients,
    sink_count,
)
from quantsink.eval.lab.mixes import HybridHeads
from quantsink.eval.lab.normalizers import (
    ClippedSoftmax,
    Entmax,
    Normalizer,
    ReLU,
    Softmax,
    Softmax1,
    Sparsemax,
)
from quantsink.eval.lab.windows import (
    DistanceBias,
    RelativeBias,
    SegmentWindow,
    WindowDecay,
)

DIM, HEADS, SIZE = 12, 3, 4
LAST = HEADS - 1
NORMALIZERS: tuple[Normalizer, ...] = (
    Softmax(), Softmax1(), ReLU(), ClippedSoftmax(-0.03, 1.03), Sparsemax(), Entmax(1.5),
)  # fmt: skip


@dataclass
class Row:
    """One row's real tokens, and the part at work: what a formula may read."""

    part: Any
    x: Tensor
    marked: list[bool]
    causal: bool

    @property
    def length(self) -> int:
        return len(self.x)

    def number(self, name: str, head: int) -> float:
        return float(self.part.get_parameter(name)[head])

    def alternating(self, head: int, i: int, j: int) -> float:
        last = i if self.causal else self.length - 1
        return self.number("by_head", head) if j == (0 if i % 2 else last) else 0.0

    def content(self, head: int, i: int, j: int) -> float:
        if j:
            return 0.0
        seen = self.x[: i + 1] if self.causal else self.x
        mean = sum(seen[t] for t in range(len(seen))) / len(seen)
        return float(self.part.down(nn.functional.gelu(self.part.up(mean)))[head])

    def bucket(self, i: int, j: int) -> int:
        rule = self.part.rule
        place = T5Attention._relative_position_bucket(
            torch.tensor([j - i]), not self.causal, rule.buckets, rule.max_distance
        )
        return int(place)

    def decay(self, i: int, j: int, kept: int) -> float:
        return 0.0 if j < kept or abs(i - j) >= 5 else math.log(1 - abs(i - j) / 5)


Formula = Callable[[Row, int, int, int], float]
Sees = Callable[[Row, int, int, int], bool]


def nothing(row: Row, head: int, i: int, j: int) -> float:
    return 0.0


def everything(row: Row, head: int, i: int, j: int) -> bool:
    return True


@dataclass(frozen=True)
class Case:
    """A mechanism, what it adds to the score of head, query, key, and which keys it lets a query see."""

    mechanism: Mechanism
    adds: Formula = nothing
    sees: Sees = everything


SLOPES = (2**-4, 2**-8, 2**-2)
CASES = [
    Case(SinkBias(-0.5), lambda row, h, i, j: row.number("by_head", h) * (j == 0)),
    Case(SinksByLength(), lambda row, h, i, j: row.number("by_head", h) * (j < 4)),
    Case(AlternatingSinks(0.7), lambda row, h, i, j: row.alternating(h, i, j)),
    Case(ContentSink(5), lambda row, h, i, j: row.content(h, i, j)),
    Case(DistanceBias(), lambda row, h, i, j: -SLOPES[h] * abs(i - j)),
    Case(DistanceBias(trainable=True), lambda row, h, i, j: -row.number("slopes", h) * abs(i - j)),
    Case(RelativeBias(8, 12), lambda row, h, i, j: float(row.part.table[row.bucket(i, j), h])),
    Case(RelativeBias(), lambda row, h, i, j: float(row.part.table[row.bucket(i, j), h])),
    Case(WindowDecay(5), lambda row, h, i, j: row.decay(i, j, 0), lambda row, h, i, j: abs(i - j) < 5),
    Case(
        WindowDecay(5, keep_sink=True),
        lambda row, h, i, j: row.decay(i, j, 1),
        lambda row, h, i, j: abs(i - j) < 5 or j == 0,
    ),
    Case(
        SegmentWindow(3),
        sees=lambda row, h, i, j: row.marked[i] or row.marked[j] or abs(i - j) < 3 or j == 0,
    ),
    Case(
        SegmentWindow(3, keep_sink=False),
        sees=lambda row, h, i, j: row.marked[i] or row.marked[j] or abs(i - j) < 3,
    ),
    Case(HybridHeads(), lambda row, h, i, j: row.number("sink.by_head", 0) * (h == LAST and j == 0)),
    Case(
        HybridHeads(window=4),
        lambda row, h, i, j: row.number("sink.by_head", 0) * (h == LAST and j == 0),
        lambda row, h, i, j: h == LAST or abs(i - j) < 4,
    ),
    Case(
        HybridHeads(2, kind=None, window=1),
        sees=lambda row, h, i, j: h >= 1 or i == j,
    ),
    Case(LearnableSinks(3)),
    Case(HybridHeads(2), lambda row, h, i, j: row.number("sink.by_head", h - 1) * (h >= 1 and j == 0)),
    Case(HybridHeads(kind="learnable")),
    Case(HybridHeads(2, kind="learnable")),
    Case(HybridHeads(kind="learnable", window=6), sees=lambda row, h, i, j: h == LAST or abs(i - j) < 6),
    Case(OutputGate()),
    Case(OutputGate("channel")),
    Case(OutputGate("head", "learned")),
    Case(OutputGate("channel", "learned")),
]
MECHANISMS = [case.mechanism for case in CASES]
by_name = pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)


def by_hand(attention: LabAttention, case: Case, x: Tensor, marked: Tensor) -> Tensor:
    """Softmax attention over the real tokens `[n, dim]` of one row, one query and key at a time."""
    part: Any = attention.mechanisms[0]
    row = Row(part, x, marked.tolist(), attention.is_causal)
    q, k, v = (m(x).view(-1, HEADS, SIZE) for m in (attention.q_proj, attention.k_proj, attention.v_proj))
    out = torch.zeros(row.length, HEADS, SIZE, dtype=torch.float64)
    for head in range(HEADS):
        products = (q[:, head] @ k[:, head].T / math.sqrt(SIZE)).tolist()
        sinks, at_sinks = learned(part, head, q)
        for i in range(row.length):
            weights = {-1 - s: math.exp(at_sinks[i][s]) for s in range(len(sinks))}
            for j in range(i + 1 if row.causal else row.length):
                if case.sees(row, head, i, j):
                    weights[j] = math.exp(products[i][j] + case.adds(row, head, i, j))
            total = sum(weights.values())
            for j, weight in weights.items():
                out[i, head] += weight / total * (v[j, head] if j >= 0 else sinks[-1 - j])
    if isinstance(case.mechanism, OutputGate):
        out = gated(part, case.mechanism, x, out)
    return attention.o_proj(out.flatten(1))


def learned(part: Any, head: int, q: Tensor) -> tuple[Tensor, list[list[float]]]:
    """Values `[S, D]` of the learnable sinks that a head has, and each query's scores of them."""
    part = getattr(part, "sink", part)
    if not isinstance(part, LearnableSinksPart):
        return q.new_zeros(0, SIZE), [[] for _ in q]
    # The last head has the last ones; with too few for all, the first heads have none.
    end = len(part.key) - (LAST - head) * part.count
    own = slice(max(end - part.count, 0), max(end, 0))
    return part.value[own], (q[:, head] @ part.key[own].T / math.sqrt(SIZE)).tolist()


def gated(part: Any, rule: OutputGate, x: Tensor, heads: Tensor) -> Tensor:
    out = torch.empty_like(heads)
    for i in range(len(x)):
        for head in range(HEADS):
            for channel in range(SIZE):
                number = head if rule.per == "head" else head * SIZE + channel
                g = 1 / (1 + math.exp(-float(part.gate_proj.weight[number] @ x[i] + part.gate_bias[number])))
                rest = float(part.baseline[head, channel]) if rule.baseline == "learned" else 0.0
                out[i, head, channel] = g * heads[i, head, channel] + (1 - g) * rest
    return out


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mechanism.name)
@torch.no_grad()
def test_each_mechanism_is_its_formula_on_the_real_tokens(case: Case, causal: bool) -> None:
    attention = made(case.mechanism, causal=causal)
    for length, batch in ((1, 1), (2, 3), (16, 3)):
        x, inputs = given(length, batch)
        assert inputs.real is not None
        assert inputs.marked is not None
        out = attention(x, inputs)
        for row, real in enumerate(inputs.real):
            expected = by_hand(attention, case, x[row, real], inputs.marked[row, real])
            torch.testing.assert_close(out[row, real], expected)
            assert not out[row, ~real].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda normalizer: normalizer.name)
@by_name
def test_every_mechanism_runs_with_every_normalizer_whatever_the_padding(
    mechanism: Mechanism, normalizer: Normalizer, causal: bool
) -> None:
    """Finite outputs and gradients; each row gives what its real tokens alone give, and padding has no gradient."""
    attention = made(mechanism, normalizer=normalizer, causal=causal, rotary=True)
    x, inputs = given(16)
    assert inputs.real is not None
    assert inputs.marked is not None
    x.requires_grad_()
    record: list[Tensor] = []
    out = attention(x, inputs, record)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert record[0].isfinite().all()
    assert x.grad is not None
    assert not x.grad[~inputs.real].any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())
    with torch.no_grad():
        for row, real in enumerate(inputs.real):
            alone = attention(x[row : row + 1, real], Inputs(marked=inputs.marked[row : row + 1, real]))
            torch.testing.assert_close(out[row, real], alone[0])


@pytest.mark.parametrize("length", [1, 2, 63])
@by_name
@torch.no_grad()
def test_padding_changes_nothing_at_other_lengths(mechanism: Mechanism, length: int) -> None:
    attention = made(mechanism)
    x, inputs = given(length)
    assert inputs.real is not None
    assert inputs.marked is not None
    out = attention(x, inputs)
    for row, real in enumerate(inputs.real):
        alone = attention(x[row : row + 1, real], Inputs(marked=inputs.marked[row : row + 1, real]))
        torch.testing.assert_close(out[row, real], alone[0])


@by_name
@torch.no_grad()
def test_no_causal_mechanism_shows_a_query_later_tokens(mechanism: Mechanism) -> None:
    attention = made(mechanism, rotary=True)
    x, inputs = given(16)
    before = attention(x, inputs)
    changed = x.clone()
    changed[:, 9:] = torch.randn(3, 7, DIM, dtype=torch.float64)
    after = attention(changed, inputs)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@by_name
def test_quantsink_does_not_take_a_parameter_for_experts(mechanism: Mechanism) -> None:
    assert all(parameter.dim() < 3 for parameter in made(mechanism).parameters())


@by_name
def test_every_parameter_learns(mechanism: Mechanism) -> None:
    torch.manual_seed(0)
    attention = LabAttention(DIM, HEADS, SIZE, AttentionSpec(mechanisms=(mechanism,)))
    x, inputs = given(16)
    attention(x.float(), inputs).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_every_mechanism_is_a_value_with_its_own_name() -> None:
    assert len({mechanism.name for mechanism in MECHANISMS}) == len(set(MECHANISMS)) == len(CASES)
    for mechanism in MECHANISMS:
        assert type(mechanism)(**vars(mechanism)) == mechanism


@pytest.mark.parametrize(
    ("length", "sinks"), [(1, 4), (511, 4), (512, 4), (1023, 4), (1024, 5), (2047, 5), (2048, 6), (4096, 7)]
)
def test_long_texts_have_more_sinks(length: int, sinks: int) -> None:
    """By the real tokens of a row, not by the padded length."""
    assert sink_count(length) == sinks
    part = SinksByLength(-7.0).build(4, 1, 2)
    padding = 600
    real = (torch.arange(padding + length) >= padding)[None]
    for inputs, size, first in ((Inputs(), length, 0), (Inputs(real), padding + length, padding)):
        bias = part.bias(Tokens(torch.zeros(1, size, 4), inputs, causal=True), torch.ones(()))
        assert bias[0, 0, 0].nonzero()[:, 0].tolist() == list(range(first, first + min(sinks, length)))


@torch.no_grad()
def test_learnable_sinks_stand_before_the_tokens_and_have_no_bias() -> None:
    x, inputs = given(9)
    alone = made(SinkBias(), DistanceBias(), WindowDecay(3)).parts(x, inputs)
    attention = made(SinkBias(), DistanceBias(), LearnableSinks(2), WindowDecay(3))
    attention.load_state_dict(made(SinkBias(), DistanceBias(), WindowDecay(3)).state_dict(), strict=False)
    parts = attention.parts(x, inputs)
    assert parts.bias is not None
    assert alone.bias is not None
    assert inputs.real is not None
    bias, visible = (t.expand(3, HEADS, 9, 11) for t in (parts.bias, parts.visible))
    torch.testing.assert_close(bias[..., 2:], alone.bias.expand(3, HEADS, 9, 9))
    assert not bias[..., :2].any()
    assert torch.equal(visible[..., 2:], alone.visible.expand(3, HEADS, 9, 9))
    assert torch.equal(visible[..., :2], inputs.real[:, None, :, None].expand(3, HEADS, 9, 2))
    for name, found, before in (("key", parts.key, alone.key), ("value", parts.value, alone.value)):
        assert torch.equal(found[:, :, 2:], before)
        own = attention.get_parameter(f"mechanisms.2.{name}").view(HEADS, 2, SIZE)
        assert torch.equal(found[:, :, :2], own.expand(3, HEADS, 2, SIZE))


@torch.no_grad()
def test_sinks_by_length_stay_visible_under_a_window_and_do_not_decay() -> None:
    attention = made(SinksByLength(), WindowDecay(3))
    x, _ = given(16)
    parts = attention.parts(x)
    by_head = attention.get_parameter("mechanisms.0.by_head")
    assert parts.bias is not None
    visible, bias = parts.visible.expand(1, HEADS, 16, 16), parts.bias.expand(1, HEADS, 16, 16)
    for i in range(16):
        seen = {j for j in range(i + 1) if j < 4 or i - j < 3}
        assert set(visible[0, 0, i].nonzero()[:, 0].tolist()) == seen
        for j in seen:
            wanted = by_head if j < 4 else torch.full((HEADS,), math.log(1 - (i - j) / 3))
            torch.testing.assert_close(bias[0, :, i, j], wanted.double())


@torch.no_grad()
def test_without_causality_the_alternating_sink_is_the_last_token_inside_the_window() -> None:
    attention = made(AlternatingSinks(1.0), SegmentWindow(3, keep_sink=False), causal=False)
    x, _ = given(8, 1)
    bias = attention.parts(x, Inputs(marked=torch.zeros(1, 8, dtype=torch.bool))).bias
    assert bias is not None
    found = [[j for j in range(8) if bias[0, 0, i, j]] for i in range(8)]
    assert found == [[2], [0], [4], [0], [6], [0], [7], [0]]


def test_parameters_start_where_the_documentation_says() -> None:
    torch.manual_seed(0)
    everything = LabAttention(
        DIM, 64, 64,
        AttentionSpec(mechanisms=(SinkBias(), LearnableSinks(4), RelativeBias(), OutputGate("channel", "learned"))),
    )  # fmt: skip
    bias, sinks, relative, gate = (part for part in everything.mechanisms)
    assert torch.equal(bias.by_head, torch.full((64,), -0.3))
    for parameter in (sinks.key, sinks.value):
        assert parameter.shape == (64 * 4, 64)
        assert abs(float(parameter.detach().std()) - 0.02) < 0.001
    assert not relative.table.any()
    assert not gate.baseline.any()
    g = gate.gate(torch.zeros(1, 1, DIM))  # type: ignore[operator]
    torch.testing.assert_close(g, torch.sigmoid(torch.ones(1, 64, 1, 64)))


def test_learnable_sinks_have_their_own_limit_on_gradients() -> None:
    model = nn.ModuleList(
        LabAttention(DIM, HEADS, SIZE, AttentionSpec(mechanisms=mechanisms))
        for mechanisms in ((LearnableSinks(2, clip=0.5), SinkBias()), (LearnableSinks(clip=3.0),), (OutputGate(),))
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    clip_gradients(model)
    for name, parameter in model.named_parameters():
        own = name.endswith(("mechanisms.0.key", "mechanisms.0.value"))
        assert own != bool((parameter.grad == 2).all()), name
    for index, limit in ((0, 0.5), (1, 3.0)):
        sinks = model[index].mechanisms[0]
        norm = torch.cat([sinks.key.grad.flatten(), sinks.value.grad.flatten()]).norm()
        torch.testing.assert_close(float(norm), limit, rtol=1e-4, atol=0)
    clipped = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    clip_gradients(model[0])
    for before, parameter in zip(clipped, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, before, rtol=1e-4, atol=0)
    clip_gradients(LabAttention(DIM, HEADS, SIZE, AttentionSpec(mechanisms=(HybridHeads(kind="learnable"),))))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: LearnableSinks(0), "count 0"),
        (lambda: LearnableSinks(clip=0), "clip 0"),
        (lambda: ContentSink(0), "hidden size 0"),
        (lambda: WindowDecay(0), "window 0"),
        (lambda: SegmentWindow(-1), "window -1"),
        (lambda: RelativeBias(6), "buckets 6"),
        (lambda: RelativeBias(32, 16), "max_distance 16"),
        (lambda: HybridHeads(kind=None), "all heads are alike"),
        (lambda: HybridHeads(window=0), "window 0"),
        (lambda: made(HybridHeads(sink_heads=HEADS)), "3 sink heads of 3"),
        (lambda: made(HybridHeads(sink_heads=0)), "0 sink heads of 3"),
        (lambda: Chunked(nn.Identity(), DIM, 0), "chunk 0"),
    ],
)
def test_invalid_settings_are_refused(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wrong()
