"""Streaming masks against a forward pass with a dense mask in float64, budgets, buckets, and what is refused."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from quantsink.errors import ArchitectureError, DataError, QuantSinkError, UsageError
from quantsink.eval.lab import streaming
from quantsink.eval.lab.profile import position_shares
from quantsink.eval.lab.profile_plots import streaming_curves
from quantsink.eval.lab.profile_tables import streaming_table
from quantsink.eval.lab.profile_weights import Passes, read_decoder, read_text
from quantsink.eval.lab.streaming import (
    Variant,
    attend_blocks,
    measure_streaming,
    scored_rows,
    stream_ids,
    stream_losses,
    to_buckets,
    variants,
)
from quantsink.eval.lab.tables import markdown

Build = Callable[..., Any]
VARIANTS = (
    Variant("all"),
    Variant("newest", 20),
    Variant("sinks", 16, (0, 1, 2, 3)),
    Variant("odd", 7, (5, 40)),
    Variant("one", 1, (0,)),
)


def dense(variant: Variant, length: int, window: int | None = None) -> Tensor:
    """`[L, L]` which key each query sees, element by element."""
    sees = torch.zeros(length, length, dtype=torch.bool)
    for row in range(length):
        for column in range(row + 1):
            near = variant.newest is None or row - column < variant.newest
            sees[row, column] = (near or column in variant.kept) and (window is None or row - column < window)
    return sees


def dense_losses(model: Any, ids: Tensor, masks: Tensor | dict[str, Tensor]) -> Tensor:
    """Losses of every row, from transformers' eager attention in float64 under given masks `[L, L]`."""

    def added(mask: Tensor) -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=torch.float64)
        return zeros.masked_fill(~mask, torch.finfo(torch.float64).min)[None, None]

    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    exact.set_experts_implementation("eager")  # the other knows no float64
    mask: Any = {n: added(m) for n, m in masks.items()} if isinstance(masks, dict) else added(masks)
    with torch.no_grad():
        logits = exact(input_ids=ids[None, :-1], attention_mask=mask, use_cache=False).logits[0]
    return -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.fixture
def ids(tokenizer: Any, prose: Path) -> Tensor:
    return stream_ids(read_text(tokenizer, str(prose), 301), 300)


# Masks


@pytest.mark.parametrize("length", [1, 63, 300])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
@pytest.mark.parametrize("rule", [{}, {"softcap": 2.0}, {"s_aux": True}], ids=["plain", "softcap", "s_aux"])
def test_blocks_are_attention_under_the_dense_mask(length: int, variant: Variant, rule: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    learned = torch.linspace(-1, 2, 4)
    softcap = rule.get("softcap")
    s_aux = learned if rule.get("s_aux") else None
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.5
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    scores = scores.masked_fill(~dense(variant, length), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double()[None, :, None, None].expand(2, 4, length, 1)], -1)
    wanted = scores.softmax(-1)[..., :length] @ v.double().repeat_interleave(2, 1)
    got = attend_blocks(q, k, v, variant, 0.5, softcap, s_aux)
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_losses_are_those_of_a_dense_mask(tiny_llama: Build, ids: Tensor, variant: Variant) -> None:
    model = tiny_llama(initializer_range=0.3)
    got = stream_losses(model, read_decoder(model), ids, variant, torch.arange(300))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, dense_losses(model, ids, dense(variant, 300)), atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS[1:4], ids=lambda v: v.name)
def test_sliding_layers_see_what_they_always_do(tiny_gemma: Build, ids: Tensor, variant: Variant) -> None:
    model = tiny_gemma(initializer_range=0.3)
    masks = {"full_attention": dense(variant, 300), "sliding_attention": dense(VARIANTS[0], 300, 32)}
    got = stream_losses(model, read_decoder(model), ids, variant, torch.arange(300))
    torch.testing.assert_close(got, dense_losses(model, ids, masks), atol=1e-3, rtol=0)
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1]).logits[0]
    whole = stream_losses(model, read_decoder(model), ids, VARIANTS[0], torch.arange(300))
    wanted = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")
    torch.testing.assert_close(whole, wanted, atol=1e-3, rtol=0)  # the model's own masks
    assert (got - dense_losses(model, ids, {**masks, "full_attention": dense(VARIANTS[0], 300)})).abs().max() > 0.05


