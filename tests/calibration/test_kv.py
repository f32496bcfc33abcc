"""The error of each KV head held as codes, and weight far from the query, against float64 recomputations by row."""

import functools
import json

import pytest
import torch
from rich.console import Console

from quantsink.calibration import Calibration, calibrate
from quantsink.calibration.collect import Collector, _scores, collecting
from quantsink.calibration.statistics import FAR_WINDOWS, code_window, measure_kv, measure_rows, merge
from quantsink.calibration.stored import FACTS
from quantsink.calibration.summary import as_dict, render
from quantsink.errors import CalibrationError
from quantsink.kernels.coded_attention.codes import WIDTHS, Record, decode, encode
from quantsink.models.architecture import Architecture

NAMES = ("kv_error", "kv_error_no_sink")


class Recorder(Collector):
    """Keeps what each layer's attention was called with."""

    def attention(self, layer, *arguments):
        self.__dict__.setdefault("seen", {})[layer.name] = arguments
        super().attention(layer, *arguments)


def collect(model, *batches, sink_size=1, query_rows=None, error_windows=8):
    architecture = Architecture.of(model)
    collector = Recorder(model, architecture, sink_size=sink_size, query_rows=query_rows, error_windows=error_windows)
    with collecting(collector):
        for batch in batches:
            collector.run(*batch)
    return collector


def ids(length, batch=1, seed=1):
    torch.manual_seed(seed)
    return torch.cat([torch.zeros(batch, 1, dtype=torch.long), torch.randint(2, 258, (batch, length - 1))], 1)


def attend(q, k, v, visible, scaling, softcap, s_aux):
    """One row: `[D]`, `[L, D]`, `[L, Dv]`, `[L]`, in float64."""
    s = k @ q * scaling
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    p = s.masked_fill(~visible, -torch.inf).exp()
    return p @ v / (p.sum() + (0 if s_aux is None else s_aux.exp()))


