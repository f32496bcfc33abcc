"""Profiles of a model's heads against a full softmax in float64, and what they refuse."""

import copy
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from rich.console import Console
from torch import Tensor

from quantsink.errors import ArchitectureError, DataError, ModelError, UsageError
from quantsink.eval.lab import profile_weights
from quantsink.eval.lab.profile import (
    ProfileSettings,
    bos_mass,
    contrast_heads,
    list_heads,
    measure_profile,
    position_shares,
    read_sentences,
    sentence_preference,
    split_sentences,
    waking_tokens,
)
from quantsink.eval.lab.profile_compare import compare
from quantsink.eval.lab.profile_plots import contrast_scatter, share_bars, waking_bars
from quantsink.eval.lab.profile_results import (
    AGREES,
    ALL,
    DEEP,
    DISAGREES,
    FULL,
    IN_PART,
    SLIDING,
    BosMass,
    Contrast,
    Head,
    HeadContrast,
    HeadShares,
    PositionShares,
    Profile,
)
from quantsink.eval.lab.profile_tables import profile_tables
from quantsink.eval.lab.profile_weights import Text, observe, read_decoder, read_text, spread_rows
from quantsink.eval.lab.tables import Table, markdown
from quantsink.models.architecture import Architecture

Build = Callable[..., Any]
SENTENCE = "The brown fox number %d jumps over. "
HARD_CAP = {"gemma2": {"attn_logit_softcapping": 0.3}}
"""Random weights make small scores: a cap that they feel."""
SIX = SENTENCE * 6 % tuple(range(6))


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "prose.txt"
    path.write_text("".join(f"line {number * 7919 % 1000} of many, none like another.\n" for number in range(100)))
    return path


@pytest.fixture
def text(tokenizer: Any, prose: Path) -> Text:
    return read_text(tokenizer, str(prose), 1024)