def test_a_sliding_layer_that_sees_the_whole_text_is_restricted(tiny_gemma: Build, ids: Tensor) -> None:
    model = tiny_gemma(initializer_range=0.3, sliding_window=40)
    short = ids[:31]
    got = stream_losses(model, read_decoder(model), short, VARIANTS[2], torch.arange(30))
    mask = dense(VARIANTS[2], 30)
    wanted = dense_losses(model, short, {"full_attention": mask, "sliding_attention": mask})
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_soft_caps_and_learned_sinks_are_kept(name: str, ids: Tensor) -> None:
    """Gemma 2 also caps its logits behind the output head, which runs over parts of the rows here."""
    model = families.FAMILIES[name].build(**({"attn_logit_softcapping": 0.3} if name == "gemma2" else {}))
    windows = {layer.window for layer in read_decoder(model).attentions}
    window = next((w for w in windows if w is not None), None)
    masks = {"full_attention": dense(VARIANTS[2], 100), "sliding_attention": dense(VARIANTS[0], 100, window)}
    got = stream_losses(model, read_decoder(model), ids[:101], VARIANTS[2], torch.arange(100))
    torch.testing.assert_close(got, dense_losses(model, ids[:101], masks), atol=1e-3, rtol=0)


def test_rows_are_scored_a_block_at_a_time(tiny_llama: Build, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(initializer_range=0.3)
    shapes: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape[1]))
    monkeypatch.setattr(streaming, "LOGITS", 258 * 32)
    rows = torch.arange(2, 300, 3)
    got = stream_losses(model, read_decoder(model), ids, VARIANTS[0], rows)
    assert shapes[-4:] == [32, 32, 32, 4]
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1]).logits[0].double()
    wanted = -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(got, wanted[rows], atol=1e-4, rtol=0)


def test_the_model_is_as_before(tiny_llama: Build, ids: Tensor) -> None:
    model = tiny_llama().train()
    attention = model.config._attn_implementation
    with torch.no_grad():
        before = model(input_ids=ids[None, :50]).logits
    architecture = read_decoder(model)
    stream_losses(model, architecture, ids, VARIANTS[1], torch.arange(300))
    model.lm_head.forward = lambda x: x @ torch.full((48, 258), torch.nan)
    with pytest.raises(QuantSinkError, match="newest: its logits contain NaN or inf"):
        stream_losses(model, architecture, ids, VARIANTS[1], torch.arange(300))
    del model.lm_head.forward
    assert "forward" not in model.get_decoder().__dict__
    assert model.config._attn_implementation == attention
    assert model.training
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids[None, :50]).logits, before)


def test_a_pass_that_a_profile_made_does_not_run_again(tiny_llama: Build, tokenizer: Any, prose: Path) -> None:
    model = tiny_llama(initializer_range=0.3)
    architecture = read_decoder(model)
    read = read_text(tokenizer, str(prose), 301)
    ids, rows = stream_ids(read, 300), torch.arange(300)
    passes: Passes = {}
    position_shares(model, architecture, read, 300, bos=False, passes=passes)
    position_shares(model, architecture, read, 300, passes=passes)
    runs: list[int] = []
    model.get_decoder().layers[0].register_forward_hook(lambda *_: runs.append(1))
    again = stream_losses(model, architecture, ids, VARIANTS[0], rows, passes)
    assert not runs
    assert torch.equal(again, stream_losses(model, architecture, ids, VARIANTS[0], rows))
    assert len(runs) == 1
    stream_losses(model, architecture, ids, VARIANTS[1], rows, passes)
    assert len(runs) == 2


# The experiment


@pytest.mark.parametrize(("window", "sinks"), [(64, 4), (100, 1), (64, 16)])
def test_every_variant_but_full_attention_holds_equally_many_keys(window: int, sinks: int) -> None:
    full, *others = variants(window, sinks, seed=3)
    rows, columns = torch.arange(400), torch.arange(400)
    assert full.sees(rows, columns).sum(1).tolist() == list(range(1, 401))
    for variant in others:
        seen = variant.sees(rows, columns).sum(1)
        assert variant.budget == window + sinks
        assert int(seen.max()) == window + sinks
        assert set(seen[200:].tolist()) == {window + sinks}
    firsts = [v.kept for v in others if v.kept[:1] == (0,)]
    assert firsts == [tuple(range(sinks))] + ([(0,)] if sinks > 1 else [])
    control = others[-1].kept
    assert len(set(control)) == sinks
    assert all(16 <= position < 64 for position in control)
    assert control == variants(window, sinks, seed=3)[-1].kept
    assert len({variants(window, sinks, seed=seed)[-1].kept for seed in range(8)}) > 4


