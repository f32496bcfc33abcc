"""Profiles of a model's heads against a full softmax in float64, and what they refuse."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from quantsink.errors import DataError, ModelError, UsageError
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
from quantsink.eval.lab.profile_results import (
    ALL,
    DEEP,
    FULL,
    SLIDING,
    BosMass,
    Head,
)
from quantsink.eval.lab.profile_weights import Text, observe, read_decoder, read_text, spread_rows

Build = Callable[..., Any]
SENTENCE = "The brown fox number %d jumps over. "
HARD_CAP = {"gemma2": {"attn_logit_softcapping": 0.3}}
"""Random weights make small scores: a cap that they feel."""
SIX = SENTENCE * 6 % tuple(range(6))


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


@pytest.mark.real
@pytest.mark.slow
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