def weights_of(model: Any, ids: Tensor) -> list[Tensor]:
    """`[B, H, L, L]` of each layer: the whole softmax, in float64, by transformers' eager attention."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    exact.set_experts_implementation("eager")  # the other knows no float64
    with torch.no_grad():
        found: list[Tensor] = list(exact(input_ids=ids, output_attentions=True).attentions)
    return found


def groups(weights: Tensor, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """First, newest and middle of one row `[..., L]`, spelled out."""
    own = weights[..., row, : row + 1]
    return own[..., :3].sum(-1), own[..., row - 9 :].sum(-1), own[..., 3 : row - 9].sum(-1)


def build(name: str, tiny_llama: Build, tiny_gemma: Build) -> Any:
    if name == "gemma":
        return tiny_gemma(initializer_range=0.3)
    return (
        tiny_llama(initializer_range=0.3)
        if name == "llama"
        else families.FAMILIES[name].build(**HARD_CAP.get(name, {}))
    )


@pytest.fixture(params=["llama", "gemma", "gpt_oss", "gemma2"])
def model(request: pytest.FixtureRequest, tiny_llama: Build, tiny_gemma: Build) -> Any:
    return build(request.param, tiny_llama, tiny_gemma)


# Where attention goes


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("rows", [None, 7])
def test_shares_are_those_of_the_whole_softmax(model: Any, text: Text, bos: bool, rows: int | None) -> None:
    architecture = read_decoder(model)
    found = position_shares(model, architecture, text, 120, windows=3, rows=rows, bos=bos)
    weights = weights_of(model, text.cut(120, 3, bos))
    chosen = spread_rows(120, rows).tolist()
    assert found.rows == 3 * len(chosen)
    assert len(found.heads) == sum(layer.heads for layer in architecture.attentions)
    for own in found.heads:
        layer = weights[own.head.layer][:, own.head.head]
        wanted = [torch.stack(part).mean() for part in zip(*(groups(layer, row) for row in chosen), strict=True)]
        got = torch.tensor([own.first, own.newest, own.middle], dtype=torch.float64)
        torch.testing.assert_close(got, torch.stack(wanted), atol=2e-5, rtol=0)
        assert own.learned == pytest.approx(1 - float(sum(wanted)), abs=2e-5)
        assert own.bos == pytest.approx(float(layer[:, chosen, 0].mean()), abs=2e-5)


def test_a_learned_sink_takes_its_share(text: Text) -> None:
    model = families.FAMILIES["gpt_oss"].build()
    found = position_shares(model, read_decoder(model), text, 64)
    assert all(own.learned > 0.001 for own in found.heads)
    for own in found.heads:
        assert own.first + own.newest + own.middle + own.learned == pytest.approx(1, abs=1e-5)


def test_sliding_layers_stand_apart(tiny_gemma: Build, text: Text) -> None:
    model = tiny_gemma(initializer_range=0.3)
    found = position_shares(model, read_decoder(model), text, 128, rows=None)
    kinds = {own.head.layer: own.head.kind for own in found.heads}
    assert kinds == {0: SLIDING, 1: FULL, 2: SLIDING, 3: FULL}
    weights = weights_of(model, text.cut(128, 1))
    for own in found.heads:
        assert own.seeing == (112 if own.head.kind == FULL else 16)  # of rows 16 to 127, those before 32
        if own.head.kind == SLIDING:
            seen = weights[own.head.layer][0, own.head.head, 16:32, :3].sum(-1).mean()
            assert own.first_seen == pytest.approx(float(seen), abs=2e-5)
            every = weights[own.head.layer][0, own.head.head, 16:, :3].sum(-1).mean()
            assert own.first == pytest.approx(float(every), abs=2e-5)
        else:
            assert own.first_seen == own.first
    assert [(m.kind, m.depth, m.heads) for m in found.means] == [
        (FULL, ALL, 8),
        (FULL, DEEP, 4),
        (SLIDING, ALL, 8),
        (SLIDING, DEEP, 4),
    ]
    deep = [own.first for own in found.heads if own.head.layer == 3]
    assert found.means[1].first == pytest.approx(sum(deep) / 4)


def test_a_window_that_left_the_first_tokens_behind_gives_no_share_of_them(tiny_gemma: Build, text: Text) -> None:
    model = tiny_gemma(sliding_window=12)
    found = position_shares(model, read_decoder(model), text, 64)
    sliding = [own for own in found.heads if own.head.kind == SLIDING]
    assert {(own.first, own.bos, own.seeing, own.first_seen) for own in sliding} == {(0.0, 0.0, 0, None)}
    assert {m.first_seen for m in found.means if m.kind == SLIDING} == {None}


def test_no_block_of_weights_is_large(tiny_llama: Build, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    plain = profile_weights.block_weights

    def watched(*arguments: Any) -> tuple[int, Tensor]:
        start, weights = plain(*arguments)
        shapes.append(weights.shape)
        return start, weights

    monkeypatch.setattr(profile_weights, "block_weights", watched)
    model = tiny_llama()
    position_shares(model, read_decoder(model), text, 512, rows=None)
    assert {shape[2] for shape in shapes} == {64, 48}  # 496 rows
    assert max(shape[3] for shape in shapes) == 512


def test_windows_with_and_without_bos_begin_with_the_same_text(text: Text) -> None:
    with_bos, without = text.cut(100, 3), text.cut(100, 3, bos=False)
    assert with_bos[:, 0].tolist() == [text.bos] * 3
    assert torch.equal(with_bos[:, 1:], without[:, :-1])
    assert without[1].tolist() == text.ids[100:200].tolist()


def test_documents_follow_each_other(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"text": letter * 30}) for letter in "ab"))
    found = read_text(tokenizer, str(tmp_path / "two.jsonl"), 40)
    assert found.ids.tolist() == tokenizer("a" * 30 + "b" * 10)["input_ids"]


def test_the_model_is_as_before(tiny_llama: Build, text: Text) -> None:
    model = tiny_llama().train()
    before = copy.deepcopy(model.state_dict())
    attention = model.config._attn_implementation
    architecture = read_decoder(model)
    position_shares(model, architecture, text, 64)
    model.get_decoder().layers[1].self_attn.k_proj.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn: its weights are not finite"):
        position_shares(model, architecture, text, 64)
    assert model.config._attn_implementation == attention
    assert all(module.training for module in model.modules())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items() if "layers.1.self_attn.k" not in n)


# Sentences


def test_sentences_are_cut_by_the_rule() -> None:
    document = "= Title =\n\nOne is here. Two runs\nover lines! not three. Four = 4.\nFive ends\n\nSix? Seven, too."
    assert list(split_sentences(document)) == ["One is here.", "Two runs over lines!", "Six?", "Seven, too."]


def test_the_choice_of_sentences_is_seeded_and_their_length_bounded(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("Too short. " + SENTENCE * 40 % tuple(range(40)) + "A" + "a" * 60 + ".")
    one, same, other = (read_sentences(tokenizer, str(path), 10, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one != other
    assert len({tuple(ids) for ids in one}) == 10
    assert all(20 <= len(ids) <= 40 for ids in one)
    with pytest.raises(DataError, match="has 40 sentences of 20 to 40 tokens, 41 are needed"):
        read_sentences(tokenizer, str(path), 41)


def test_preferences_are_those_of_each_sentence_alone(tokenizer: Any) -> None:
    model = families.FAMILIES["llama"].build(num_hidden_layers=3, initializer_range=0.3)
    families.plant(model, {1: [0, 2], 2: [1]}, gain=1.2)
    per_layer = model.config.num_attention_heads
    sentences = [tokenizer(SIX[start : start + size])["input_ids"] for start, size in enumerate((20, 31, 40, 33, 24))]
    found = sentence_preference(model, read_decoder(model), sentences, name="six", bos=0)
    shares = []
    for ids in sentences:
        weights = torch.cat(weights_of(model, torch.tensor([[0, *ids]])), 1)[0]  # [all heads, L, L]
        rows = [torch.stack(groups(weights, row)) for row in range(16, len(ids) + 1)]
        shares.append(torch.stack(rows).mean(0))
    wanted = torch.stack(shares)  # [sentences, 3, all heads]
    first, newest, middle = wanted.unbind(1)
    prefers = (first > newest) & (first > middle)
    assert found.sentences == 5
    assert found.rows == sum(len(ids) - 15 for ids in sentences)
    got = torch.tensor([[h.first, h.newest, h.middle] for h in found.heads], dtype=torch.float64)
    torch.testing.assert_close(got, wanted.mean(0).T, atol=2e-5, rtol=0)
    assert [h.sentences for h in found.heads] == prefers.sum(0).tolist()
    assert 0 < int(prefers.sum()) < prefers.numel()
    mean = wanted.mean(0)
    on_average = (mean[0] > mean[1]) & (mean[0] > mean[2])
    assert [h.prefers_first for h in found.heads] == on_average.tolist()
    assert found.share(ALL) == pytest.approx(float(on_average.double().mean()))
    assert found.share(DEEP) == pytest.approx(float(on_average[per_layer:].double().mean()))  # layers 1 and 2 of 3
    assert found.pairs(DEEP) == pytest.approx(float(prefers[:, per_layer:].double().mean()))


# Prose against code


@pytest.mark.parametrize("length", [17, 100])
def test_bos_mass_is_that_of_the_whole_softmax(tiny_llama: Build, text: Text, length: int) -> None:
    model = tiny_llama(initializer_range=0.3)
    architecture = read_decoder(model)
    found = bos_mass(model, architecture, text, length, 3)
    ids = text.cut(length, 3)
    wanted = torch.cat(weights_of(model, ids), 1)[..., 16:, 0].transpose(0, 1).flatten(1)  # [all heads, rows]
    torch.testing.assert_close(found.mass.double(), wanted, atol=2e-5, rtol=0)
    assert found.tokens.tolist() == ids[:, 16:].flatten().tolist()
    assert found.mean == pytest.approx(wanted.mean(1).tolist(), abs=2e-5)


def made_up(mass: list[list[float]], tokens: list[int], name: str = "made up") -> BosMass:
    return BosMass(name, True, 1, 16 + len(tokens), torch.tensor(mass), torch.tensor(tokens))


HEADS = tuple(Head(0, head, FULL, True) for head in range(4))


def test_heads_that_switch_are_counted_by_level() -> None:
    one = made_up([[0.9, 0.9], [0.99, 0.99], [0.2, 0.2], [0.85, 0.85]], [1, 2], "one")
    other = made_up([[0.2, 0.2], [0.1, 0.3], [0.81, 0.81], [0.4, 0.4]], [1, 2], "other")
    found = contrast_heads(HEADS, one, other)
    assert [h.head.head for h in found.strongest(2)] == [1, 0]
    assert found.strongest(1)[0].difference == pytest.approx(0.79)
    assert [h.head.head for h in found.switching()] == [0, 1, 2]
    assert [h.head.head for h in found.switching(0.98)] == [1]
    assert found.at_least(0.8) == (3, 1)
    assert found.means == pytest.approx((0.735, 0.4025))
    assert found.to_dict()["switching"] == {"0.8": 3, "0.98": 1}


def test_the_first_token_must_stay_in_sight(tiny_gemma: Build, text: Text) -> None:
    model = tiny_gemma()
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn sees 32 tokens.*take 32 or less"):
        bos_mass(model, read_decoder(model), text, 33, 1)
    assert bos_mass(model, read_decoder(model), text, 32, 1).rows == 16


# What wakes a head


def test_waking_tokens_are_ranked_by_their_mean(tokenizer: Any) -> None:
    a, b, c, d = tokenizer("abcd")["input_ids"]
    tokens = [a] * 3 + [b] * 4 + [c] * 2 + [d] * 11
    quiet = [1 - 0.02 * n for n in range(20)]  # dormant, and never awake
    woken = [0.2, 0.5, 0.6, 1.0, 1.0, 0.8, 1.0, 0.4, 0.4, *[1.0] * 11]  # dormant, awake once; c moves most, but is rare
    restless = [0.0, 0.0, *[1.0] * 18]  # dormant, awake twice
    found = waking_tokens(HEADS, made_up([quiet, woken, [0.1] * 20, restless], tokens), tokenizer, tokens=2)
    assert (found.dormant, found.never, found.rows) == (3, 1, 20)
    assert [own.head.head for own in found.heads] == [3, 1]
    second = found.heads[1]
    assert (second.awake_rows, second.types) == (1, 3)
    assert second.moved == pytest.approx(1 - sum(woken) / 20)
    assert [(t.token, t.count) for t in second.tokens] == [("a", 3), ("b", 4)]
    assert second.tokens[0].mean == pytest.approx(1.7 / 3)
    assert second.tokens[0].least == pytest.approx(0.4)
    assert second.tokens[1].mean == pytest.approx(0.05)
    everyone = made_up([woken] * 4, tokens)
    assert len(waking_tokens(HEADS, everyone, tokenizer, count=3).heads) == 3
    rare = waking_tokens(HEADS, everyone, tokenizer, min_count=4).heads[0]
    assert [t.token for t in rare.tokens] == ["b", "d"]


# What was published


def share(first: float, newest: float, layers: int = 4, length: int = 256, bos: float = 0.4) -> PositionShares:
    heads = tuple(
        HeadShares(Head(n, 0, FULL, n >= layers // 2), first, newest, 1 - first - newest, 0.0, bos, 9, first)
        for n in range(layers)
    )
    return PositionShares(length, True, 1, 9, heads)


def verdicts(shares: tuple[PositionShares, ...], one: float = 0.4, other: float = 0.3) -> list[str]:
    contrast = Contrast(("builtin:prose", "builtin:code"), True, 512, (9, 9), (HeadContrast(HEADS[0], one, other),))
    made: Any = Profile("m", "llama", 4, 0, "float32", "t", "", 0, shares, None, contrast, ())  # type: ignore[arg-type]
    return [comparison.verdict for comparison in compare(made)]


def test_agreement_is_read_off_the_figures() -> None:
    assert verdicts((share(0.5, 0.25),))[:3] == [AGREES, AGREES, AGREES]
    assert verdicts((share(0.5, 0.25), share(0.7, 0.2)))[:3] == [IN_PART, IN_PART, AGREES]
    assert verdicts((share(0.1, 0.6),))[:3] == [DISAGREES, DISAGREES, DISAGREES]
    assert verdicts((share(0.5, 0.25),))[-1] == AGREES
    assert verdicts((share(0.5, 0.25),), 0.3, 0.4)[-1] == DISAGREES


def test_a_claim_about_heads_is_counted_by_heads() -> None:
    """A layer's mean can hide a head that looks elsewhere."""
    one = share(0.7, 0.1)
    others = tuple(
        dataclasses.replace(h, head=dataclasses.replace(h.head, head=1), first=0.2, newest=0.6) for h in one.heads
    )
    assert verdicts((dataclasses.replace(one, heads=one.heads + others),))[2] == IN_PART