def test_buckets_hold_their_own_rows() -> None:
    rows = torch.arange(1, 100, 2)
    found = to_buckets(rows.double(), rows, 100, 30)
    assert [(b.start, b.end, b.scored) for b in found] == [(0, 30, 15), (30, 60, 15), (60, 90, 15), (90, 100, 5)]
    assert found[1].nll == sum(range(31, 60, 2))
    assert found[0].ppl == pytest.approx(math.exp(15))
    with pytest.raises(DataError, match="some hold no scored row"):
        to_buckets(rows.double(), rows, 100, 1)


def test_a_large_vocabulary_is_scored_in_part() -> None:
    assert scored_rows(300, 50_000).tolist() == list(range(300))
    rows = scored_rows(4096, 262_144)
    assert rows.tolist() == list(range(7, 4096, 8))
    assert len(scored_rows(4096, 10**7)) == 256


def test_the_experiment_is_plain_data(tiny_llama: Build, tokenizer: Any, prose: Path) -> None:
    model = tiny_llama(initializer_range=0.3)
    seen: list[tuple[str, int, int]] = []
    found = measure_streaming(
        model,
        tokenizer,
        name="tiny",
        text=str(prose),
        tokens=384,
        window=64,
        progress=lambda *step: seen.append(step),
    )
    assert seen[-1][1:] == (5, 5)
    assert (found.scored, found.budget, found.past, found.restricted, found.own) == (384, 68, 128, 2, 0)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [curve["variant"]["name"] for curve in data["curves"]] == [
        "full attention",
        "newest 68",
        "newest 64 + 4 first",
        "newest 67 + 1 first",
        "newest 64 + 4 of 16-63",
    ]
    firsts = [curve["buckets"][0]["nll"] for curve in data["curves"]]
    assert firsts == pytest.approx([firsts[0]] * 5, abs=1e-3)  # nothing is lost yet
    assert len({round(curve["buckets"][-1]["nll"], 3) for curve in data["curves"]}) == 5
    ids = stream_ids(read_text(tokenizer, str(prose), 385), 384)
    wanted = dense_losses(model, ids, dense(found.curves[2].variant, 384))
    assert data["curves"][2]["ppl_past"] == pytest.approx(float(wanted[128:].mean().exp()), rel=1e-3)
    page = markdown([streaming_table(found)])
    for needed in (
        "384 tokens in one sequence",
        "hold 68 keys",
        "2 layers are restricted; 0 sliding",
        "| 320-383 | 64",
    ):
        assert needed in page
    assert streaming_curves(found, "tiny").startswith(b"\x89PNG")


def test_a_length_is_chosen_that_the_model_has_room_for(tiny_llama: Build, tokenizer: Any, prose: Path) -> None:
    found = measure_streaming(tiny_llama(), tokenizer, name="tiny", text=str(prose), window=64)
    assert found.tokens == 512


def test_invalid_settings_are_refused(tiny_llama: Build, tiny_gemma: Build, tokenizer: Any, prose: Path) -> None:
    def call(model: Any, **options: Any) -> Any:
        return measure_streaming(model, tokenizer, name="m", **{"text": str(prose), "window": 64, **options})

    with pytest.raises(UsageError, match="streaming over 100 tokens: a window of 64 and 4 sinks needs 136"):
        call(tiny_llama(), tokens=100)
    with pytest.raises(UsageError, match="window 32, 4 sinks: at least 64"):
        call(tiny_llama(), window=32)
    with pytest.raises(UsageError, match="17 sinks"):
        call(tiny_llama(), sinks=17)
    with pytest.raises(UsageError, match="streaming tokens 513: the model takes at most 512"):
        call(tiny_llama(), tokens=513)
    with pytest.raises(ArchitectureError, match="no layer sees all of 300 tokens"):
        call(tiny_gemma(layer_types=["sliding_attention"] * 4), tokens=300)
    short = prose.with_name("short.txt")
    short.write_text("few words")
    with pytest.raises(DataError, match=r"data 'short\.txt' has 9 tokens, 257 are needed"):
        call(tiny_llama(), text=str(short), tokens=256)
    with pytest.raises(ArchitectureError, match="an encoder"):
        call(families.FAMILIES["bert"].build(), tokens=136)


@pytest.mark.real
@pytest.mark.slow
def test_a_real_model_falls_apart_without_its_sinks(smollm2: Path) -> None:
    from quantsink.models.source import find, quiet_loading

    with quiet_loading():
        source = find(str(smollm2))
        model, tokenizer = source.model("float32"), source.tokenizer()
    found = measure_streaming(model, tokenizer, name="SmolLM2", tokens=384, window=64)
    full, newest, sinks, one, control = (curve.ppl(found.past) for curve in found.curves)
    assert newest > 2 * sinks
    assert control > 2 * sinks
    assert sinks < 1.6 * full
    assert one == pytest.approx(sinks, rel=0.1)