def brute(q, k, v, visible, rows, first, border, scaling, softcap, s_aux, weight):
    """(rows, energy, errors by name `[KVH, 4]`) from caches built token by token for each query."""
    heads, kv_heads = len(q), len(k)
    group = heads // kv_heads
    count, energy = 0, 0.0
    errors = {name: torch.zeros(kv_heads, len(WIDTHS), dtype=torch.float64) for name in NAMES}
    k64, v64 = k.double(), v.double()

    def output(row, key, value, head):
        aux = None if s_aux is None else s_aux[head].double()
        return attend(q[head, row].double(), key, value, visible[row], scaling, softcap, aux)

    def blocks(position, start):
        """First columns of the blocks that the cache of a query at `position` holds as codes."""
        return range(start, position + 1 - 64 - 63, 64)

    for row, position in enumerate(rows.tolist()):
        if not any(bool(visible[row, at : at + 64].any()) for at in blocks(position, border)):
            continue
        count += 1
        exact = torch.stack([output(row, k64[h // group], v64[h // group], h) for h in range(heads)])
        energy += float((weight.double() @ exact.flatten()).square().sum())
        for name, start in zip(NAMES, (border, first), strict=True):
            for index, bits in enumerate(WIDTHS):
                for kv in range(kv_heads):
                    key, value = k64[kv].clone(), v64[kv].clone()
                    for at in blocks(position, start):
                        here = slice(at, at + 64)
                        decoded = decode(
                            encode(k[kv, None, here], v[kv, None, here], bits), Record(bits, k.shape[2], v.shape[2])
                        )
                        key[here], value[here] = decoded[0][0].double(), decoded[1][0].double()
                    changed = exact.clone()
                    for head in range(kv * group, (kv + 1) * group):
                        changed[head] = output(row, key, value, head)
                    delta = weight.double() @ (changed - exact).flatten()
                    errors[name][kv, index] += delta.square().sum()
    return count, energy, errors


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma", "tiny_gemma2"])
@pytest.mark.parametrize("sink_size", [1, 4])
def test_errors_equal_a_recomputation(family, sink_size, request):
    model = request.getfixturevalue(family)(**({"sliding_window": 150} if family == "tiny_gemma2" else {}))
    tokens = ids(280)
    collector = collect(model, (tokens,), sink_size=sink_size, query_rows=7)
    rows = torch.linspace(16, 279, 7).round().long()
    for layer in collector.architecture.attentions:
        q, k, v, mask, scaling, softcap, s_aux = collector.seen[layer.name]
        visible = (torch.ones(280, 280).tril() > 0 if mask is None else mask[0, 0])[rows]
        weight = dict(model.named_modules())[layer.o.module].weight.detach()
        count, energy, errors = brute(
            q[0][:, rows].detach(), k[0].detach(), v[0].detach(), visible, rows, 0, sink_size, scaling, softcap, s_aux,
            weight,
        )  # fmt: skip
        fields = collector.heads[layer.name]
        assert fields["kv_rows"].tolist() == [count] * layer.kv_heads
        sliding = family == "tiny_gemma" and layer.index % 2 == 0
        assert (count == 0) == sliding, "32 neighbours are exact in any case"
        assert torch.allclose(fields["kv_energy"], torch.tensor(energy, dtype=torch.float64), rtol=1e-4)
        for name in NAMES:
            assert torch.allclose(fields[name], errors[name], rtol=2e-3), (layer.name, name)


def random_layer(heads=4, kv_heads=2, length=300, dim=16, hidden=24):
    torch.manual_seed(0)
    q, k, v = torch.randn(heads, length, dim), torch.randn(kv_heads, length, dim), torch.randn(kv_heads, length, dim)
    weight = torch.randn(hidden, heads * dim)
    joint = weight.view(hidden, kv_heads, -1)
    return q, k, v, weight, torch.einsum("okd,oke->kde", joint, joint)


def measured(q, k, v, gram, rows, first, border, end, scaling, softcap=None, s_aux=None):
    visible = torch.arange(k.shape[1]) <= rows[:, None]
    visible[:, :first] = False
    parts = code_window(k, v, (first, border), end)
    logits = functools.partial(_scores, scaling=scaling, softcap=softcap)
    fields = measure_kv(q[:, rows], k, v, visible, rows, parts, logits, gram, torch.ones(len(rows)), s_aux)
    return visible, fields


def test_learned_sinks_and_a_first_token_that_is_not_the_first_column():
    q, k, v, weight, gram = random_layer()
    s_aux = torch.tensor([0.0, 2.0, -1.0, 4.0])
    rows = torch.arange(30, 300, 45)
    visible, fields = measured(q, k, v, gram, rows, 10, 12, 300, 0.4, 6.0, s_aux)
    count, _, errors = brute(q[:, rows], k, v, visible, rows, 10, 12, 0.4, 6.0, s_aux, weight)
    assert fields["kv_rows"].tolist() == [count, count]
    assert count == 3
    for name in NAMES:
        assert torch.allclose(fields[name], errors[name], rtol=1e-3), name


def test_the_first_block_becomes_codes_with_the_129th_token():
    q, k, v, _, gram = random_layer()
    assert measured(q, k, v, gram, torch.tensor([128]), 0, 1, 300, 0.3)[1]["kv_rows"].tolist() == [1, 1]
    assert measured(q, k, v, gram, torch.tensor([127]), 0, 1, 300, 0.3)[1] == {}
    assert len(code_window(k, v, (0, 1), 129)) == 2 * len(WIDTHS)
    assert code_window(k, v, (0, 1), 128) == []
    assert code_window(k[..., :8], v[..., :8], (0, 1), 300) == [], "no codes for this head size"


def test_a_coded_sink_has_a_large_error_if_its_key_is_an_outlier():
    q, k, v, _, gram = random_layer()
    k[:, 0] *= 30
    fields = measured(q, k, v, gram, torch.arange(140, 300, 10), 0, 1, 300, 0.25)[1]
    assert bool((fields["kv_error_no_sink"][:, 1:] > 4 * fields["kv_error"][:, 1:]).all())


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_fewer_bits_have_larger_errors(family, request):
    collector = collect(request.getfixturevalue(family)(), (ids(300),), query_rows=32)
    counted = [fields for fields in collector.heads.values() if fields["kv_rows"].any()]
    assert counted
    for fields in counted:
        for name in NAMES:
            assert bool((fields[name][:, 0] > 0).all())
            assert bool((fields[name].diff(dim=1) > 0).all()), name
            assert bool((fields[name][:, 0] < 1e-3 * fields["kv_energy"]).all())


@pytest.mark.parametrize("sink_size", [1, 4])
def test_far_mass_equals_a_full_eager_computation(tiny_gemma, sink_size):
    model, tokens = tiny_gemma(sliding_window=100), ids(400)
    collector = collect(model, (tokens,), sink_size=sink_size, error_windows=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    position = torch.arange(400)
    for layer, weights in zip(collector.architecture.attentions, attentions, strict=True):
        fields, seen = collector.heads[layer.name], weights[0, 0] > 0
        for index, window in enumerate(FAR_WINDOWS):
            far = (position[:, None] - position >= window) & (position >= sink_size)
            mass = (weights[0].double() * far)[:, 16:].sum((1, 2))
            assert torch.allclose(fields["far_mass"][:, index], mass, atol=1e-4, rtol=1e-5), (layer.name, window)
            assert fields["far_rows"][:, index].tolist() == [int((seen & far)[16:].any(-1).sum())] * layer.heads
        sliding = layer.index % 2 == 0
        assert fields["far_rows"][0].tolist() == [400 - 64 - sink_size, *(
            [0] * 4 if sliding else [400 - 128 - sink_size, 400 - 256 - sink_size, 0, 0]
        )]  # fmt: skip


def test_far_mass_counts_learned_sinks_in_the_denominator():
    torch.manual_seed(0)
    s, rows = torch.randn(3, 2, 200), torch.tensor([150, 199])
    visible, s_aux = torch.arange(200) <= rows[:, None], torch.tensor([0.0, 3.0, 6.0])
    fields = measure_rows(s, visible, rows, (0, 1), s_aux)
    p = (s.double() - torch.where(visible, 0, torch.inf)).exp()
    p = p / (p.sum(-1, keepdim=True) + s_aux.double().exp()[:, None, None])
    expected = p[:, 0, 1 : 150 - 64 + 1].sum(-1) + p[:, 1, 1 : 199 - 64 + 1].sum(-1)
    assert torch.allclose(fields["far_mass"][:, 0], expected, rtol=1e-5)


def test_two_measurements_merge_by_addition(tiny_llama):
    model, batches = tiny_llama(), [(ids(200),), (ids(260, seed=2),)]
    first, second = (collect(model, batch) for batch in batches)
    both = collect(model, *batches)
    for name, fields in both.heads.items():
        merged = merge([first.heads[name], second.heads[name]])
        for field, value in fields.items():
            assert torch.equal(merged[field], value), field


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma"])
def test_a_padded_batch_is_the_sum_of_its_rows(family, request):
    model, short, long = request.getfixturevalue(family)(), ids(190), ids(260, seed=2)
    filler, none = torch.full((1, 70), 77), torch.zeros(1, 70, dtype=torch.long)
    batch = torch.cat([torch.cat([short, filler], 1), long])
    mask = torch.cat([torch.cat([torch.ones_like(short), none], 1), torch.ones_like(long)])
    together, apart = collect(model, (batch, mask)), collect(model, (short,), (long,))
    for name, fields in apart.heads.items():
        for field, value in fields.items():
            if field.startswith(("kv", "far")):
                assert torch.allclose(together.heads[name][field], value, atol=1e-5, rtol=5e-3), (name, field)
    left = torch.cat([torch.cat([filler, short], 1), long])
    mask = torch.cat([torch.cat([none, torch.ones_like(short)], 1), torch.ones_like(long)])
    together = collect(model, (left, mask))
    for name, fields in apart.heads.items():
        for field in ("kv_rows", "kv_energy", "far_mass", "far_rows"):
            assert torch.allclose(together.heads[name][field], fields[field], atol=1e-4, rtol=1e-4), (name, field)
        # Keys are rotated by their position, so their codes differ.
        assert torch.allclose(together.heads[name]["kv_error"], fields["kv_error"], rtol=0.5), name


def text(renderable):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_calibration_lists_its_kv_heads(tiny_llama, tokenizer, tmp_path):
    options = {"seq_len": 320, "max_tokens": 1280, "error_windows": 1}
    calibration = calibrate(tiny_llama(), tokenizer, ["builtin:prose", "builtin:code"], **options)
    calibration.save(tmp_path)
    kv_heads = Calibration.load(tmp_path).kv_heads()
    assert kv_heads == calibration.kv_heads()
    assert [(h.layer, h.kv_head) for h in kv_heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    total = calibration.total.heads["model.layers.1.self_attn"]
    last = kv_heads[-1]
    assert last.error == pytest.approx((total["kv_error"][1] / total["kv_energy"][1]).sqrt().tolist())
    assert last.error_no_sink == pytest.approx((total["kv_error_no_sink"][1] / total["kv_energy"][1]).sqrt().tolist())
    assert last.far[64] == pytest.approx(float((total["far_mass"] / total["far_rows"])[2:, 0].max()))
    assert last.far[512] is None
    heads = calibration.heads(sink_threshold=0.01)
    threshold = sorted(max(h.bos_mass, h.sink_mass) for h in heads)[-1]
    assert [h.sink for h in calibration.kv_heads(sink_threshold=threshold)].count(True) == 1
    facts = json.loads((tmp_path / FACTS).read_text())
    assert facts["kv_heads"][3] == {
        "layer": 1, "kv_head": 1, "sink": last.sink, "error": list(last.error),
        "error_no_sink": list(last.error_no_sink), "far": {str(window): mass for window, mass in last.far.items()},
    }  # fmt: skip
    local = sum(h.far[256] <= 0.02 for h in kv_heads)
    assert as_dict(calibration, "x")["kv_heads"] == {"all": 4, "sink": sum(h.sink for h in kv_heads), "local": local}
    assert f"beyond 256 tokens: {local}" in text(render(calibration))


def test_short_windows_measure_no_cache(tiny_llama, tokenizer):
    calibration = calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=256)
    for head in calibration.kv_heads():
        assert head.error is None
        assert head.error_no_sink is None
        assert set(head.far.values()) == {None}
    assert "KV heads: 4" in text(render(calibration))
    assert "not measured: windows too short" in text(render(calibration))


def test_calibrations_of_the_old_schema_are_refused(tiny_llama, tokenizer, tmp_path):
    calibrate(tiny_llama(), tokenizer, "builtin:prose", seq_len=64, max_tokens=256).save(tmp_path)
    facts = json.loads((tmp_path / FACTS).read_text())
    (tmp_path / FACTS).write_text(json.dumps({**facts, "schema": 1}))
    with pytest.raises(CalibrationError, match="schema 1, this quantsink reads 3; calibrate again"):
        Calibration.load(tmp_path)