# What is refused


def test_encoders_are_refused() -> None:
    with pytest.raises(ArchitectureError, match="an encoder"):
        read_decoder(families.FAMILIES["bert"].build())


def test_short_texts_and_lengths_are_refused(tiny_llama: Build, tokenizer: Any, text: Text, prose: Path) -> None:
    model = tiny_llama()
    architecture = read_decoder(model)
    with pytest.raises(DataError, match=r"data 'prose\.txt' has 1,024 tokens, 1,200 are needed; name a longer text"):
        position_shares(model, architecture, text, 400, windows=3)
    with pytest.raises(UsageError, match="length 16: rows count from 16 on"):
        position_shares(model, architecture, text, 16)
    with pytest.raises(UsageError, match="length 513: the model takes at most 512"):
        measure_profile(model, tokenizer, name="m", text=str(prose), settings=ProfileSettings(lengths=(513,)))
    with pytest.raises(ModelError, match="they do not belong together"):
        observe(model, architecture, torch.tensor([[0, 258]]), torch.tensor([1]), lambda *_: None)


def test_attention_past_the_interface_is_refused(tiny_llama: Build, text: Text) -> None:
    model = tiny_llama()
    architecture = Architecture.of(model)
    model.get_decoder().layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ArchitectureError, match=r"layers\.0\.self_attn: its attention did not go through"):
        position_shares(model, architecture, text, 64)


# All of it


@pytest.fixture(params=["llama", "gemma"])
def profile(
    request: pytest.FixtureRequest, tiny_llama: Build, tiny_gemma: Build, tokenizer: Any, tmp_path: Path
) -> Profile:
    made = build(request.param, tiny_llama, tiny_gemma)
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 40 % tuple(range(40)))
    settings = ProfileSettings(lengths=(64, 128), share_tokens=256, sentences=8, contrast_windows=2, contrast_length=96)
    seen: list[tuple[str, int, int]] = []
    found = measure_profile(
        made,
        tokenizer,
        name="tiny",
        text=str(path),
        contrast=("builtin:prose", "builtin:code"),
        settings=settings,
        progress=lambda *step: seen.append(step),
    )
    ends = {name: (done, total) for name, done, total in seen}
    assert ends == {
        "position shares": (4, 4),
        "sentences": (8, 8),
        "BOS mass, builtin:prose": (2, 2),
        "BOS mass, builtin:code": (2, 2),
    }
    return found


def test_a_profile_is_plain_data(profile: Profile) -> None:
    data = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert [(s["length"], s["bos"], s["windows"]) for s in data["shares"]] == [
        (64, True, 4),
        (64, False, 4),
        (128, True, 2),
        (128, False, 2),
    ]
    assert data["contrast"]["length"] == (32 if profile.model_type.startswith("gemma") else 96)
    assert data["comparisons"][0]["verdict"] in (AGREES, IN_PART, DISAGREES)
    assert len(data["shares"][0]["heads"]) == profile.layers * 4
    assert data["sentences"]["shares"]["deep layers"]["heads"] == profile.layers * 2


def test_tables_say_what_they_rest_on(profile: Profile) -> None:
    grids = profile_tables(profile)
    page = markdown(profile_tables(profile))
    out = io.StringIO()
    for grid in grids:
        Console(file=out, width=200).print(grid.rich())
        assert all(len(row) == len(grid.columns) for row in grid.rows)
    for needed in ("192 ", "rows from 16 on", "8 sentences of text.txt (seed 0), with BOS"):
        assert needed in page
        assert needed in out.getvalue()
    first = profile.shares[0].means[0]
    assert f"{100 * first.first:.1f} %" in page
    assert ("where seen" in page) == (profile.sliding_layers > 0)


def test_a_cell_cannot_break_a_table() -> None:
    grid = Table("t", ("a", "b"), (("x|y", "[red]z"),), ())
    assert "| x\\|y | [red]z |" in grid.markdown()
    out = io.StringIO()
    Console(file=out, width=80).print(grid.rich())
    assert "[red]z" in out.getvalue()


def test_pictures_are_drawn(profile: Profile, tokenizer: Any) -> None:
    a, b = tokenizer("$'")["input_ids"]
    odd = waking_tokens(HEADS, made_up([[0.0, *[1.0] * 8]] * 4, [a] * 4 + [b] * 5), tokenizer)
    pictures = [
        share_bars(profile.shares, "shares"),
        contrast_scatter(profile.contrast, "contrast"),
        *(waking_bars(waking, "waking") for waking in (*profile.waking, odd)),
    ]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.real
def test_deep_heads_of_a_real_model_look_at_the_first_tokens(smollm2: Path) -> None:
    from quantsink.models.source import find, quiet_loading

    with quiet_loading():
        source = find(str(smollm2))
        model, tokenizer = source.model("float32"), source.tokenizer()
    architecture = read_decoder(model)
    text = read_text(tokenizer, "builtin:prose", 512)
    found = position_shares(model, architecture, text, 256, windows=2)
    deep = next(m for m in found.means if m.depth == DEEP)
    assert deep.heads == 135
    assert deep.first > 0.4
    assert deep.first > max(deep.newest, deep.middle)
    bottom = [own for own in found.heads if own.head.layer < 2]
    assert sum(own.first for own in bottom) / len(bottom) < 0.1
    mass = bos_mass(model, architecture, text, 256, 2)
    shares = [own.bos for own in found.heads]
    assert sum(abs(a - b) for a, b in zip(shares, mass.mean, strict=True)) / 270 < 0.02  # 128 rows against 240
    assert waking_tokens(list_heads(architecture), mass, tokenizer).dormant >= 2
